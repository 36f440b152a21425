"""Connector of data loaders: samples are dealt to ranks, and the global batch of the run is fixed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader

from trainwright.core.config.lightning_alias import refuse_other_package
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
    index_batches,
    keep_for_evaluation,
    read_in_place,
    replace_batches,
)
from trainwright.trainer.data.partition import RangePartition, SamplePartition
from trainwright.trainer.data.reading import hash_partition, seed_samples
from trainwright.trainer.data.remembered_states import RememberedStates, state_source
from trainwright.trainer.data.streams.dealt import DealtLoader, uses_stream
from trainwright.trainer.data.streams.loader import StreamLoader
from trainwright.trainer.data.streams.shard_loader import ShardLoader
from trainwright.trainer.data.streams.sharded import uses_shards
from trainwright.trainer.data.wrapped_loader import innermost
from trainwright.trainer.leases.batches import LeasedBatchSampler, lease_problem

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

_RUN_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_EVALUATING = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class OrderedDataConnector(_DataConnector):
    """Deals samples to ranks in an order independent of the layout, instead of Lightning's sampler."""

    trainer: RunTrainer

    def __init__(self, trainer: RunTrainer) -> None:
        super().__init__(trainer)
        self._restorers: dict[DataLoader[Any], Callable[[], None]] = {}

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        refuse_other_package([dataloader])
        loader = self._prepare(dataloader, shuffle, mode)
        _auto_add_worker_init_fn(loader, self._seed_rank)
        shield_workers(loader)
        return loader

    def _prepare(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        strategy = self.trainer.strategy
        ranks, rank = ranks_of(strategy).num_data_ranks, ranks_of(strategy).data_rank
        training = mode == RunningStage.TRAINING
        is_ours = hasattr(strategy, "ranks")
        ours = is_ours and self.trainer._accelerator_connector.use_distributed_sampler
        if ours and can_order(dataloader):
            assert isinstance(dataloader, DataLoader)
            _check_enough_samples(dataloader, ranks, mode)
            if self.trainer.world_size == 1 and mode in _EVALUATING and keep_for_evaluation(dataloader):
                return dataloader
            return self._deal(dataloader, rank, ranks, mode)
        if training:
            self._refuse_options(dataloader)
        if ours and (uses_stream(dataloader) or uses_shards(dataloader)):
            return self._deal_stream(dataloader, rank, ranks, training)  # type: ignore[arg-type]
        # Without batches, Lightning would deal the samples of a DistributedSampler again.
        is_own = ours and getattr(dataloader, "batch_sampler", dataloader) is None
        loader = dataloader if is_own else super()._prepare_dataloader(dataloader, shuffle, mode)
        if ours:
            self._settle_other(loader, ranks, training)
        elif training and isinstance(loader, DataLoader) and loader.batch_size:
            self.trainer.settle_global_batch(loader.batch_size, ranks)
        if training and state_source(loader) is not None:
            _auto_add_worker_init_fn(loader, self._seed_rank)
            loader = RememberedStates(loader, lambda: self.trainer.accumulate_grad_batches)
        drop_last = training and bool(getattr(dataloader, "drop_last", False))
        return self._even(loader, ranks, training, drop_last) if is_ours else loader

    def _refuse_options(self, loader: object, can_seed: bool = False) -> None:
        """Raise for options that need a training loader whose samples are dealt one by one."""
        trainer, leases = self.trainer, traits_of(self.trainer.strategy).leases_samples
        options = [
            *([f"data_partition={trainer.data_partition!r}"] if trainer.data_partition != "interleave" else []),
            *(["seed_samples=True"] if trainer.seed_samples and not can_seed else []),
            *([f"balance={trainer.balance.options.kind!r}"] if trainer.balance is not None else []),
            *([f"strategy.leases={leases!r}"] if leases is not None else []),
        ]
        if options:
            raise ValueError(
                f"{' and '.join(options)} is not supported with this training loader ({type(loader).__name__}), whose "
                "samples are not dealt one by one: it reads a stream, has a batch sampler of its own, a "
                "DistributedSampler or batch_size=None, or use_distributed_sampler=False was set, or the strategy is "
                "not Trainwright's. Use a DataLoader with batch_size over a map-style data set, or remove "
                f"{' and '.join(each.split('=')[0] for each in options)}."
            )

    def _deal(self, loader: DataLoader[Any], rank: int, ranks: int, mode: RunningStage) -> DataLoader[Any]:
        trainer, training = self.trainer, mode == RunningStage.TRAINING
        self.restore(loader)
        sampler: OrderedSampler
        is_bulk = loader.batch_sampler is None
        if has_plain_batches(loader):
            if training and is_bulk and trainer.seed_samples:  # its data set draws several samples at once
                self._refuse_options(loader)
            sampler = self._rank_sampler(loader, rank, ranks, mode)
        else:
            if training:
                self._refuse_options(loader, can_seed=not is_bulk)
            self._settle_other(loader, ranks, training)
            own = index_batches(loader)
            own = getattr(own, "batches", own)  # prepared for an earlier run
            kind = (lambda index: list(index) if isinstance(index, list) else index) if is_bulk else list
            sampler = DealtBatchSampler(own, trainer.data_seed, rank, ranks, kind)
        sampler.evaluates = not training
        dealt = loader
        restorer = None
        if training and trainer.world_size == 1 and not trainer.seed_samples:
            restorer = read_in_place(loader, sampler)
        if restorer is None:
            dealt = replace_batches(loader, sampler, mode)
        else:
            self._restorers[loader] = restorer
        if training:
            current = trainer.fit_loop.epoch_loop.batch_progress.current
            sampler.consumed = partial(getattr, current, "ready")  # a Trainer can be pickled
            # Lightning then knows that the loader can resume within an epoch.
            dealt.state_dict, dealt.load_state_dict = sampler.state_dict, sampler.load_state_dict
            if trainer.seed_samples:
                seed_samples(dealt, sampler, trainer.data_seed)
        return dealt

    def restore(self, *loaders: object) -> None:
        """Restore the user's loaders: the given ones, or all."""
        for loader in loaders or list(self._restorers):
            self._restorers.pop(loader, lambda: None)()  # type: ignore[call-overload]

    def _rank_sampler(self, loader: DataLoader[Any], rank: int, ranks: int, mode: RunningStage) -> RankBatchSampler:
        trainer, training = self.trainer, mode == RunningStage.TRAINING
        if training and trainer.leases is not None:
            return self._leased_sampler(loader, ranks)
        micro = index_batches(loader).batch_size
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
        problem = lease_problem(trainer, ranks)
        if problem is not None:
            raise ValueError(f"The samples of this run cannot be leased: {problem}.")
        micro = index_batches(loader).batch_size
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
        group = trainer.settle_global_batch(loader.batch_size, ranks) if training else 0
        group = min(group, 1) if trainer.global_batch_size is None else group
        dealt: StreamLoader
        if uses_shards(loader):
            self._check_shards(loader, ranks, training)
            several = dist.is_initialized() and dist.get_world_size() > 1
            agreement = self.trainer.agreement_group() if several else None
            dealt = ShardLoader(loader, rank, ranks, trainer.data_seed, agreement, group)
        else:
            dealt = DealtLoader(loader, rank, ranks, group)
        _auto_add_worker_init_fn(dealt.loader, self._seed_rank)
        return dealt

    def _check_shards(self, loader: DataLoader[Any], ranks: int, training: bool) -> None:
        stream: Any = loader.dataset
        if training:
            self._require_synchronous(loader)
        if training and not stream.sizes_known and len(stream.shards.sizes) < ranks:
            raise ValueError(
                f"The training data are {len(stream.shards.sizes)} shard(s), fewer than the {ranks} data ranks, and "
                f"are dealt whole, since their sizes are unknown. Use at most devices={len(stream.shards.sizes)}, "
                "write more shards, or use trainwright.DealtStream, with which every rank reads all of them."
            )

    def _require_synchronous(self, loader: object) -> None:
        """Raise for asynchronous ranks, which cannot agree on whether there is another batch."""
        if not traits_of(self.trainer.strategy).steps_are_collective:
            raise ValueError(
                f"The training loader ({type(loader).__name__}) may give ranks unequal numbers of batches, so they "
                f"must agree at every step, but steps under {type(self.trainer.strategy).__name__} with these options "
                "are asynchronous. Use a DataLoader over a map-style data set, or a synchronous strategy."
            )

    def _settle_other(self, loader: object, ranks: int, training: bool) -> None:
        """Fix the global batch of a loader whose batches are not cut here."""
        if not training:
            return
        batch_size = getattr(loader, "batch_size", None) or getattr(index_batches(loader), "batch_size", None)
        if batch_size is not None:
            self.trainer.settle_global_batch(int(batch_size), ranks)
        elif self.trainer.global_batch_size is not None:
            raise ValueError(
                f"global_batch_size={self.trainer.global_batch_size} needs a training loader with a batch_size, which "
                f"{type(loader).__name__} lacks. Give it one, or set accumulate_grad_batches instead."
            )

    def _even(self, loader: object, ranks: int, training: bool, drop_last: bool) -> object:
        """Equalize the batches of ranks if lengths may differ, and deal streams that are equal on all ranks."""
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
            self._require_synchronous(loader)
        _auto_add_worker_init_fn(loader, self._seed_rank)
        trainer = self.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        whole_steps = training and trainer.global_batch_size is not None
        reader = Reader(
            data_rank=self._seed_rank,
            data_ranks=ranks,
            world_size=dist.get_world_size(),
            training=training,
            deals=ranks > 1 and trainer._accelerator_connector.use_distributed_sampler,
            waves=trainer.accumulate_grad_batches if whole_steps else 1,
            drop_last=drop_last,
            position=lambda: int(progress.ready),
        )
        return EvenLoader(loader, group, reader)

    @property
    def _seed_rank(self) -> int:
        """Rank that seeds workers: ranks that share samples draw the same augmentations."""
        return ranks_of(self.trainer.strategy).data_rank


def _check_enough_samples(loader: DataLoader[Any], ranks: int, mode: RunningStage) -> None:
    samples = sized_len(loader.dataset)
    # Lightning warns of an empty one, and trains on nothing.
    if mode == RunningStage.TRAINING and samples is not None and 0 < samples < ranks:
        raise ValueError(
            f"The training data set has {samples} sample(s), fewer than the {ranks} data ranks, so some ranks would "
            f"have none. Use at most devices={samples}, or a larger data set."
        )


def shield_workers(loader: Any) -> None:
    """Shield worker processes of a loader from signals that end the run, while their rank lives.

    Args:
        loader: any; ignored without worker processes, and on systems without ``sigwaitinfo`` (macOS).
    """
    inner = innermost(loader)
    has_workers = getattr(inner, "num_workers", 0) and hasattr(inner, "worker_init_fn")
    if has_workers and hasattr(signal, "sigwaitinfo") and not isinstance(inner.worker_init_fn, ShieldedWorker):
        inner.worker_init_fn = ShieldedWorker(inner.worker_init_fn)


class ShieldedWorker:
    """A ``worker_init_fn`` after which a worker ends only on a signal of its own rank, or with that rank.

    Args:
        init: the ``worker_init_fn`` to call afterwards; ``None``: none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        """Shield this worker from other processes' signals."""
        end_with_main_thread()
        # Blocked in all future threads, so that the waiting thread gets the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
        os.register_at_fork(after_in_child=_unblock)
        _unblock_for_programs()
        threading.Thread(target=_wait, args=(os.getppid(),), name="trainwright-worker", daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _wait(rank: int) -> None:
    while True:
        received = signal.sigwaitinfo(_RUN_SIGNALS)
        if received.si_signo == signal.SIGTERM and (received.si_pid == rank or os.getppid() != rank):
            os._exit(0)  # like torch's own handler


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUN_SIGNALS)


def _unblock_for_programs() -> None:
    """Unblock the signals for programs that a data set starts (such as a decoder), which inherit the mask."""
    popen: Any = subprocess.Popen
    start = popen._execute_child

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        _unblock()
        try:
            return start(self, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)

    popen._execute_child = execute
