"""Cells of the zoo: a row is a module with layouts to try, a cell is a pair of module and layout.

A cell has one of two good outcomes. ``equal``: losses, logged values, buffers and all parameters are those of
``lightning.Trainer`` on one process that trains the same module on the same global batches. ``refused``: an error
raised by this package, in one paragraph, before any weight changed. All else is ``wrong``: other numbers, any other
error, a hang. ``outcomes.json`` records which it is, with the words of each refusal; :mod:`tests.zoo.record` writes it.

A file of the zoo holds ``ROWS``:

    ROWS = [
        Row("mlp", Mlp, vectors, equal="ddp, zero3, tensor"),
        Row("whole-batch statistics", Normed, vectors, equal="ddp", either="pipeline"),
    ]

Other packages of rows (:mod:`tests.libraries`) use the full names of their files as themes.
"""

from __future__ import annotations

import importlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from tests.parity.harness import QUIET, Losses, Saver
from tests.pool import Last, RankError, RankTimeout

# Distance to the reference, relative to the norm of a tensor. Rounding makes 1e-6; the smallest error seen in a split
# that was wrong was 3e-4.
TOLERANCE = 3e-5

# Layout -> (strategy, options, ranks).
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp": ("ddp", {}, 2),
    "zero1": ("zero1", {}, 2),
    "zero2": ("zero2", {}, 2),
    "zero3": ("zero3", {}, 2),
    "tensor": ("hybrid", {"tensor": 2, "shard": 1}, 2),
    "sequence": ("hybrid", {"tensor": 2, "shard": 1, "sequence_parallel": True}, 2),
    "pipeline": ("hybrid", {"pipeline": 2, "shard": 1}, 2),
    "interleaved": ("hybrid", {"pipeline": 2, "shard": 1, "schedule": "interleaved_1f1b"}, 2),
    "context": ("hybrid", {"context": 2, "shard": 1}, 2),
    "ulysses": ("hybrid", {"context": 2, "shard": 1, "attention": "ulysses"}, 2),
    "gather": ("hybrid", {"context": 2, "shard": 1, "attention": "gather"}, 2),
    "expert": ("hybrid", {"expert": 2, "shard": 2}, 2),
    "servers": ("parameter_server", {"servers": 2}, 2),
    "tensor x shard": ("hybrid", {"tensor": 2, "shard": 2}, 4),
    "pipeline x shard": ("hybrid", {"pipeline": 2, "shard": 2}, 4),
    "pipeline x tensor": ("hybrid", {"pipeline": 2, "tensor": 2, "shard": 1}, 4),
    "context x shard": ("hybrid", {"context": 2, "shard": 2}, 4),
}
# One process of ours, which saves and resumes as the layouts do.
SINGLE = "single"
_OWN: dict[str, tuple[str, dict[str, Any], int]] = {**LAYOUTS, SINGLE: ("single", {}, 1)}
# Data ranks of the layouts that have more than one.
DATA_RANKS = {name: options.get("shard", ranks) for name, (_, options, ranks) in LAYOUTS.items()}

Numbers = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Row:
    """One module and its cells.

    Args:
        name: unique in its file.
        make_module: builds the module; called under a fixed seed.
        make_data: ``make_data(batch_size)`` builds the training loader, or what ``fit`` takes instead. Loaders must not
            shuffle; in a random order, one process and several would still read the same samples.
        equal: layouts (see :data:`LAYOUTS`) on which it should train as on one process, separated by commas.
        either: layouts on which it may be refused as well.
        trainer: builds further options of both Trainers.
        observe: ``observe(trainer, module)`` returns numbers to compare after ``fit``, called on every rank.
        batch, steps: samples of a global batch, optimizer steps.
        tolerance: largest relative distance; see :data:`TOLERANCE`.
        synced: logged values to compare where ranks read different samples, too; else those logged of one sample.
        options: further options of the strategy, by layout.
        trainers: further options of our Trainer, by layout.
        late: refusals are of what comes after steps (validation, what is observed), when weights have changed.
        package: whose ``Trainer`` is the reference.
    """

    name: str
    make_module: Callable[[], pl.LightningModule]
    make_data: Callable[[int], Any]
    equal: str = ""
    either: str = ""
    trainer: Callable[[], dict[str, Any]] = dict
    observe: Callable[[Any, Any], Mapping[str, Any]] | None = None
    batch: int = 8
    steps: int = 3
    tolerance: float = TOLERANCE
    synced: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trainers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    late: bool = False
    package: str = "lightning.pytorch"

    def also_on(self, *layouts: str) -> Row:
        """Return the row with further layouts, on which it may be refused."""
        return replace(self, either=", ".join(filter(None, (self.either, *layouts))))

    @property
    def layouts(self) -> list[str]:
        """Names of the layouts it is tried on."""
        found = [name.strip() for name in f"{self.equal},{self.either}".split(",") if name.strip()]
        if len(set(found)) < len(found) or not set(found) <= _OWN.keys():
            raise ValueError(f"{self.name}: unknown or doubled layouts in {found}; there are {', '.join(_OWN)}.")
        return found


@dataclass
class Run:
    """Results of one rank in a cell.

    Attributes:
        losses: of each optimizer step, averaged over ranks.
        logged, tensors, observed: logged values, parameters and buffers by name, what the row observes.
        error: the last line of the traceback on; empty if none.
        ours: whether this package raised the error.
        when: time of the error (seconds; ranks share the clock).
        changed: whether a weight changed before the error.
        trace: the whole traceback.
    """

    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    tensors: Numbers = field(default_factory=dict)
    observed: Numbers = field(default_factory=dict)
    error: str = ""
    ours: bool = False
    when: float = 0.0
    changed: bool = False
    trace: str = ""


def rows(theme: str) -> list[Row]:
    """Return the rows of the file ``theme``: one of the zoo, or the full name of a module."""
    found: list[Row] = importlib.import_module(theme if "." in theme else f"tests.zoo.{theme}").ROWS
    return found


def find(theme: str, name: str) -> Row:
    """Return the row ``name`` of the file ``theme``."""
    return next(row for row in rows(theme) if row.name == name)


# ---- In a rank ------------------------------------------------------------------------------------------------------


class Watch(Losses):
    """Keeps the losses and remembers the weights that training began with."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Tensor, Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # The parts that this rank steps: `pl_module` shows whole parameters here, each a collective.
        view = getattr(getattr(trainer.strategy, "_wholes", None), "_view", None)
        held = pl_module.parameters()
        if view is not None:
            held = (share.part for share in view._parts.shares.values() if share.is_held)
        self._before = [(part, _local(part).detach().clone()) for part in held]

    def changed(self) -> bool:
        """Return whether weights of this rank differ from those at the start."""
        return any(not torch.equal(_local(part).detach(), before) for part, before in self._before)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.data
    return local


def train(
    theme: str,
    name: str,
    layout: str | None,
    certifies: bool = True,
    saves: str = "",
    resumes: str | None = None,
    after: int = 1,
    steps: int | None = None,
) -> Run | Last:
    """Train a row under ``layout`` on the ranks of the default process group; ``None``: with Lightning, alone.

    Args:
        theme, name, layout: which.
        certifies: whether the run has the certificate that it has by default.
        saves: path of a checkpoint; empty: none.
        resumes: path of a checkpoint to resume.
        after: steps after which it is saved.
        steps: optimizer steps of the whole run; ``None``: the row's.
    """
    warnings.simplefilter("ignore")
    row, watch, run = find(theme, name), Watch(), Run()
    row = replace(row, steps=steps or row.steps)
    torch.manual_seed(3)
    module = row.make_module()
    try:
        trainer, data = _prepared(row, layout, [watch, *([Saver(saves, "batch", after)] if saves else [])], certifies)
        torch.manual_seed(5)
        trainer.fit(module, *(data if isinstance(data, tuple) else [data]), ckpt_path=resumes)
        run.losses = watch.record.losses
        run.logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if row.observe:
            run.observed = {key: _numbers(value) for key, value in row.observe(trainer, module).items()}
        run.tensors = tensors_of(trainer, module, layout)
    except BaseException as error:
        run.when, run.error, run.trace = time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc()
        notes = getattr(error, "__notes__", [])
        run.error, run.ours = " ".join([run.error, *notes]), is_raised_by_us(error) or bool(notes)
        with suppress(Exception):
            run.changed = watch.changed()
    # Where ranks are processes of a launcher, it ends those that wait for one that failed.
    return Last(run) if run.error and layout is not None else run


def _prepared(row: Row, layout: str | None, first: list[Any], certifies: bool) -> tuple[Any, Any]:
    options = {**QUIET, "max_steps": row.steps, "log_every_n_steps": 1, **row.trainer()}
    options["callbacks"] = [*first, *options.get("callbacks", [])]
    options["enable_checkpointing"] |= any(isinstance(callback, Saver) for callback in first)
    micro = row.batch // options.get("accumulate_grad_batches", 1)
    if layout is None:
        return importlib.import_module(row.package).Trainer(devices=1, **options), row.make_data(micro)
    from trainwright.strategies.contract.registry import make_strategy
    from trainwright.trainer.trainer import Trainer

    name, chosen, ranks = _OWN[layout]
    choice = {} if certifies else {"certificate": "off"}
    strategy = make_strategy(name, **chosen, **choice, **row.options.get(layout, {}))
    options |= row.trainers.get(layout, {})
    return Trainer(strategy=strategy, devices=ranks, **options), row.make_data(micro // DATA_RANKS.get(layout, 1))


def tensors_of(trainer: Any, module: pl.LightningModule, layout: str | None) -> Numbers:
    found = dict(module.named_parameters() if layout is None else trainer.strategy.whole_parameters())
    # state_dict() has those of all stages, as a checkpoint would; it gathers every parameter as well.
    buffers = dict(module.named_buffers())
    kept = module.state_dict() if buffers else {}
    found |= {f"buffer {name}": kept[name] for name in buffers if isinstance(kept.get(name), Tensor)}
    return {name: _numbers(tensor) for name, tensor in found.items()}


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    array: np.ndarray[Any, Any] = torch.as_tensor(value).detach().cpu().clone().numpy()
    return array


def is_raised_by_us(error: BaseException) -> bool:
    """Return whether code of this package raised, rather than a library."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("trainwright.")


# ---- In the parent --------------------------------------------------------------------------------------------------


def tried(
    ranks: Callable[..., list[Any]], theme: str, row: Row, layouts: Mapping[str, bool], timeout: float
) -> dict[str, str]:
    """Try cells of a row: layout -> ``equal``, ``refused: MESSAGE`` or ``wrong: WHAT``, in one line.

    Args:
        ranks: runs a function on ranks; see :mod:`tests.pool`.
        theme, row: the row.
        layouts: layout -> whether its run has the certificate that it has by default.
        timeout: seconds until a cell counts as hung.

    Raises:
        AssertionError: if Lightning fails on one process.
    """
    reference, outcomes = cache(partial(alone, ranks, theme, row)), {}
    for layout, certifies in layouts.items():
        try:
            runs = _runs(ranks, timeout, theme, row.name, layout, certifies)
        except AssertionError as error:
            outcomes[layout] = f"wrong: {error}"
            continue
        failed = [run for run in runs if run.error]
        first = min(failed, key=lambda run: run.when, default=None)
        outcomes[layout] = _compared(row, reference(), runs, layout) if first is None else _judged(first, row.late)
    return outcomes


def _runs(ranks: Callable[..., list[Any]], timeout: float, theme: str, name: str, layout: str, *args: Any) -> list[Run]:
    """Return what each rank that ended says of :func:`train`; raises an AssertionError if they hung or died."""
    try:
        answers = ranks(train, _OWN[layout][2], theme, name, layout, *args, timeout=timeout)
    except RankTimeout:
        raise AssertionError("hung") from None
    except RankError as error:
        raise AssertionError(f"died: {' '.join(str(error).split())[:300]}") from None
    return [run for run in answers if run is not None]


def _compared(row: Row, reference: Run, runs: list[Run], layout: str) -> str:
    found = [text for run in runs for text in _differences(row, reference, run, layout)]
    return f"wrong: {found[0]} (and {len(found) - 1} more)" if found else "equal"


def resumed(
    ranks: Callable[..., list[Any]],
    theme: str,
    row: Row,
    layouts: tuple[str, str],
    folder: str,
    timeout: float,
    after: int = 1,
    steps: int | None = None,
) -> str:
    """Save a step of a row under one layout and resume it under another; returns as :func:`tried` does.

    Args:
        after: the step.
        steps: optimizer steps in all; ``None``: the row's.
    """
    path = f"{folder}/saved"
    for layout, saves, resumes in ((layouts[0], path, None), (layouts[1], "", path)):
        runs = _runs(ranks, timeout, theme, row.name, layout, False, saves, resumes, after, steps)
        for run in runs:
            assert not run.error, run.trace
    reference = alone(ranks, theme, row, steps)
    return _compared(row, replace(reference, losses=reference.losses[-len(runs[0].losses) :]), runs, layouts[1])


def alone(ranks: Callable[..., list[Any]], theme: str, row: Row, steps: int | None = None) -> Run:
    """Train a row with Lightning on one process; raises an AssertionError if that fails."""
    (reference,) = ranks(train, 1, theme, row.name, None, steps=steps, init_group=False)
    assert not reference.error, f"Lightning itself, on one process: {reference.trace}"
    return cast(Run, reference)


def _judged(run: Run, late: bool) -> str:
    said = " ".join(run.error.split())
    if not run.ours:
        return f"wrong: crashed: {said[:400]}"
    if run.changed and not late:
        return f"wrong: refused after weights changed: {said[:400]}"
    if "\n" in run.error.strip():
        return f"wrong: refused in several paragraphs: {said[:400]}"
    return f"refused: {said.partition(': ')[2]}"


def _differences(row: Row, reference: Run, run: Run, layout: str) -> Iterator[str]:
    if len(reference.losses) != len(run.losses):
        yield f"{len(run.losses)} losses instead of {len(reference.losses)}"
    for step, (ours, theirs) in enumerate(zip(run.losses, reference.losses, strict=False)):
        if not abs(ours - theirs) <= row.tolerance * max(abs(theirs), 1e-3):
            yield f"loss of step {step}: {ours:.7g} instead of {theirs:.7g}"
    for key, theirs in reference.logged.items():
        if DATA_RANKS.get(layout, 1) > 1 and key not in row.synced:
            continue
        ours = run.logged.get(key, float("nan"))
        if not abs(ours - theirs) <= 3 * row.tolerance * max(abs(theirs), 1e-3):
            yield f"logged {key}: {ours:.7g} instead of {theirs:.7g}"
    yield from tensor_differences("parameter ", reference.tensors, run.tensors, row.tolerance)
    yield from tensor_differences("observed ", reference.observed, run.observed, row.tolerance)


def tensor_differences(what: str, theirs: Numbers, ours: Numbers, tolerance: float) -> Iterator[str]:
    for name, expected in theirs.items():
        found, buffer = ours.get(name), name.startswith("buffer ")
        if found is None:
            if not buffer:
                yield f"{what}{name} is missing"
            continue
        if found.shape != expected.shape:
            if buffer:
                continue
            yield f"{what}{name} has shape {found.shape} instead of {expected.shape}"
            continue
        distance = float(np.linalg.norm((found.astype(np.complex128) - expected).ravel()))
        norm = float(np.linalg.norm(np.asarray(expected, dtype=np.complex128).ravel()))
        if not distance <= tolerance * max(norm, 1e-2):
            yield f"{what}{name}: off by {distance:.2e} of norm {norm:.2e}"
