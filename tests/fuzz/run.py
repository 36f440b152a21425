"""Runs of programs, in a rank: what a rank saw of each micro-batch, step, epoch and evaluation, and its tensors."""

from __future__ import annotations

import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.fuzz import data
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.pieces import Interrupted, Stopper
from tests.fuzz.program import GLOBAL_BATCH, Program, make_callbacks, make_loaders, make_module, trainer_options
from tests.pool import Last
from tests.zoo.cells import Numbers, Watch, is_raised_by_us, tensors_of
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

Values = dict[str, float]


@dataclass
class Run:
    """What one rank saw.

    Attributes:
        data_rank: its place among ranks that read different samples.
        losses, ids: of each optimizer step: the sum of what ``training_step`` returned, divided as the loop divides it;
            the samples read.
        steps: learning rates and logged values after each step.
        epochs, validations: logged values at each end.
        tensors: parameters and buffers at the end.
        after: values and predictions of what followed ``fit``.
        error, ours, when, changed, trace: of an error; see :class:`tests.zoo.cells.Run`.
    """

    data_rank: int = 0
    losses: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    steps: list[Values] = field(default_factory=list)
    epochs: list[Values] = field(default_factory=list)
    validations: list[Values] = field(default_factory=list)
    tensors: Numbers = field(default_factory=dict)
    after: Numbers = field(default_factory=dict)
    error: str = ""
    ours: bool = False
    when: float = 0.0
    changed: bool = False
    trace: str = ""


class Recorder(pl.Callback):
    """Fills a :class:`Run`; the last of all callbacks."""

    def __init__(self, run: Run, waves: int) -> None:
        self.run, self.waves, self._steps = run, waves, 0
        self._parts: list[tuple[float, list[int], Values]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        if hasattr(trainer.strategy, "ranks"):  # one of this package
            self.run.data_rank = ranks_of(trainer.strategy).data_rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        logged = _values(trainer)
        self._parts.append((float(loss), batch.get("a", batch)["id"].tolist(), logged))
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.run.losses.append(sum(loss for loss, _, _ in self._parts))
        self.run.ids.append([each for _, ids, _ in self._parts for each in ids])
        # One process reads one after the other what ranks read at once.
        at_once = [logged["loss_step"] for _, _, logged in self._parts[-self.waves :] if "loss_step" in logged]
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        step = {f"lr {place}": float(rate) for place, rate in enumerate(rates)}
        step |= {key: value for key, value in logged.items() if key.endswith(("_step", "_norm"))}
        if at_once:
            step["loss_step"] = sum(at_once) / len(at_once)
        self.run.steps.append(step)
        self._parts.clear()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.validations.append({key: value for key, value in _values(trainer).items() if key.startswith("val_")})

    # Values of an epoch are reduced after on_train_epoch_end.
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._keep_epoch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._keep_epoch(trainer)

    def _keep_epoch(self, trainer: Any) -> None:
        found = {key: value for key, value in _values(trainer).items() if not key.endswith(("_step", "_norm"))}
        if found:
            self.run.epochs.append(found)


def _values(trainer: Any) -> Values:
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def train(
    program: Program, layout: str | None, parts: int, waves: int = 1, saves: str = "", resumes: str | None = None
) -> Run | Last:
    """Run a program on the ranks of the default process group.

    Args:
        program: what to run.
        layout: its layout; ``None``: Lightning's Trainer on one process.
        parts: micro-batches of a step, on all data ranks.
        waves: micro-batches of one process that a layout with which it is compared reads at once.
        saves: path to save to after ``program.stop`` steps; empty: the run is not interrupted.
        resumes: path to resume from.
    """
    warnings.simplefilter("ignore")
    run, watch = Run(), Watch()
    try:
        module = make_module(program)
        stopper = [Stopper(program.stop, saves)] if saves else []
        callbacks = [watch, *make_callbacks(program), Recorder(run, waves), *stopper]
        trainer = _trainer(program, layout, parts, callbacks)
        torch.manual_seed(5)
        _fit(program, trainer, module, GLOBAL_BATCH // parts, resumes)
        run.tensors = tensors_of(trainer, module, layout)
        run.after = _after(program, trainer, module)
    except Interrupted:
        pass
    except BaseException as error:
        run.when, run.error, run.trace = time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc()
        notes = getattr(error, "__notes__", [])
        run.error, run.ours = " ".join([run.error, *notes]), is_raised_by_us(error) or bool(notes)
        with suppress(Exception):
            run.changed = watch.changed()
    return Last(run) if run.error and layout is not None else run


def _fit(program: Program, trainer: Any, module: Any, batch: int, resumes: str | None) -> None:
    training, validating = make_loaders(program, batch)
    trainer.fit(module, training, validating if program.validation else None, ckpt_path=resumes)


def _after(program: Program, trainer: Any, module: Any) -> Numbers:
    """Evaluate twice after training."""
    found: Numbers = {}
    verbs = ("validate", "test", "predict") if program.after == "all" else (program.after,) if program.after else ()
    for verb in (*verbs, *verbs):
        _, loader = make_loaders(program, GLOBAL_BATCH)
        if verb == "predict":
            if program.loader == "own_batch_sampler" and type(trainer) is pl.Trainer:
                loader = data.own_sampler(loader.dataset, 4)  # Lightning predicts in the order of the data set
            rows = [row.reshape(-1).double() for batch in trainer.predict(module, loader) for row in batch]
            found |= {f"{len(found)} prediction": torch.cat(rows).numpy()}
        else:
            values = getattr(trainer, verb)(module, loader, verbose=False)[0]
            found |= {f"{len(found)} {key}": torch.tensor(value).double().numpy() for key, value in values.items()}
    return found


def _trainer(program: Program, layout: str | None, parts: int, callbacks: list[Any]) -> Any:
    options = {**trainer_options(program), "callbacks": callbacks}
    options["enable_checkpointing"] |= any(isinstance(each, Stopper) for each in callbacks)
    if program.validation == "steps":
        data_ranks = 1 if layout is None else LAYOUTS[layout].data_ranks
        options["val_check_interval"] = 2 * parts // data_ranks
    if "schedule" in program.options:
        ranks = 1 if layout is None else LAYOUTS[layout].data_ranks
        scheduler = GradientAccumulationScheduler({0: parts // ranks, 1: 2 * parts // ranks})
        options["callbacks"], parts = [scheduler, *callbacks], ranks
    if layout is None:
        return pl.Trainer(devices=1, accumulate_grad_batches=parts, **options)
    chosen = LAYOUTS[layout]
    accumulation = {"accumulate_grad_batches": parts // chosen.data_ranks}
    if "global_batch" in program.options:
        accumulation = {"global_batch_size": GLOBAL_BATCH}
    if program.precision == "16-mixed":
        # Larger than a gradient's inverse, steps would be skipped, of other layouts others.
        options["loss_scale"] = {"initial": 256}
    return Trainer(
        strategy=make_strategy(chosen.strategy, **chosen.options),
        devices=chosen.ranks,
        **accumulation,
        **options,
    )
