"""Batch sizes, with train = micro x accumulation x data ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.tools.deepspeed.table import MAPPED
from trainwright.tools.deepspeed.themes.layout import RequestedLayout
from trainwright.tools.deepspeed.translation import Translation

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_KEYS = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class _Sizes:
    """Sizes in the file, and data ranks; None: unknown."""

    train: int | None
    micro: int | None
    accumulation: int | None
    ranks: int | None


def translate_batch(t: Translation, chosen: RequestedLayout) -> None:
    """Decide global_batch_size, micro_batch_size and accumulation."""
    for path in _KEYS:
        t.say(path, MAPPED, "from the recipe and the other sizes" if t.is_auto(path) else "")
    auto = [path for path in _KEYS if t.is_auto(path)]
    if auto and t.recipe is None:
        t.refuse(
            f'{", ".join(auto)}: "auto", and there is no recipe to take it from; type recipe=<name>, or write numbers'
        )
    train, micro, accumulation = (None if t.is_auto(path) else t.value(path) for path in _KEYS)
    sizes = _Sizes(train, micro, accumulation, chosen.data_ranks)
    if _contradictory(t, sizes):
        return
    if "pipeline" in chosen.axes:
        _pipeline(t, sizes)
    elif train or micro or accumulation:
        _plain(t, sizes)


def _contradictory(t: Translation, s: _Sizes) -> bool:
    """Refuse inconsistent sizes, unless they were typed."""
    native = ("global_batch_size", "micro_batch_size", "accumulation.steps")
    if s.train is None or any(key in t.typed for key in native):
        return False
    if s.micro is None and s.accumulation is None and t.has(MICRO):
        return False
    per_rank = (s.micro or 1) * (s.accumulation or 1)
    made = [f"{size} ({path})" for path, size in ((MICRO, s.micro), (ACCUMULATION, s.accumulation)) if size]
    if s.ranks is None:
        if s.train % per_rank:
            made_by = " x ".join(made)
            t.refuse(
                f"{TRAIN} is {s.train}, which is not a multiple of {made_by}; with the data ranks they must make it"
            )
        return s.train % per_rank != 0
    complete, product = len(made) == 2, per_rank * s.ranks
    if s.train == product or (not complete and s.train % product == 0):
        return False
    remedy = f"write {product}, or take one of the three out" if complete else f"write a multiple of {product}"
    if s.train % per_rank == 0:
        needed = s.train // per_rank
        remedy += f", or type devices= for {needed} data rank{'' if needed == 1 else 's'}"
    outcome = f"make {product}" if complete else "do not divide it"
    t.refuse(f"{TRAIN} is {s.train}, but {' x '.join([*made, str(s.ranks)])} data rank(s) {outcome}; {remedy}")
    return True


def _plain(t: Translation, s: _Sizes) -> None:
    micro = _share(t, s) if s.train is not None and s.micro is None else s.micro
    if micro is not None:
        t.set("micro_batch_size", micro, by=_first(t, MICRO, TRAIN))
    if s.train is not None:
        t.set("global_batch_size", s.train, by=TRAIN)
    elif s.accumulation is not None or not (t.is_auto(TRAIN) or t.is_auto(ACCUMULATION)):
        _fix(t, s.accumulation or 1, by=_first(t, ACCUMULATION, MICRO))


def _fix(t: Translation, steps: int, by: str) -> None:
    """Accumulate the same number of micro-batches on any number of ranks."""
    t.set("global_batch_size", None, by=by)
    t.set("accumulation", "fixed", by=by)
    t.set("accumulation.steps", steps, by=by)


def _share(t: Translation, s: _Sizes) -> int | None:
    """Return the micro-batch size that follows from the global batch; None leaves it to recipe or command line."""
    if t.is_auto(ACCUMULATION) or (t.is_auto(MICRO) and s.accumulation is None) or "micro_batch_size" in t.typed:
        return None
    return _quotient(t, s, s.accumulation or 1, MICRO)


def _quotient(t: Translation, s: _Sizes, other: int, path: str) -> int | None:
    """Return the size that follows from the global batch, the other size and the data ranks."""
    if s.train is None or s.ranks is None:
        t.refuse(
            f"{path} is missing and follows from the number of data ranks, which is unknown; type "
            "devices=<ranks>, or write it"
        )
        return None
    return s.train // (other * s.ranks)


def _pipeline(t: Translation, s: _Sizes) -> None:
    """Fill the pipeline with the accumulated micro-batches."""
    micro, accumulation = s.micro, s.accumulation
    if micro is None:
        if s.train is None or accumulation is None or s.ranks is None:
            if any((s.train, accumulation)):
                t.refuse(f"a pipeline needs {MICRO}, and {TRAIN} or {ACCUMULATION}; write both as numbers")
            return
        micro = s.train // (accumulation * s.ranks)
    if accumulation is None:
        accumulation = 1 if s.train is None else _quotient(t, s, micro, ACCUMULATION)
    if accumulation is None:
        return
    accumulation = accumulation or 1
    by = _first(t, ACCUMULATION, TRAIN, MICRO)
    t.set("strategy.micro_batches", accumulation, by=by)
    t.set("micro_batch_size", micro * accumulation, by=_first(t, MICRO, by))
    if s.train is None:
        _fix(t, 1, by)
    else:
        t.set("global_batch_size", s.train, by=TRAIN)
    note = f"A pipeline splits the samples of a data rank, {micro} x {accumulation}, into strategy.micro_batches."
    t.say(MICRO, MAPPED, note)


def _first(t: Translation, *paths: str) -> str:
    """Return the first key in the file, else the last."""
    return next((path for path in paths if t.has(path)), paths[-1])
