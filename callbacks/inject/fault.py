"""Base of all faults: target rank, step and count."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.callbacks.inject.rules import STEP

FOLDER = "faults"
"""Folder of recorded strikes in the Trainer's ``default_root_dir``."""

_log = logging.getLogger("trainwright.inject")


class Firings:
    """Recorded strikes of each fault on a rank, in a file that survives the process.

    The file is JSON: sentence -> list of ``{"step": optimizer step, "time": unix seconds}``.

    Args:
        folder: of the file; created by the first strike.
        rank: the global rank.
    """

    # A checkpoint thread may be struck while the training thread is.
    _writing = threading.Lock()

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank_{rank}.json"

    def of(self, sentence: str) -> list[dict[str, Any]]:
        """Return the strikes of one fault, in order of time."""
        found: list[dict[str, Any]] = self._read().get(sentence, [])
        return found

    def add(self, sentence: str, step: int) -> None:
        """Record a strike durably."""
        with self._writing:
            known = self._read()
            known.setdefault(sentence, []).append({"step": step, "time": time.time()})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                json.dump(known, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            # Atomic: another fault may end this process at any time.
            os.replace(partial, self.path)

    def _read(self) -> dict[str, Any]:
        try:
            known: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return known


class Fault(Callback):
    """A fault; created by the functions of :mod:`trainwright.callbacks.inject`. Subclasses implement :meth:`strike`.

    Args:
        rank: global rank to strike; ``None``: every rank.
        at_step: optimizer step.
        times: strikes per rank, restarts included; ``None``: whenever the step is reached.
        **options: of the kind of fault; they become attributes.

    Attributes:
        step: the current or last optimizer step.
    """

    sentence = ""
    """The expression that a user would type."""

    def __init__(self, rank: int | None, at_step: int, times: int | None, **options: Any) -> None:
        self.rank = rank
        self.at_step = at_step
        self.times = times
        vars(self).update(options)
        self.step = 0
        self._firings: Firings | None = None
        self._key = ""
        self._before = -1  # the previous step in this process
        self._struck = False  # in this step

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read recorded strikes."""
        if stage != "fit":
            return
        self._firings = Firings(Path(trainer.default_root_dir) / FOLDER, trainer.global_rank)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        alike = [each for each in callbacks if isinstance(each, Fault) and each.sentence == self.sentence]
        number = next(index for index, each in enumerate(alike) if each is self)
        self._key = self.sentence if number == 0 else f"{self.sentence} #{number + 1}"  # equal faults count apart
        if self.rank is not None and self.rank >= trainer.world_size:
            rank_zero_warn(f"{self.sentence} strikes no rank: this run has {trainer.world_size} rank(s), from 0 on.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at the current step; earlier ones are not due."""
        self.step, self._struck = trainer.global_step, False
        self._before = self.step - 1

    on_gone_back = on_train_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Strike if due."""
        self.reach(trainer)
        if self.is_due(trainer):
            self.fire(trainer)
            self.strike(trainer, pl_module)

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inject the fault."""

    # ---- when -------------------------------------------------------------------------------------------------------

    def reach(self, trainer: Trainer) -> None:
        """Track the current step. With several optimizers the count may skip numbers, which are not missed."""
        step = trainer.global_step
        if step != self.step:
            self._before, self.step, self._struck = self.step, step, False

    def strikes(self, trainer: Trainer) -> bool:
        """Return whether this rank is targeted."""
        return self.rank is None or self.rank == trainer.global_rank

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether the fault must strike this rank now."""
        is_now = self._before < self.at_step <= self.step and not self._struck
        return is_now and self.strikes(trainer) and self.has_more()

    def has_more(self) -> bool:
        """Return whether the fault may strike this rank again."""
        if self._firings is None:
            return False  # not fitting
        return self.times is None or len(self._firings.of(self._key)) < self.times

    def fire(self, trainer: Trainer) -> None:
        """Record the strike in advance, and log it."""
        assert self._firings is not None
        self._struck = True
        self._firings.add(self._key, self.step)
        self.say(trainer)

    def say(self, trainer: Trainer) -> None:
        """Log the strike on this rank."""
        _log.warning("injected on rank %d at step %d: %s", trainer.global_rank, self.step, self._key)


class StepFault(Fault):
    """A fault within ``training_step``: :meth:`around` runs in its place for one micro-batch (in a pipeline, once per
    part of it).
    """

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's step in :meth:`around`."""
        self.surround(pl_module)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's ``step(*args, **kwargs)`` with the fault in it, and return its result."""
        return step(*args, **kwargs)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Restore the module's step."""
        self.release(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the module's step."""
        self.release(pl_module)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's step: the struck batch does not end."""
        super().on_gone_back(trainer, pl_module)
        self.release(pl_module)

    def surround(self, pl_module: LightningModule) -> None:
        """Run the module's ``training_step`` within :meth:`around`."""
        step = pl_module.__dict__.get(STEP)
        if not isinstance(step, _WrappedStep):
            step = pl_module.__dict__[STEP] = _WrappedStep(pl_module)
        if self not in step.faults:
            step.faults.append(self)

    def release(self, pl_module: LightningModule) -> None:
        """Undo :meth:`surround`. Idempotent."""
        step = pl_module.__dict__.get(STEP)
        if not isinstance(step, _WrappedStep) or self not in step.faults:
            return
        step.faults.remove(self)
        if not step.faults:
            step.restore()


class _WrappedStep:
    """Replacement of a module's ``training_step`` while faults are in it."""

    def __init__(self, module: LightningModule) -> None:
        self.faults: list[StepFault] = []
        self.__wrapped__ = module.training_step  # Lightning inspects its signature by this name
        self._attributes = module.__dict__
        self._own = self._attributes.get(STEP)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step: Any = self.__wrapped__
        for fault in self.faults:
            step = partial(lambda fault, step, *args, **kwargs: fault.around(step, args, kwargs), fault, step)
        return step(*args, **kwargs)

    def restore(self) -> None:
        if self._own is None:
            del self._attributes[STEP]
        else:
            self._attributes[STEP] = self._own
