"""Where a run stands in its data: a plain dictionary in the state of the fit loop, and what must not differ when it is
taken up again. Imports nothing heavy.

A cursor counts what optimizer steps have used: of micro-batches whose gradients no step has applied yet, nothing is
saved, so their samples are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 2


@dataclass(frozen=True)
class LoaderCursor:
    """Where a run stands in one training loader.

    Args:
        kind: ``"samples"`` (dealt one by one), ``"batches"`` (a batch sampler of the user's, dealt whole), ``"stream"``
            (``DealtStream``), ``"shards"`` (``ShardedStream``), ``"state"`` (it keeps a state of its own) or
            ``"other"`` (it cannot be resumed).
        data: class, length and fingerprint of the data set, as far as it has them.
        seed: seed of the order; ``None`` if it is not shuffled or not ours.
        partition: how samples are dealt; ``None`` if not by us.
        key: name of the function that gives a sample's key.
        global_batch_size: samples of one optimizer step; ``None`` if nobody can tell.
        batches_per_step: micro-batches of all data ranks in one optimizer step.
        position: what has been read of the epoch; see ``position`` of what reads.
        states: with ``"state"`` and ``"shards"``, the state of each data rank.
        workers: number of workers, if there is a state of each.
    """

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    partition: str | None = None
    key: str | None = None
    global_batch_size: int | None = None
    batches_per_step: int | None = None
    position: dict[str, Any] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    workers: int | None = None


@dataclass(frozen=True)
class Skipped:
    """Samples that are read but not trained on, as optimizer steps of an epoch.

    Args:
        epoch: the epoch (0 is the first).
        first: index in the epoch of the first of these steps.
        last: index of the one after the last.
    """

    epoch: int
    first: int
    last: int


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in its training data.

    Args:
        epoch: the epoch that was begun last (0 is the first).
        steps: optimizer steps of it that are done.
        finished: whether they were all.
        stepped: micro-batches of the run that stepped, by which loggers count.
        accumulation: micro-batches of one optimizer step on each data rank.
        batches: micro-batches of the epoch on each data rank; ``None`` if unknown.
        data_ranks: ranks that read different samples.
        loaders: one for each training loader.
        skipped: what was or will be passed over, see :mod:`trainwright.callbacks.guard.loss_guard`.
    """

    epoch: int
    steps: int
    finished: bool
    stepped: int
    accumulation: int
    batches: int | None
    data_ranks: int
    loaders: tuple[LoaderCursor, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary (``states`` of loaders are as these gave them)."""
        listed = {"loaders": [asdict(loader) for loader in self.loaders], "skipped": [asdict(s) for s in self.skipped]}
        return {"version": VERSION, **asdict(self), **listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cursor:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if a later version wrote it.
        """
        fields = dict(value)
        version = fields.pop("version")
        if version > VERSION:
            raise ValueError(
                f"The checkpoint's data cursor has version {version}; this version of Trainwright reads up to "
                f"{VERSION}. Install the version that wrote it, or a later one."
            )
        fields["loaders"] = tuple(LoaderCursor(**loader) for loader in fields["loaders"])
        fields["skipped"] = tuple(Skipped(**steps) for steps in fields.get("skipped", ()))  # version 1 has none
        return cls(**fields)


@dataclass(frozen=True)
class DataDifference:
    """What differs between the run that saved and the one that resumes.

    Args:
        what: in words, both values included.
        remedy: what to type instead, a sentence without its stop.
        consequence: what is done if it is allowed.
    """

    what: str
    remedy: str
    consequence: str


def differences(saved: Sequence[LoaderCursor], now: Sequence[LoaderCursor]) -> list[DataDifference]:
    """What keeps a run from reading on exactly where another stopped."""
    if len(saved) != len(now):
        return [
            DataDifference(
                f"the checkpoint was saved with {len(saved)} training loader(s), now there are {len(now)}",
                f"Give fit {len(saved)} loader(s)",
                "the epoch begins anew in every loader",
            )
        ]
    found = []
    for index, (before, after) in enumerate(zip(saved, now, strict=True)):
        where = f" (training loader {index})" if len(now) > 1 else ""
        found += [_at(where, difference) for difference in _between(before, after)]
    return found


def _at(where: str, difference: DataDifference) -> DataDifference:
    return DataDifference(difference.what + where, difference.remedy, difference.consequence)


def _between(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    if before.kind != after.kind:
        return [
            DataDifference(
                f"the loader was {_KINDS[before.kind]} when saved, now it is {_KINDS[after.kind]}",
                "Use the loader of the run that saved",
                "the epoch begins anew in this loader",
            )
        ]
    return [*_data(before, after), *_order(before, after), *_batch(before, after)]


_KINDS = {
    "samples": "one over a map-style data set",
    "batches": "one with a batch sampler of its own",
    "stream": "one over a DealtStream",
    "shards": "one over a ShardedStream",
    "state": "one that keeps its state",
    "other": "one that cannot be resumed",
}


def _data(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    return [
        DataDifference(
            f"the {name} of the data set was {before.data[name]!r} when saved, now it is {after.data[name]!r}",
            "Use the data set of the run that saved",
            "the epoch goes on after as many samples of the new data set's order as were read of the old one's",
        )
        for name in before.data
        if name in after.data and before.data[name] != after.data[name]
    ]


def _order(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    found = []
    if before.seed != after.seed:
        typed = f"data_seed={before.seed}"
        remedy = "Load the data in order (shuffle=False)" if before.seed is None else f"Type {typed} (trainer.{typed})"
        found.append(
            DataDifference(
                f"the order of samples was {_in_words(before.seed)} when saved, now it is {_in_words(after.seed)}",
                remedy,
                "this epoch goes on in the order in which it began where both are shuffled, else after as many samples "
                "of the new order; the next epoch is read in the new one",
            )
        )
    if (before.partition, before.key) != (after.partition, after.key):
        key = f" with data_key={before.key!r}" if before.key else ""
        now = f" with data_key={after.key!r}" if after.key else ""
        found.append(
            DataDifference(
                f"data_partition was {before.partition!r}{key} when saved, now it is {after.partition!r}{now}",
                f"Type data_partition={before.partition}{key.replace(' with', ' and')} (trainer.data_partition=...)",
                "the samples of this epoch that are left are dealt in the new way",
            )
        )
    return found


def _in_words(seed: int | None) -> str:
    return "not shuffled" if seed is None else f"drawn from seed {seed}"


def _batch(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    consequence = "the samples of this epoch that are left are read in steps of the new size"
    sizes = before.global_batch_size, after.global_batch_size
    if None not in sizes:
        if sizes[0] == sizes[1]:
            return []
        what = f"an optimizer step had {sizes[0]} samples when saved, now it has {sizes[1]}"
        return [DataDifference(what, f"Type global_batch_size={sizes[0]}", consequence)]
    counts = before.batches_per_step, after.batches_per_step
    if None in counts or counts[0] == counts[1]:
        return []
    what = f"an optimizer step had {counts[0]} batches of all ranks when saved, now it has {counts[1]}"
    remedy = f"Choose accumulate_grad_batches so that it is {counts[0]} over all data ranks"
    return [DataDifference(what, remedy, consequence)]


def refusal(found: Sequence[DataDifference]) -> str:
    """The message that refuses to resume."""
    lines = [f"  - {difference.what}. {difference.remedy}." for difference in found]
    return "\n".join(
        [
            "The run would not go on in the data where the checkpoint stopped:",
            *lines,
            "If that is meant, set allow_changed_data=True (trainer.allow_changed_data=true); then:",
            *sorted({f"  - {difference.consequence}." for difference in found}),
        ]
    )


def permission(found: Sequence[DataDifference]) -> str:
    """The message that says what is done all the same."""
    lines = [f"  - {difference.what}: {difference.consequence}." for difference in found]
    return "\n".join(["Resuming with changed data, as allow_changed_data=True allows:", *lines])
