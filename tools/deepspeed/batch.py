"""Batch sizes and their identity: train = micro x accumulation x data ranks."""

from __future__ import annotations

from typing import Any

from trainwright.tools.deepspeed.key import AUTO, MAPPED
from trainwright.tools.deepspeed.layout import Chosen
from trainwright.tools.deepspeed.translation import Translation

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_KEYS = (TRAIN, MICRO, ACCUMULATION)


def translate_batch(t: Translation, chosen: Chosen) -> None:
    """Decide global_batch_size, micro_batch_size and accumulation."""
    sizes = {path: _size(t, path) for path in _KEYS}
    for path in _KEYS:
        if t.is_auto(path):
            t.say(path, MAPPED, "as the recipe has it, and as the others make it")
        elif t.has(path):
            t.say(path, MAPPED)
    if any(t.is_auto(path) for path in _KEYS) and t.recipe is None:
        left = [path for path in _KEYS if t.is_auto(path)]
        t.refuse(
            f'{", ".join(left)}: "auto", and no recipe was given to take it from; type recipe=<name>, or write numbers'
        )
    if t.problems and any(isinstance(size, int) and size < 1 for size in sizes.values()):
        return
    train, micro, accumulation = sizes[TRAIN], sizes[MICRO], sizes[ACCUMULATION]
    ranks = chosen.data_ranks
    if _contradictory(t, train, micro, accumulation, ranks):
        return
    if "pipeline" in chosen.axes:
        _pipeline(t, train, micro, accumulation, ranks)
        return
    _plain(t, train, micro, accumulation, ranks)


def _size(t: Translation, path: str) -> int | None:
    value: Any = t.value(path)
    if value is None or value == AUTO or not isinstance(value, int):
        return None
    if value < 1:
        t.refuse(f"{path} is {value}; must be at least 1")
    return value


def _contradictory(
    t: Translation, train: int | None, micro: int | None, accumulation: int | None, ranks: int | None
) -> bool:
    """Refuse sizes that do not make up one batch, unless they were typed anew."""
    if train is None or any(key in t.typed for key in ("global_batch_size", "micro_batch_size", "accumulation.steps")):
        return False
    per_rank = (micro or 1) * (accumulation or 1)
    if micro is None and accumulation is None and t.has(MICRO):
        return False
    factors = " x ".join(f"{size} ({path})" for path, size in ((MICRO, micro), (ACCUMULATION, accumulation)) if size)
    complete = micro is not None and accumulation is not None
    if ranks is None:
        if train % per_rank:
            t.refuse(f"{TRAIN} is {train}, which is no multiple of {factors}; they must make it with the data ranks")
            return True
        return False
    wrong = train != per_rank * ranks if complete else train % (per_rank * ranks) != 0
    if not wrong:
        return False
    made = f"{factors} x {ranks}" if factors else str(ranks)
    remedy = f"write a multiple of {per_rank * ranks}"
    if complete:
        remedy = f"write {per_rank * ranks}, or take one of the three out"
    needed = train // per_rank
    if train % per_rank == 0 and needed > 0:
        remedy += f", or type devices= for {needed} data rank{'' if needed == 1 else 's'}"
    outcome = f"make {per_rank * ranks}" if complete else "do not divide it"
    t.refuse(f"{TRAIN} is {train}, but {made} data rank(s) {outcome}; {remedy}")
    return True


def _plain(t: Translation, train: int | None, micro: int | None, accumulation: int | None, ranks: int | None) -> None:
    if train is None and micro is None and accumulation is None:
        if not any(t.has(path) for path in _KEYS):
            t.note_absent(TRAIN, "DeepSpeed wants a batch size; here the recipe's stay.")
        return
    if train is not None and micro is None:
        micro = _share(t, train, accumulation, ranks)
    if micro is not None:
        t.set("micro_batch_size", micro, by=MICRO if t.has(MICRO) else TRAIN)
    if train is not None:
        t.set("global_batch_size", train, by=TRAIN)
        return
    if accumulation is None and t.is_auto(TRAIN):
        return  # as many as make up the recipe's global batch
    steps = accumulation if accumulation is not None else None if t.is_auto(ACCUMULATION) else 1
    if steps is not None:
        by = ACCUMULATION if t.has(ACCUMULATION) else MICRO
        t.set("global_batch_size", None, by=by)
        t.set("accumulation", "fixed", by=by)
        t.set("accumulation.steps", steps, by=by)


def _share(t: Translation, train: int, accumulation: int | None, ranks: int | None) -> int | None:
    """What a data rank processes at once, where the file gives the whole."""
    if t.is_auto(ACCUMULATION) or (t.is_auto(MICRO) and accumulation is None):
        return None  # the recipe's
    if "micro_batch_size" in t.typed:
        return None
    if ranks is None:
        t.refuse(
            f"{MICRO} is not given and follows from the number of data ranks, which is not known; type "
            "devices=<ranks>, or write it"
        )
        return None
    return train // (ranks * (accumulation or 1))


def _pipeline(
    t: Translation, train: int | None, micro: int | None, accumulation: int | None, ranks: int | None
) -> None:
    """There, accumulated micro-batches are what fills the pipeline."""
    if micro is None:
        if train is not None and accumulation is not None and ranks is not None:
            micro = train // (accumulation * ranks)
        else:
            if any(t.has(path) and not t.is_auto(path) for path in _KEYS):
                t.refuse(f"a pipeline needs {MICRO}, and {TRAIN} or {ACCUMULATION} beside it; write both as numbers")
            return
    if accumulation is None and train is not None:
        if ranks is None:
            t.refuse(
                f"{ACCUMULATION} is not given and follows from the number of data ranks, which is not known; type "
                "devices=<ranks>, or write it"
            )
            return
        accumulation = train // (micro * ranks)
    accumulation = accumulation or 1
    by = ACCUMULATION if t.has(ACCUMULATION) else TRAIN if t.has(TRAIN) else MICRO
    t.set("strategy.micro_batches", accumulation, by=by)
    t.set("micro_batch_size", micro * accumulation, by=MICRO if t.has(MICRO) else by)
    t.set("global_batch_size", train, by=TRAIN if t.has(TRAIN) else by)
    if train is None:
        t.set("accumulation", "fixed", by=by)
        t.set("accumulation.steps", 1, by=by)
    note = f"A pipeline splits what a data rank reads at a time, {micro} x {accumulation}, into strategy.micro_batches."
    t.say(MICRO, MAPPED, note)
