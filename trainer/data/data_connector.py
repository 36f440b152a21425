"""Where loaders come in: samples are dealt to ranks, and the global batch of the run is settled."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader

from trainwright.core.lightning_internals import _auto_add_worker_init_fn, _DataConnector
from trainwright.core.processes.orphans import end_with_main_thread
from trainwright.core.run.traits import traits_of
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.trainer.data.data_order import RankBatchSampler
from trainwright.trainer.data.dealt_batches import DealtBatchSampler
from trainwright.trainer.data.epoch_order import EpochOrder
from trainwright.trainer.data.even import EvenLoader, Reader
from trainwright.trainer.data.loaders import (
    OrderedSampler,
    batches_of,
    can_order,
    has_plain_batches,
    keep,
    lend,
    replace_batches,
)
from trainwright.trainer.data.partition import RangePartition, SamplePartition
from trainwright.trainer.data.reading import hash_partition
from trainwright.trainer.data.remembered_states import RememberedStates, state_source
from trainwright.trainer.data.seeded_samples import seed_samples as draw_seeded
from trainwright.trainer.data.streams.dealt import DealtLoader, uses_stream
from trainwright.trainer.data.streams.loader import StreamLoader
from trainwright.trainer.data.streams.shard_loader import ShardLoader, ShardReader
from trainwright.trainer.data.streams.sharded import uses_shards
from trainwright.trainer.data.wrapped_loader import innermost
from trainwright.trainer.leases.batches import LeasedBatchSampler, why_not_leased

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

_HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_EVALUATING = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)
_ONLY_SINGLE_SAMPLES = (
    "Leases are of single samples of a map-style data set, but the training loader is {loader}. Give a DataLoader with "
    "batch_size, or turn leases off (strategy.leases=none)."
)


class OrderedDataConnector(_DataConnector):
    """Deals samples to ranks in an order that does not depend on the layout, in place of Lightning's sampler."""

    trainer: RunTrainer

    def __init__(self, trainer: RunTrainer) -> None:
        super().__init__(trainer)
        self._given_back: dict[DataLoader[Any], Callable[[], None]] = {}

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        loader = self._prepared(dataloader, shuffle, mode)
        _auto_add_worker_init_fn(loader, self._seed_rank)
        spare_workers(loader)
        return loader

    def _prepared(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        strategy = self.trainer.strategy
        ranks, rank = ranks_of(strategy).num_data_ranks, ranks_of(strategy).data_rank
        training = mode == RunningStage.TRAINING
        is_ours = hasattr(strategy, "ranks")
        ours = is_ours and self.trainer._accelerator_connector.use_distributed_sampler
        if ours and can_order(dataloader):
            assert isinstance(dataloader, DataLoader)
            _check_enough_samples(dataloader, ranks, mode)
            if self.trainer.world_size == 1 and mode in _EVALUATING and keep(dataloader):
                return dataloader
            return self._deal(dataloader, rank, ranks, mode)
        if training:
            self._refuse_undealt(dataloader)
            if self.trainer.leases is not None:
                raise ValueError(_ONLY_SINGLE_SAMPLES.format(loader=type(dataloader).__name__))
        if ours and (uses_stream(dataloader) or uses_shards(dataloader)):
            return self._deal_stream(dataloader, rank, ranks, training)  # type: ignore[arg-type]
        loader = super()._prepare_dataloader(dataloader, shuffle, mode)
        if ours:
            self._settle_other(loader, ranks, training)
        elif training and isinstance(loader, DataLoader) and loader.batch_size:
            self.trainer.settle_global_batch(loader.batch_size, ranks)
        if training and state_source(loader) is not None:
            _auto_add_worker_init_fn(loader, self._seed_rank)
            loader = RememberedStates(loader, lambda: self.trainer.accumulate_grad_batches)
        drop_last = bool(getattr(dataloader, "drop_last", False)) and mode != RunningStage.PREDICTING
        return self._even(loader, ranks, training, drop_last) if is_ours else loader

    def _refuse_undealt(self, loader: object) -> None:
        """Samples that we do not deal cannot be dealt, or drawn, as asked."""
        trainer = self.trainer
        asked = [
            *([f"data_partition={trainer.data_partition!r}"] if trainer.data_partition != "interleave" else []),
            *(["seed_samples=True"] if trainer.seed_samples else []),
            *([f"balance={trainer.balance.options.kind!r}"] if trainer.balance is not None else []),
        ]
        if asked:
            raise ValueError(
                f"{' and '.join(asked)} cannot be had with this training loader ({type(loader).__name__}), whose "
                "samples are not dealt by index: it reads a stream, has a DistributedSampler or no batches, or "
                "use_distributed_sampler=False was set, or the strategy is not one of Trainwright's. Use a DataLoader "
                f"over a map-style data set, or leave {' and '.join(a.split('=')[0] for a in asked)} out."
            )

    def _deal(self, loader: DataLoader[Any], rank: int, ranks: int, mode: RunningStage) -> DataLoader[Any]:
        trainer, training = self.trainer, mode == RunningStage.TRAINING
        self.give_back(loader)
        sampler: OrderedSampler
        if has_plain_batches(loader):
            sampler = self._rank_sampler(loader, rank, ranks, mode)
        else:
            if training:
                _refuse_to_deal_batches(trainer)
            self._settle_other(loader, ranks, training)
            sampler = DealtBatchSampler(loader.batch_sampler, trainer.data_seed, rank, ranks)
        dealt = self._lent(loader, sampler, training)
        if dealt is None:
            dealt = replace_batches(loader, sampler, mode)
        if training:
            current = trainer.fit_loop.epoch_loop.batch_progress.current
            sampler.consumed = lambda: current.ready
            # By these Lightning knows that the loader can go on in mid-epoch.
            dealt.state_dict, dealt.load_state_dict = sampler.state_dict, sampler.load_state_dict
            if trainer.seed_samples:
                draw_seeded(dealt, sampler, trainer.data_seed)
        return dealt

    def _lent(self, loader: DataLoader[Any], sampler: OrderedSampler, training: bool) -> DataLoader[Any] | None:
        """The user's own loader, where it can read our batches until training ends."""
        if not training or self.trainer.world_size > 1 or self.trainer.seed_samples:
            return None
        give_back = lend(loader, sampler)
        if give_back is None:
            return None
        self._given_back[loader] = give_back
        return loader

    def give_back(self, *loaders: object) -> None:
        """Leave the user's loaders as they were: those given, or all."""
        for loader in loaders or list(self._given_back):
            self._given_back.pop(loader, lambda: None)()  # type: ignore[call-overload]

    def _rank_sampler(self, loader: DataLoader[Any], rank: int, ranks: int, mode: RunningStage) -> RankBatchSampler:
        trainer, training = self.trainer, mode == RunningStage.TRAINING
        if training and trainer.leases is not None:
            return self._leased_sampler(loader, ranks)
        micro = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        partition = self._partition(loader.dataset) if training else None
        group = trainer.settle_global_batch(micro, ranks, deals_samples=partition is None) if training else 0
        step_samples = (trainer.global_batch.samples or 0) if training and trainer.global_batch is not None else 0
        if trainer.global_batch_size is None and partition is None:
            group = min(group, 1)
        own, drop_last = batches_of(loader)
        drop_last = drop_last and mode != RunningStage.PREDICTING
        order = EpochOrder(own, trainer.data_seed)
        shares = trainer.balance.shares_of(micro) if training and trainer.balance is not None else None
        return RankBatchSampler(order, micro, rank, ranks, group, drop_last, partition, step_samples, shares)

    def _leased_sampler(self, loader: DataLoader[Any], ranks: int) -> LeasedBatchSampler:
        trainer = self.trainer
        assert trainer.leases is not None
        problem = why_not_leased(trainer, ranks)
        if problem is not None:
            raise ValueError(f"The samples of this run cannot be leased: {problem}.")
        micro = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        accumulation = trainer.settle_global_batch(micro, ranks)
        limit = trainer.limit_train_batches
        most = limit * micro * ranks if isinstance(limit, int) else None
        own, drop_last = batches_of(loader)
        order = EpochOrder(own, trainer.data_seed)
        return LeasedBatchSampler(order, micro, accumulation, drop_last, trainer.leases, most)

    def _partition(self, dataset: object) -> SamplePartition | None:
        if self.trainer.data_partition == "interleave":
            return None
        if self.trainer.data_partition == "range":
            return RangePartition()
        return hash_partition(self.trainer.data_key, dataset)

    def _deal_stream(self, loader: DataLoader[Any], rank: int, ranks: int, training: bool) -> StreamLoader:
        trainer = self.trainer
        assert loader.batch_size is not None
        group = trainer.settle_global_batch(loader.batch_size, ranks) if training else 1
        group = 1 if trainer.global_batch_size is None else group
        dealt: StreamLoader
        if uses_shards(loader):
            self._check_shards(loader, ranks, training)
            several = dist.is_initialized() and dist.get_world_size() > 1
            agreement = self.trainer.agreement_group() if several else None
            dealt = ShardLoader(loader, ShardReader(rank, ranks, trainer.data_seed, agreement), group)
        else:
            dealt = DealtLoader(loader, rank, ranks, group)
        _auto_add_worker_init_fn(dealt.loader, self._seed_rank)
        return dealt

    def _check_shards(self, loader: DataLoader[Any], ranks: int, training: bool) -> None:
        stream: Any = loader.dataset
        if training:
            self._refuse_unequal(loader)
        if training and not stream.sizes_known and len(stream.shards.sizes) < ranks:
            raise ValueError(
                f"The training data are {len(stream.shards.sizes)} shard(s), fewer than the {ranks} data ranks, and "
                "are dealt by whole shards, since it is not known how many samples each holds. Use at most "
                f"devices={len(stream.shards.sizes)}, write more shards, or use trainwright.DealtStream, with which "
                "every rank reads all shards."
            )

    def _refuse_unequal(self, loader: object) -> None:
        """Ranks that step by themselves cannot ask each other who has a batch left."""
        if not traits_of(self.trainer.strategy).steps_are_collective:
            raise ValueError(
                f"The training loader ({type(loader).__name__}) may give ranks unequal numbers of batches, so they "
                f"would have to ask each other at every step, but under {type(self.trainer.strategy).__name__} as it "
                "is set they step by themselves. Use a DataLoader over a map-style data set, or a synchronous strategy."
            )

    def _settle_other(self, loader: object, ranks: int, training: bool) -> None:
        """Global batch of a loader whose batches we do not cut."""
        if not training:
            return
        batch_size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        if batch_size is not None:
            self.trainer.settle_global_batch(int(batch_size), ranks)
        elif self.trainer.global_batch_size is not None:
            raise ValueError(
                f"global_batch_size={self.trainer.global_batch_size} needs a training loader with a batch size, but "
                f"{type(loader).__name__} has none that can be read (batch_size). "
                "Give the DataLoader a batch_size, or leave global_batch_size out and set accumulate_grad_batches."
            )

    def _even(self, loader: object, ranks: int, training: bool, drop_last: bool) -> object:
        """Keep ranks in step over loaders that may have unequal lengths, and deal streams that are the same on all."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not several:
            return loader
        is_unknown = sized_len(loader) is None
        lengths = torch.tensor([-1.0 if is_unknown else float(sized_len(loader) or 0)])
        smallest = lengths.clone()
        group = self.trainer.agreement_group()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=group)
        if smallest.item() == lengths.item() and not is_unknown and not has_iterable_dataset(loader):
            return loader
        if training:
            self._refuse_unequal(loader)
        _auto_add_worker_init_fn(loader, self._seed_rank)
        return EvenLoader(loader, group, self._reader(ranks, training, drop_last))

    def _reader(self, ranks: int, training: bool, drop_last: bool) -> Reader:
        trainer: Any = self.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        whole_steps = training and trainer.global_batch_size is not None
        return Reader(
            data_rank=trainer.strategy.ranks.data_rank,
            data_ranks=ranks,
            world_size=dist.get_world_size(),
            training=training,
            deals=ranks > 1 and trainer._accelerator_connector.use_distributed_sampler,
            waves=trainer.accumulate_grad_batches if whole_steps else 1,
            drop_last=drop_last,
            position=lambda: int(progress.ready),
        )

    @property
    def _seed_rank(self) -> int:
        """Whose workers draw the same random numbers: ranks that share samples draw the same augmentations."""
        return ranks_of(self.trainer.strategy).data_rank


def _refuse_to_deal_batches(trainer: RunTrainer) -> None:
    if trainer.data_partition != "interleave":
        raise ValueError(
            f"data_partition={trainer.data_partition!r} deals samples, but the training loader has a batch sampler of "
            "its own, whose batches are dealt whole. Use data_partition='interleave', or a DataLoader with batch_size."
        )
    if trainer.leases is not None:
        raise ValueError(_ONLY_SINGLE_SAMPLES.format(loader="one with a batch sampler of its own"))
    if trainer.balance is not None:
        raise ValueError(
            f"balance={trainer.balance.options.kind!r} moves samples, but the training loader has a batch sampler of "
            "its own, whose batches are dealt whole. Use balance='none', or a DataLoader with batch_size."
        )


def _check_enough_samples(loader: DataLoader[Any], ranks: int, mode: RunningStage) -> None:
    samples = sized_len(loader.dataset)
    # Of an empty one Lightning warns, and trains on nothing.
    if mode == RunningStage.TRAINING and samples is not None and 0 < samples < ranks:
        raise ValueError(
            f"The training data set has {samples} sample(s), fewer than the {ranks} data ranks, so some rank would "
            f"have nothing to learn from. Use at most devices={samples}, or a larger data set."
        )


def spare_workers(loader: Any) -> None:
    """Let the worker processes of a loader outlive the signals that tell a run to end, as long as their rank does.

    Args:
        loader: any; what has no worker processes, or a system that does not tell who sends a signal, is left alone.
    """
    inner = innermost(loader)
    if not getattr(inner, "num_workers", 0) or not hasattr(inner, "worker_init_fn") or not _can_tell_senders():
        return
    if not isinstance(inner.worker_init_fn, HeedsItsRank):
        inner.worker_init_fn = HeedsItsRank(inner.worker_init_fn)


def _can_tell_senders() -> bool:
    return hasattr(signal, "sigwaitinfo")  # not on macOS


class HeedsItsRank:
    """A ``worker_init_fn`` after which a worker ends by a signal of its own rank alone, and with that rank.

    Args:
        init: the ``worker_init_fn`` that is called then; ``None``: there is none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        """Begin to heed only this process's parent."""
        end_with_main_thread()
        # Blocked in all threads to come, so that the signals wait for the one that looks where they come from.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
        os.register_at_fork(after_in_child=_unblock)
        _let_programs_be_ended()
        threading.Thread(target=_wait, args=(os.getppid(),), name="trainwright-worker", daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _wait(rank: int) -> None:
    while True:
        received = signal.sigwaitinfo(_HEEDED)
        if received.si_signo == signal.SIGTERM and (received.si_pid == rank or os.getppid() != rank):
            os._exit(0)  # as torch's own handler does


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)


@contextmanager
def _unblocked() -> Iterator[None]:
    _unblock()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)


def _let_programs_be_ended() -> None:
    """A program that a data set starts (a decoder, say) would inherit the blocked signals, and never be terminated."""
    popen: Any = subprocess.Popen
    start = popen._execute_child

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _unblocked():
            return start(self, *args, **kwargs)

    popen._execute_child = execute
