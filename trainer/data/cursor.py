"""Position of a run in its data: a plain dictionary in the state of the fit loop, and what must not differ on resume.
Free of heavy imports.

A cursor counts what optimizer steps have used: micro-batches whose gradients have not been applied are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

VERSION = 2


@dataclass(frozen=True)
class LoaderCursor:
    """Position in one training loader.

    Args:
        kind: ``"samples"`` (dealt one by one), ``"batches"`` (a user's batch sampler, dealt in whole batches),
            ``"stream"`` (``DealtStream``), ``"shards"`` (``ShardedStream``), ``"state"`` (it has a state) or
            ``"other"`` (it cannot be resumed).
        data: class, length and fingerprint of the data set, as far as known.
        seed: seed of the order; ``None`` if it is not shuffled or not ours.
        partition: how samples are dealt; ``None`` if not by us.
        key: name of the function that returns a sample's key.
        global_batch_size: samples per optimizer step; ``None`` if unknown.
        batches_per_step: micro-batches of all data ranks per optimizer step.
        position: what has been read of the epoch; see ``position`` of the samplers.
        states: with ``"state"`` and ``"shards"``, the state of each data rank.
        workers: number of workers, if each has a state.
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
        epoch: counted from 0.
        first: index in the epoch of the first of these steps.
        last: index after the last one.
    """

    epoch: int
    first: int
    last: int


@dataclass(frozen=True)
class Cursor:
    """Position of a run in its training data.

    Args:
        epoch: the epoch started last, counted from 0.
        steps: its completed optimizer steps.
        finished: whether they are all of them.
        stepped: micro-batches of the run that stepped, by which loggers count.
        accumulation: micro-batches per optimizer step on each data rank.
        batches: micro-batches of the epoch on each data rank; ``None`` if unknown.
        data_ranks: number of ranks that read different samples.
        loaders: one for each training loader.
        skipped: skipped samples, see :mod:`trainwright.callbacks.guard.loss_guard`.
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
        """Return a plain dictionary (``states`` of loaders are as these returned them)."""
        listed = {"loaders": [asdict(loader) for loader in self.loaders], "skipped": [asdict(s) for s in self.skipped]}
        return {"version": VERSION, **asdict(self), **listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cursor:
        """Return the inverse of :meth:`to_json`.

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
    """A difference between the saved run and the one that resumes.

    Args:
        what: description with both values.
        remedy: what to type instead, a sentence without its period.
        consequence: the effect if it is allowed.
    """

    what: str
    remedy: str
    consequence: str


def differences(saved: Sequence[LoaderCursor], now: Sequence[LoaderCursor]) -> list[DataDifference]:
    """Return what keeps a run from resuming exactly in its data."""
    if len(saved) != len(now):
        what = f"the checkpoint was saved with {len(saved)} training loader(s), now there are {len(now)}"
        return [DataDifference(what, f"Give fit {len(saved)} loader(s)", "the epoch restarts in every loader")]
    found = []
    for index, (before, after) in enumerate(zip(saved, now, strict=True)):
        where = f" (training loader {index})" if len(now) > 1 else ""
        found += [replace(difference, what=difference.what + where) for difference in _between(before, after)]
    return found


def _between(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    if before.kind != after.kind:
        what = f"the loader was {_KINDS[before.kind]} when saved, now it is {_KINDS[after.kind]}"
        return [DataDifference(what, "Use the loader of the saved run", "the epoch restarts in this loader")]
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
            "Use the data set of the saved run",
            "the epoch continues after as many samples of the new data set's order as were read of the old one's",
        )
        for name in before.data
        if name in after.data and before.data[name] != after.data[name]
    ]


def _order(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    found = []
    if before.seed != after.seed:
        typed = f"data_seed={before.seed}"
        remedy = "Load the data in order (shuffle=False)" if before.seed is None else f"Type {typed} (trainer.{typed})"
        what = f"the order of samples was {_describe(before.seed)} when saved, now it is {_describe(after.seed)}"
        consequence = (
            "this epoch continues in its original order if both are shuffled, else after as many samples of the new "
            "order; the next epoch uses the new one"
        )
        found.append(DataDifference(what, remedy, consequence))
    if (before.partition, before.key) != (after.partition, after.key):
        key = f" with data_key={before.key!r}" if before.key else ""
        now = f" with data_key={after.key!r}" if after.key else ""
        what = f"data_partition was {before.partition!r}{key} when saved, now it is {after.partition!r}{now}"
        remedy = f"Type data_partition={before.partition}{key.replace(' with', ' and')} (trainer.data_partition=...)"
        found.append(DataDifference(what, remedy, "the remaining samples of this epoch are dealt in the new way"))
    return found


def _describe(seed: int | None) -> str:
    return "not shuffled" if seed is None else f"drawn from seed {seed}"


def _batch(before: LoaderCursor, after: LoaderCursor) -> list[DataDifference]:
    old, new, unit = before.global_batch_size, after.global_batch_size, "samples"
    remedy = f"Type global_batch_size={old}"
    if None in (old, new):
        old, new, unit = before.batches_per_step, after.batches_per_step, "batches of all ranks"
        remedy = f"Choose accumulate_grad_batches so that it is {old} over all data ranks"
    if None in (old, new) or old == new:
        return []
    what = f"an optimizer step had {old} {unit} when saved, now it has {new}"
    return [DataDifference(what, remedy, "the remaining samples of this epoch are read in steps of the new size")]


def refusal(found: Sequence[DataDifference]) -> str:
    """Return the message of a refused resume."""
    lines = [f"  - {difference.what}. {difference.remedy}." for difference in found]
    then = sorted({f"  - {difference.consequence}." for difference in found})
    refused = "The run would not resume in the data where the checkpoint stopped:"
    permitted = "If that is intended, set allow_changed_data=True (trainer.allow_changed_data=true); then:"
    return "\n".join([refused, *lines, permitted, *then])


def permission(found: Sequence[DataDifference]) -> str:
    """Return the message of a resume with changed data."""
    lines = [f"  - {difference.what}: {difference.consequence}." for difference in found]
    return "\n".join(["Resuming with changed data, as allow_changed_data=True allows:", *lines])
