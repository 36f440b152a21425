"""Training loaders as the cursor sees them: what each reads, how far it has come, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len

from trainwright.trainer.data.cursor import Cursor, LoaderCursor
from trainwright.trainer.data.data_order import RankBatchSampler, Resumed
from trainwright.trainer.data.dealt_batches import DealtBatchSampler
from trainwright.trainer.data.even import EvenLoader
from trainwright.trainer.data.loaders import OrderedSampler, ordered_sampler
from trainwright.trainer.data.partition import (
    HashPartition,
    RangePartition,
    Read,
    SamplePartition,
    name_of_key,
    resolve_data_key,
)
from trainwright.trainer.data.remembered_states import RememberedStates
from trainwright.trainer.data.seeded_samples import SeededSamples
from trainwright.trainer.data.streams.loader import StreamLoader
from trainwright.trainer.data.streams.shard_loader import ShardLoader
from trainwright.trainer.data.wrapped_loader import WrappedLoader, innermost
from trainwright.trainer.leases.batches import LeasedBatchSampler


def leased_batches(loaders: Sequence[object]) -> LeasedBatchSampler | None:
    """What leases the samples of the training loaders, if it is done so; then there is one loader."""
    dealer = dealer_of(loaders[0]) if len(loaders) == 1 else None
    return dealer if isinstance(dealer, LeasedBatchSampler) else None


def refuse_cycled_shards(combined: Any) -> None:
    """Refuse shards beside another loader where the shorter one begins again within an epoch.

    A second pass would be counted as the first one: resumed, the run would repeat or skip samples.

    Args:
        combined: the training loaders, a ``CombinedLoader`` of Lightning.

    Raises:
        ValueError: if there are several loaders in mode ``max_size_cycle``, and one is of a ``ShardedStream``.
    """
    loaders, mode = combined.flattened, combined._mode
    if mode == "max_size_cycle" and len(loaders) > 1 and any(isinstance(each, ShardLoader) for each in loaders):
        raise ValueError(
            f'{len(loaders)} training loaders in mode "{mode}" (the default of several), one of which reads '
            "a trainwright.ShardedStream, which is read once in an epoch. Allowed: max_size, min_size. Return "
            'CombinedLoader(loaders, "max_size") as the training loader.'
        )


Dealer = OrderedSampler | StreamLoader
Weigher = Dealer | EvenLoader


def dealer_of(loader: object) -> Dealer | None:
    """What of ours deals the samples of ``loader``, and so knows which of its batches are padding; if any."""
    if isinstance(loader, StreamLoader):
        return loader
    return ordered_sampler(loader)


def weigher_of(loader: object) -> Weigher | None:
    """What of ours knows how many samples each data rank has of a batch of ``loader``; if any."""
    return loader if isinstance(loader, EvenLoader) else dealer_of(loader)


def remembered(loader: object) -> RememberedStates | None:
    """What remembers the state of ``loader``, if it has one of its own."""
    while isinstance(loader, WrappedLoader):
        if isinstance(loader, RememberedStates):
            return loader
        loader = loader.loader
    return None


def describe(loader: Any, data_ranks: int, accumulation: int) -> LoaderCursor:
    """What ``loader`` reads, without how far it has come.

    Args:
        loader: a training loader as the loop has it.
        data_ranks: ranks that read different samples.
        accumulation: micro-batches of an optimizer step on each of them.
    """
    dealer, keeper = dealer_of(loader), remembered(loader)
    per_step = data_ranks * accumulation
    micro = _batch_size(dealer, loader)
    common: dict[str, Any] = {
        "data": _identity(loader, dealer),
        "global_batch_size": getattr(dealer, "step_samples", 0) or (None if micro is None else micro * per_step),
        "batches_per_step": per_step,
    }
    if isinstance(dealer, RankBatchSampler):
        partition = dealer.partition
        seed = dealer.sampler.order_seed
        if seed is None and dealer.with_epoch:
            seed = dealer.sampler.seed
        key = partition.key_name if isinstance(partition, HashPartition) else None
        name = "interleave" if partition is None else partition.name
        return LoaderCursor("samples", seed=seed, partition=name, key=key, **common)
    if isinstance(dealer, DealtBatchSampler):
        return LoaderCursor("batches", seed=dealer.seed, **common)
    if isinstance(dealer, ShardLoader):
        return LoaderCursor("shards", seed=dealer.seed, **common)
    if dealer is not None:
        return LoaderCursor("stream", **common)
    if keeper is not None:
        return LoaderCursor("state", workers=keeper.workers, **common)
    return LoaderCursor("other", **common)


def _batch_size(dealer: Dealer | None, loader: Any) -> int | None:
    # A loader that was rebuilt around a batch sampler has a batch size of its own no more.
    of_loader = [] if dealer is not None else [loader, getattr(loader, "batch_sampler", None)]
    for holder in (dealer, getattr(dealer, "batches", None), *of_loader):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _identity(loader: Any, dealer: Dealer | None) -> dict[str, Any]:
    dataset = getattr(dealer if isinstance(dealer, StreamLoader) else innermost(loader), "dataset", None)
    if isinstance(dataset, SeededSamples):
        dataset = dataset.dataset
    if dataset is None:
        return {}
    found: dict[str, Any] = {"class": type(dataset).__qualname__}
    length = sized_len(dataset)
    if length is not None:
        found["length"] = length
    fingerprint = getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str | int):
        found["fingerprint"] = fingerprint
    return found


def position(loader: Any, batches: int, finished: bool, cycles: bool) -> dict[str, Any]:
    """How far ``loader`` has come on this rank when the loop has used so many batches of the epoch.

    Args:
        loader: a training loader as the loop has it.
        batches: batches of the epoch.
        finished: whether they were all.
        cycles: whether a loader that has run out begins again; else it gives nothing more in this epoch.
    """
    dealer, keeper = dealer_of(loader), remembered(loader)
    if dealer is not None:
        length = None if cycles else sized_len(dealer)
        return dealer.position(batches if length is None else min(batches, length))
    return {} if keeper is None else keeper.position(batches, finished)


def resume_loaders(
    loaders: Sequence[Any],
    cursor: Cursor,
    now: Sequence[LoaderCursor],
    accumulation: int,
    rank: int,
    ranks: int,
    in_place: bool,
    leased: bool,
) -> None:
    """Have all training loaders go on where a cursor stands.

    Args:
        loaders: of this run.
        cursor: as saved; of another number of loaders nothing is known of any, and each begins anew.
        now: of ``loaders``, on this run's data ranks.
        accumulation: micro-batches of an optimizer step.
        rank: this data rank.
        ranks: data ranks.
        in_place: whether the end of the epoch is still to be done.
        leased: whether samples are leased.
    """
    known = cursor.loaders if len(loaders) == len(cursor.loaders) else [LoaderCursor("none") for _ in loaders]
    first = cursor.steps * accumulation
    for loader, saved, entry in zip(loaders, known, now, strict=True):
        if not cursor.finished or (in_place and leased):
            resume_samples(loader, saved, entry, cursor.epoch, first)
        resume_states(loader, saved, rank, ranks, 0 if cursor.finished else first, cursor.finished)
        keeper = remembered(loader)
        if keeper is not None and in_place:
            keeper.wait_for_next_pass()


def resume_samples(loader: Any, saved: LoaderCursor, now: LoaderCursor, epoch: int, first_batch: int) -> None:
    """Let ``loader`` deal what is left of an epoch.

    Args:
        loader: a training loader as the loop has it.
        saved: what another run says of it.
        now: what this run says of it.
        epoch: the epoch.
        first_batch: micro-batches, as this run counts, of the optimizer steps that are done.
    """
    dealer = dealer_of(loader)
    if dealer is None:
        return
    if saved.kind != now.kind:
        dealer.resume(Resumed(epoch, first_batch, 0))
        return
    if isinstance(dealer, RankBatchSampler):
        current, old = dealer.partition, saved.key
        dealer.partition_named = lambda name: _partition(name, current, old, now.key, loader)
    where = saved.position
    if isinstance(dealer, ShardLoader):
        dealer.resume(Resumed(epoch, first_batch, 0, seed=saved.seed), where, saved.states)
        return
    history = tuple(Read.from_json(read) for read in where.get("history", ()))
    if isinstance(dealer, LeasedBatchSampler) and "trained" in where:
        dealer.trained_before = lambda: int(where["trained"])
    seed = saved.seed if saved.seed is not None and now.seed is not None else None
    dealer.resume(Resumed(epoch, first_batch, where["samples"], history, where.get("passes", 0), seed))


def _partition(
    name: str, current: SamplePartition | None, old_key: str | None, key: str | None, loader: Any
) -> SamplePartition:
    """The partition under which a part of the epoch was read."""
    if name == "range":
        return RangePartition()
    if isinstance(current, HashPartition) and old_key == key:
        return current
    return hash_partition(old_key, loader.dataset)


def hash_partition(data_key: Any, dataset: Any) -> HashPartition:
    """The partition by the keys of a data set.

    Args:
        data_key: see :func:`~trainwright.trainer.data.partition.resolve_data_key`; ``None`` takes the index.
        dataset: what the keys are of.
    """
    function = resolve_data_key(data_key)
    if function is None:
        return HashPartition()
    if isinstance(dataset, SeededSamples):
        dataset = dataset.dataset
    return HashPartition(lambda index: function(dataset, index), name_of_key(function))


def resume_states(loader: Any, saved: LoaderCursor, rank: int, ranks: int, first_batch: int, ended: bool) -> None:
    """Give each rank the state of its loader back.

    Raises:
        ValueError: if there is another number of data ranks or workers, and the loader cannot share states out anew.
    """
    keeper = remembered(loader)
    if keeper is None or not saved.states:
        return
    problems = []
    if len(saved.states) != ranks:
        problems.append((f"{len(saved.states)} data ranks", f"{ranks}", f"{len(saved.states)} data ranks"))
    if saved.workers != keeper.workers:
        problems.append((f"num_workers={saved.workers}", f"{keeper.workers}", f"num_workers={saved.workers}"))
    if not problems:
        keeper.resume(saved.states, rank, first_batch, ended)
    elif keeper.can_redistribute:
        keeper.redistribute(saved.states, rank, ranks, first_batch, ended)
    else:
        told = "; ".join(f"saved with {old}, now {new}" for old, new, _ in problems)
        raise ValueError(
            f"The training loader ({type(innermost(loader)).__name__}) keeps a state of its own for each data rank and "
            f"worker, which fits no other number of them: {told}. Resume with "
            f"{' and '.join(remedy for *_, remedy in problems)}; or give the loader or its data set a method "
            "load_state_dicts(states, rank, ranks) that shares the saved states out anew; or read the data through "
            "trainwright.DealtStream, which goes on under any number."
        )
