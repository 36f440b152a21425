"""Training loaders as the cursor sees them: contents, position, and resuming."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, Dataset

from trainwright.trainer.data.cursor import Cursor, LoaderCursor
from trainwright.trainer.data.data_order import DealingSampler, Drawn, RankBatchSampler, Resumed
from trainwright.trainer.data.dealt_batches import DealtBatchSampler
from trainwright.trainer.data.epoch_order import run_seeded
from trainwright.trainer.data.even import EvenLoader
from trainwright.trainer.data.loaders import OrderedSampler, index_batches, ordered_sampler
from trainwright.trainer.data.partition import (
    HashPartition,
    RangePartition,
    Read,
    SamplePartition,
    name_of_key,
    resolve_data_key,
)
from trainwright.trainer.data.remembered_states import RememberedStates
from trainwright.trainer.data.streams.loader import StreamLoader
from trainwright.trainer.data.streams.shard_loader import ShardLoader
from trainwright.trainer.data.wrapped_loader import WrappedLoader, innermost
from trainwright.trainer.leases.batches import LeasedBatchSampler


class SeededSamples(Dataset[Any]):
    """Draws every sample of a data set with its own random numbers.

    Torch's, numpy's and python's global generators are seeded from (seed, epoch, index) around ``dataset[index]`` and
    restored, so an augmentation is equal under every layout, number of workers and after a resume. The epoch comes with
    the index, as a persistent worker receives nothing else. ``__getitems__`` of the data set is not used: it would draw
    several samples from one generator.

    Args:
        dataset: the user's data set; its attributes are forwarded.
        seed: seed of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, drawn: Any) -> Any:
        if not isinstance(drawn, Drawn):
            return self.dataset[drawn]  # accessed by the user
        epoch, index = drawn
        return run_seeded(lambda: self.dataset[index], sample_seed(self.seed, epoch, index))

    def __getattr__(self, name: str) -> Any:
        # Names by which torch looks for other ways to read, and those that pickle and copy look for.
        if name in ("dataset", "__getitems__") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def sample_seed(seed: int, epoch: int, index: Any) -> int:
    """Return a 63-bit seed for one sample of one epoch."""
    if hasattr(index, "__index__"):
        index = operator.index(index)  # numpy's and torch's integers have another repr
    digest = hashlib.blake2b(f"{seed} {epoch} {index!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_samples(loader: DataLoader[Any], sampler: DealingSampler, seed: int) -> None:
    """Let ``loader``, which reads the batches of ``sampler``, draw seeded samples."""
    sampler.with_epoch = True
    # A DataLoader refuses a new data set once it is built, and a subclass may not accept one in its constructor.
    loader.__dict__["dataset"] = SeededSamples(loader.dataset, seed)


def leased_batches(loaders: Sequence[object]) -> LeasedBatchSampler | None:
    """Return the sampler that leases the samples of the (only) training loader; ``None`` without leases."""
    dealer = dealer_of(loaders[0]) if len(loaders) == 1 else None
    return dealer if isinstance(dealer, LeasedBatchSampler) else None


def refuse_cycled_shards(combined: Any) -> None:
    """Raise a ``ValueError`` for shards beside a longer loader, where they would be cycled within an epoch.

    A second pass would count as the first one: a resumed run would repeat or skip samples.

    Args:
        combined: the training loaders, a ``CombinedLoader`` of Lightning.
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
    """Return what deals the samples of ``loader`` and knows its padding; ``None`` if not ours."""
    if isinstance(loader, StreamLoader):
        return loader
    return ordered_sampler(loader)


def weigher_of(loader: object) -> Weigher | None:
    """Return what knows the samples of each data rank in a batch of ``loader``; ``None`` if not ours."""
    return loader if isinstance(loader, EvenLoader) else dealer_of(loader)


def common_weigher(combined: Any) -> Weigher | SideBySide | None:
    """Return what knows the samples of each data rank in the batches of training loaders, a ``CombinedLoader``."""
    loaders = combined.flattened
    return weigher_of(loaders[0]) if len(loaders) == 1 else SideBySide(loaders, "cycle" in combined._mode)


class SideBySide:
    """Samples of each data rank in batches of several loaders, which must have equal shares of them.

    Args:
        loaders: read side by side.
        cycles: whether a shorter one starts anew.
    """

    def __init__(self, loaders: list[Any], cycles: bool) -> None:
        found = [(weigher_of(loader), sized_len(loader) or math.inf) for loader in loaders]
        self._weighers = [(weigher, length) for weigher, length in found if weigher is not None]
        self._cycles = cycles
        self.regular_waves = min((weigher.regular_waves for weigher, _ in self._weighers), default=math.inf)

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """See :meth:`~.data_order.RankBatchSampler.loss_divisor`.

        Raises:
            ValueError: if no divisor is right for all loaders.
        """
        read = [each for each in self._weighers if self._cycles or batch_idx < each[1]]
        divisors = {w.loss_divisor(int(batch_idx % length), accumulation, whole_step) for w, length in read}
        if len(divisors) > 1:
            raise ValueError(
                f"Training loaders are read side by side, and in batch {batch_idx} this rank has other shares of the "
                "samples of one than of another, as some end with an incomplete batch: its loss cannot be weighted as "
                "in one process. Use drop_last=True in each, or data sets and batch sizes with complete last batches."
            )
        return divisors.pop() if divisors else accumulation


def remembered(loader: object) -> RememberedStates | None:
    """Return the wrapper that remembers states of ``loader``, if it has a state."""
    while isinstance(loader, WrappedLoader):
        if isinstance(loader, RememberedStates):
            return loader
        loader = loader.loader
    return None


def describe(loader: Any, data_ranks: int, accumulation: int) -> LoaderCursor:
    """Describe what ``loader`` reads, without its position.

    Args:
        loader: a training loader of the loop.
        data_ranks: number of ranks that read different samples.
        accumulation: micro-batches per optimizer step on each of them.
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
    # A loader rebuilt around a batch sampler no longer has its own batch size.
    of_loader = [] if dealer is not None else [loader, index_batches(loader)]
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
    """Return the position of ``loader`` on this rank after so many batches of the epoch.

    Args:
        loader: a training loader of the loop.
        batches: batches of the epoch.
        finished: whether they are all.
        cycles: whether a loader that has run out restarts within the epoch.
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
    """Resume all training loaders at a cursor.

    Args:
        loaders: of this run.
        cursor: as saved; with another number of loaders, each restarts.
        now: of ``loaders``, on this run's data ranks.
        accumulation: micro-batches per optimizer step.
        rank: this data rank.
        ranks: number of data ranks.
        in_place: whether the end of the epoch is pending.
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
    """Let ``loader`` deal the rest of an epoch.

    Args:
        loader: a training loader of the loop.
        saved: its cursor in the saved run.
        now: its cursor in this run.
        epoch: the epoch.
        first_batch: micro-batches, as this run counts, of completed optimizer steps.
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
    """Return the partition under which a part of the epoch was read."""
    if name == "range":
        return RangePartition()
    if isinstance(current, HashPartition) and old_key == key:
        return current
    return hash_partition(old_key, loader.dataset)


def hash_partition(data_key: Any, dataset: Any) -> HashPartition:
    """Return the partition by the keys of a data set.

    Args:
        data_key: see :func:`~trainwright.trainer.data.partition.resolve_data_key`; ``None``: the index.
        dataset: its samples have the keys.
    """
    function = resolve_data_key(data_key)
    if function is None:
        return HashPartition()
    if isinstance(dataset, SeededSamples):
        dataset = dataset.dataset
    return HashPartition(lambda index: function(dataset, index), name_of_key(function))


def resume_states(loader: Any, saved: LoaderCursor, rank: int, ranks: int, first_batch: int, ended: bool) -> None:
    """Restore the state of each rank's loader.

    Raises:
        ValueError: if the number of data ranks or workers differs, and the loader cannot redistribute states.
    """
    keeper = remembered(loader)
    if keeper is None or not saved.states:
        return
    changed: dict[str, int | None] = {}
    if len(saved.states) != ranks:
        changed[f"{len(saved.states)} data ranks"] = ranks
    if saved.workers != keeper.workers:
        changed[f"num_workers={saved.workers}"] = keeper.workers
    if not keeper.resume(saved.states, rank, ranks, not changed, first_batch, ended):
        changes = "; ".join(f"saved with {old}, now {new}" for old, new in changed.items())
        raise ValueError(
            f"The training loader ({type(innermost(loader)).__name__}) keeps a state of its own for each data rank and "
            f"worker, which depends on their numbers: {changes}. Resume with {' and '.join(changed)}; or give the "
            "loader or its data set a method load_state_dicts(states, rank, ranks) that redistributes the saved "
            "states; or read the data through trainwright.DealtStream, which resumes with any numbers."
        )
