"""What all faults have in common: whom they strike, when, and how often."""

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

FOLDER = "faults"
"""Folder in the Trainer's ``default_root_dir`` that remembers what has struck."""

_STEP = "training_step"
_log = logging.getLogger("trainwright.inject")


class Firings:
    """How often each fault has struck a rank, kept in a file that outlives the process.

    The file is JSON: sentence -> list of ``{"step": optimizer step, "time": seconds since 1970}``.

    Args:
        folder: in which the file is; made when something strikes.
        rank: the global rank.
    """

    # A thread that writes a checkpoint may be struck while the one that trains is.
    _writing = threading.Lock()

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank_{rank}.json"

    def of(self, sentence: str) -> list[dict[str, Any]]:
        """The firings of one fault, in the order of time."""
        found: list[dict[str, Any]] = self._read().get(sentence, [])
        return found

    def add(self, sentence: str, step: int) -> None:
        """Write down that a fault strikes now; on return it is on the disk."""
        with self._writing:
            known = self._read()
            known.setdefault(sentence, []).append({"step": step, "time": time.time()})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                json.dump(known, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            # At once: a fault of another kind may end this process in between.
            os.replace(partial, self.path)

    def _read(self) -> dict[str, Any]:
        try:
            known: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return known


class Fault(Callback):
    """A fault of one kind; made by the functions of :mod:`trainwright.callbacks.inject`.

    Subclasses say in :meth:`strike` what happens, at the beginning of a step that is due.

    Args:
        rank: global rank that is struck; ``None``: every rank.
        at_step: optimizer step.
        times: how often a rank is struck, restarts included; ``None``: whenever the step is reached.
    """

    sentence = ""
    """As a person would type it."""

    def __init__(self, rank: int | None, at_step: int, times: int | None) -> None:
        self.rank = rank
        self.at_step = at_step
        self.times = times
        self.step = 0
        """The optimizer step that runs, or ran last."""
        self._firings: Firings | None = None
        self._key = ""
        self._before = -1  # the step before it that ran in this process
        self._struck = False  # since the step was reached

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what has struck before."""
        if stage != "fit":
            return
        self._firings = Firings(Path(trainer.default_root_dir) / FOLDER, trainer.global_rank)
        self._key = self._key_among(trainer)
        if self.rank is not None and self.rank >= trainer.world_size:
            rank_zero_warn(f"{self.sentence} strikes nobody: this run has {trainer.world_size} rank(s), from 0 on.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch; a step that lies behind the beginning is not due."""
        self.step, self._struck = trainer.global_step, False
        self._before = self.step - 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Strike, if the step is due."""
        self.reach(trainer)
        if self.is_due(trainer):
            self.fire(trainer)
            self.strike(trainer, pl_module)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steps are reached again, the one that was struck too."""
        self.step, self._struck = trainer.global_step, False
        self._before = self.step - 1

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What happens."""

    # ---- when -------------------------------------------------------------------------------------------------------

    def reach(self, trainer: Trainer) -> None:
        """Keep in mind which step runs. With several optimizers steps are counted in leaps; none in between is lost."""
        step = trainer.global_step
        if step != self.step:
            self._before, self.step, self._struck = self.step, step, False

    def strikes(self, trainer: Trainer) -> bool:
        """Whether this rank is meant."""
        return self.rank is None or self.rank == trainer.global_rank

    def is_due(self, trainer: Trainer) -> bool:
        """Whether the step has been reached on a rank that is meant, and the fault has not struck enough."""
        is_now = self._before < self.at_step <= self.step and not self._struck
        return is_now and self.strikes(trainer) and self.has_more()

    def has_more(self) -> bool:
        """Whether the fault has not struck this rank ``times`` times yet."""
        if self._firings is None:
            return False  # no fit
        return self.times is None or len(self._firings.of(self._key)) < self.times

    def fire(self, trainer: Trainer) -> None:
        """Write down, before it happens, that the fault strikes; say so in the log of this rank."""
        assert self._firings is not None
        self._struck = True
        self._firings.add(self._key, self.step)
        self.say(trainer)

    def say(self, trainer: Trainer) -> None:
        """Tell the log of this rank."""
        _log.warning("injected on rank %d at step %d: %s", trainer.global_rank, self.step, self._key)

    def _key_among(self, trainer: Trainer) -> str:
        """The sentence; with a number where the same one was said before, since each strikes for itself."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        alike = [each for each in callbacks if isinstance(each, Fault) and each.sentence == self.sentence]
        number = next(index for index, each in enumerate(alike) if each is self)
        return self.sentence if number == 0 else f"{self.sentence} #{number + 1}"


class StepFault(Fault):
    """A fault within ``training_step``: what :meth:`around` makes of it runs instead, for one micro-batch.

    A pipeline runs the step once for each of its parts of the micro-batch.
    """

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put :meth:`around` around the module's step."""
        self.surround(pl_module)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``step(*args, **kwargs)``, which is the user's, with the fault in it; the result is the step's."""
        return step(*args, **kwargs)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Give the module its step back."""
        self.release(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the module its step back."""
        self.release(pl_module)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module its step back: the batch that was struck does not end."""
        super().on_gone_back(trainer, pl_module)
        self.release(pl_module)

    def surround(self, pl_module: LightningModule) -> None:
        """Have the module's ``training_step`` run within :meth:`around`."""
        step = pl_module.__dict__.get(_STEP)
        if not isinstance(step, _Surrounded):
            step = pl_module.__dict__[_STEP] = _Surrounded(pl_module)
        if self not in step.faults:
            step.faults.append(self)

    def release(self, pl_module: LightningModule) -> None:
        """Undo :meth:`surround`; does nothing when that is done."""
        step = pl_module.__dict__.get(_STEP)
        if not isinstance(step, _Surrounded) or self not in step.faults:
            return
        step.faults.remove(self)
        if not step.faults:
            step.restore()


class _Surrounded:
    """Stands for a module's ``training_step`` while faults are in it."""

    def __init__(self, module: LightningModule) -> None:
        self.faults: list[StepFault] = []
        self.__wrapped__ = module.training_step  # by this name Lightning finds out which arguments it takes
        self._attributes = module.__dict__
        self._own = self._attributes.get(_STEP)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step: Any = self.__wrapped__
        for fault in self.faults:
            step = partial(_run, fault, step)
        return step(*args, **kwargs)

    def restore(self) -> None:
        if self._own is None:
            del self._attributes[_STEP]
        else:
            self._attributes[_STEP] = self._own


def _run(fault: StepFault, step: Any, *args: Any, **kwargs: Any) -> Any:
    return fault.around(step, args, kwargs)
