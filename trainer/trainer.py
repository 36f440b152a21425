"""``trainwright.Trainer``: Lightning's Trainer on any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, has_iterable_dataset, sized_len
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _select_auto_accelerator
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from trainwright.callbacks.communication_advice import CommunicationAdvice
from trainwright.callbacks.phases import SAVING, Phases
from trainwright.checkpoint.groups import WorldGroup
from trainwright.strategies.precision import AutocastPrecision, set_loss_scale
from trainwright.strategies.registry import make_strategy, strategy_names, strategy_target
from trainwright.trainer.balance import Balance, make_balance
from trainwright.trainer.balance_options import BalanceArgument
from trainwright.trainer.batch import GlobalBatch, solve_accumulation
from trainwright.trainer.copies import StateCopies
from trainwright.trainer.data_order import RankBatchSampler
from trainwright.trainer.dealt_batches import DealtBatchSampler
from trainwright.trainer.epoch_order import EpochOrder, seed_of_run
from trainwright.trainer.evaluation import ExactEvaluationLoop, OrderedPredictionLoop
from trainwright.trainer.even import EvenLoader
from trainwright.trainer.fit_loop import ResumableFitLoop
from trainwright.trainer.leased_batches import LeasedBatchSampler, SampleLeases, why_not_leased
from trainwright.trainer.loader_workers import spare_workers
from trainwright.trainer.loaders import OrderedSampler, can_order, has_plain_batches, replace_batches
from trainwright.trainer.loop import LeanEpochLoop
from trainwright.trainer.loss_scale import PRECISION as LOSS_SCALING_PRECISION
from trainwright.trainer.loss_scale import LossScale, loss_scale_problems
from trainwright.trainer.loss_weighting import LossWeighting, TokenCount, make_token_weights
from trainwright.trainer.partition import PARTITIONS, DataKey, Partition, RangePartition, resolve_data_key
from trainwright.trainer.reading import hash_partition
from trainwright.trainer.remembered_states import RememberedStates, state_source
from trainwright.trainer.resume import ResumeConnector
from trainwright.trainer.seeded_samples import seed_samples as draw_seeded
from trainwright.trainer.serving import serve
from trainwright.trainer.signals import FlagOnSignal
from trainwright.trainer.stream import StreamLoader, uses_stream


class Trainer(LightningTrainer):
    """Trains a ``LightningModule`` on any layout of devices.

    Args:
        strategy: a name (``"auto"``, ``"single"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``), one of
            Lightning's own names, or a strategy object. ``"auto"`` is one device, or DDP on several.
        global_batch_size: samples per optimizer step, the same under every layout; the number of accumulated
            micro-batches follows from it, the loader's batch size and the number of data ranks. ``None`` (off) keeps
            Lightning's meaning: the loader's batch size per rank, times ``accumulate_grad_batches``.
        uneven_steps: let the last micro-batches of every step be smaller, or none on some ranks, where
            ``global_batch_size`` cannot be made of full ones: the same numbers, with time lost to waiting. For a run
            that must keep its global batch when ranks come and go. ``False`` (off) refuses such a batch.
        balance: who computes how much of the global batch, which itself stays what it is: ``"none"`` (off): all data
            ranks the same; ``"auto"``: by measured speed; a list of shares, one for each data rank: by these; or
            options of ``"auto"`` by name, see :class:`~trainwright.trainer.balance_options.BalanceOptions`.
        data_seed: seed of the order of samples, which depends on it and the epoch alone. ``None`` takes the seed of
            ``seed_everything``, or 0.
        loss_weighting: ``"micro_batch"`` is Lightning's mean over micro-batches (and ranks) of their losses;
            ``"tokens"`` makes gradients and the logged loss those of the mean over all valid tokens of the global
            batch, see :mod:`trainwright.trainer.loss_weighting`.
        token_count: with ``"tokens"``, batch -> number of tokens over which ``training_step`` takes its mean, a
            function or ``"package.module:function"``; ``None`` counts the targets of the one ``cross_entropy`` or
            ``nll_loss`` in ``training_step``.
        data_partition: which data rank trains on which samples: ``"interleave"`` deals them in the order of the epoch;
            ``"range"`` gives each rank a contiguous range of indices; ``"hash"`` gives a sample to the same rank in
            every epoch, and to another one only if it must when ranks come or go. Evaluation always interleaves.
        data_key: with ``"hash"``, what a sample is known by: a function ``(dataset, index) -> str | int | bytes`` or
            ``"package.module:function"``; ``None`` takes the index.
        seed_samples: draw each sample of map-style training data under random number generators seeded from (seed,
            epoch, index), so that augmentations do not depend on layout, workers or resuming; ``False`` (off) leaves
            them to the generators of the process.
        allow_changed_data: ``False`` refuses to resume with another global batch, data set, order or partition than
            the run that saved; ``True`` goes on and warns of what that means.
        loss_scale: with ``precision="16-mixed"``, how the loss is scaled: ``initial`` (65536), ``growth_interval``
            (2000), ``least`` (0), ``fixed`` (False), see :class:`~trainwright.trainer.loss_scale.LossScale`. ``None``
            is torch's dynamic scaling.
        error_if_nonfinite: stop with an error when ``gradient_clip_val`` meets a norm that is NaN or infinite; off by
            default, as in Lightning.
        **kwargs: everything that ``lightning.pytorch.Trainer`` takes, with the same meaning.

    Raises:
        ValueError: if an argument is impossible, alone or with another.
    """

    _checkpoint_connector: ResumeConnector

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        global_batch_size: int | None = None,
        uneven_steps: bool = False,
        balance: BalanceArgument = "none",
        data_seed: int | None = None,
        loss_weighting: LossWeighting = "micro_batch",
        token_count: str | TokenCount | None = None,
        data_partition: str = "interleave",
        data_key: str | DataKey | None = None,
        seed_samples: bool = False,
        allow_changed_data: bool = False,
        loss_scale: Mapping[str, Any] | None = None,
        error_if_nonfinite: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_batch_options(global_batch_size, kwargs)
        _check_partition(data_partition, data_key, kwargs)
        kwargs.update(_fp16_on_cpu(kwargs))
        super().__init__(strategy=_resolve(strategy, kwargs), **kwargs)
        self.global_batch_size = global_batch_size
        self.uneven_steps = uneven_steps
        self.global_batch: GlobalBatch | None = None
        self.settled_accumulation: int | None = None
        self._data_seed = data_seed
        self.data_partition, self.data_key = data_partition, resolve_data_key(data_key)
        self.seed_samples, self.allow_changed_data = seed_samples, allow_changed_data
        self._agreement_group = WorldGroup()
        self.copies = StateCopies(self)
        self.balance: Balance | None = make_balance(self, balance)
        leased = getattr(self.strategy, "leases_samples", None)
        self.leases = None if leased is None else SampleLeases(self)
        self.token_weights = make_token_weights(self.strategy, loss_weighting, token_count)
        _set_loss_scale(self, loss_scale or {})
        _set_error_if_nonfinite(self, error_if_nonfinite)
        _add_advice(self)
        self._use_own_loops(inference_mode=kwargs.get("inference_mode", True))
        self._use_own_connectors()

    def _use_own_loops(self, inference_mode: bool) -> None:
        # Parameters gathered under inference_mode could not be trained with afterwards.
        inference_mode = inference_mode and not getattr(self.strategy, "forward_is_collective", False)
        old = self.fit_loop.epoch_loop
        self.fit_loop = ResumableFitLoop(self, self.fit_loop.min_epochs, self.fit_loop.max_epochs)
        self.fit_loop.epoch_loop = LeanEpochLoop(self, old.min_steps, old.max_steps)

        def evaluation(fn: TrainerFn, stage: RunningStage, verbose: bool, inference: bool) -> ExactEvaluationLoop:
            return ExactEvaluationLoop(self, fn, stage, verbose=verbose, inference_mode=inference)

        validating, testing = RunningStage.VALIDATING, RunningStage.TESTING
        self.fit_loop.epoch_loop.val_loop = evaluation(TrainerFn.FITTING, validating, False, False)
        self.validate_loop = evaluation(TrainerFn.VALIDATING, validating, self.validate_loop.verbose, inference_mode)
        self.test_loop = evaluation(TrainerFn.TESTING, testing, self.test_loop.verbose, inference_mode)
        self.predict_loop = OrderedPredictionLoop(self, inference_mode=inference_mode)

    def _use_own_connectors(self) -> None:
        data, signals, checkpoints = OrderedDataConnector(self), FlagOnSignal(self), ResumeConnector(self)
        data.__dict__.update(self._data_connector.__dict__)
        signals.__dict__.update(self._signal_connector.__dict__)
        checkpoints.__dict__.update(self._checkpoint_connector.__dict__)
        self._data_connector, self._signal_connector, self._checkpoint_connector = data, signals, checkpoints

    @property
    def data_seed(self) -> int:
        """Seed of the order of samples."""
        return seed_of_run() if self._data_seed is None else self._data_seed

    @property
    def phases(self) -> Phases:
        """What this rank is doing within a step, for those who watch."""
        loop: Any = self.fit_loop.epoch_loop
        phases: Phases = loop.phases
        return phases

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; who watches is told that it is no step that takes so long."""
        with self.phases.within(SAVING):
            super().save_checkpoint(*args, **kwargs)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """As Lightning's; where samples are leased, global batches' worth of samples, which schedulers count there."""
        found: int | float = super().estimated_stepping_batches
        loop: Any = self.fit_loop
        leased: LeasedBatchSampler | None = loop.leased
        if leased is None or self.global_batch is None or self.max_epochs in (None, -1):
            return found
        steps = math.ceil(leased.epoch_samples / self.global_batch.size) * max(self.max_epochs or 1, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    def settle_global_batch(self, micro_batch_size: int, data_ranks: int, deals_samples: bool = False) -> int:
        """Fix the accumulation once the loader's batch size is known.

        Args:
            micro_batch_size: samples that one data rank reads at a time.
            data_ranks: ranks that read different samples.
            deals_samples: whether single samples are dealt, so that a micro-batch may be a smaller one.

        Returns:
            Micro-batches per optimizer step.

        Raises:
            ValueError: if ``global_batch_size`` cannot be made of such micro-batches.
        """
        if self.global_batch_size is not None:
            uneven = self.uneven_steps and deals_samples
            accumulation = solve_accumulation(self.global_batch_size, micro_batch_size, data_ranks, uneven)
            self._refuse_unlike(accumulation, micro_batch_size)
            self.accumulate_grad_batches = self.settled_accumulation = accumulation
            self._refuse_manual_accumulation(micro_batch_size * data_ranks)
        batch = GlobalBatch(micro_batch_size, self.accumulate_grad_batches, data_ranks)
        if self.global_batch_size is not None and batch.size != self.global_batch_size:
            batch = replace(batch, samples=self.global_batch_size)
        self.global_batch = batch
        return self.accumulate_grad_batches

    def _refuse_unlike(self, accumulation: int, micro_batch_size: int) -> None:
        if self.settled_accumulation not in (None, accumulation):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.settled_accumulation} accumulated "
                f"micro-batches for one training loader and {accumulation} for another (batch_size={micro_batch_size}),"
                " but all are read together. Give them the same batch_size, or leave global_batch_size out and set "
                "accumulate_grad_batches."
            )

    def _refuse_manual_accumulation(self, wave_size: int) -> None:
        if self.accumulate_grad_batches > 1 and not self.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.accumulate_grad_batches} accumulated "
                "micro-batches, but the module optimizes manually and steps when it likes. "
                f"Set global_batch_size={wave_size}, or leave it out and accumulate in training_step."
            )

    def agreement_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks for agreements that must not wait for the collectives of training."""
        return self._agreement_group.get()

    def _run(self, model: LightningModule, ckpt_path: Any = None, weights_only: bool | None = None) -> Any:
        # Lightning does not pass it on to strategies that restore after they are set up.
        self._checkpoint_connector.weights_only = weights_only
        if getattr(self.strategy, "serves", False):
            return serve(self, model)
        return super()._run(model, ckpt_path, weights_only)

    def _teardown(self) -> None:
        super()._teardown()
        self.copies.stop()
        if self.leases is not None:
            self.leases.close()
        self._agreement_group.forget()


class OrderedDataConnector(_DataConnector):
    """Deals samples to ranks in an order that does not depend on the layout, in place of Lightning's sampler."""

    trainer: Trainer

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        loader = self._prepared(dataloader, shuffle, mode)
        _auto_add_worker_init_fn(loader, self.trainer.global_rank)
        spare_workers(loader)
        return loader

    def _prepared(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        strategy = self.trainer.strategy
        ranks, rank = getattr(strategy, "num_data_ranks", None), getattr(strategy, "data_rank", 0)
        training = mode == RunningStage.TRAINING
        ours = ranks is not None and self.trainer._accelerator_connector.use_distributed_sampler
        if ours and can_order(dataloader):
            assert ranks is not None
            assert isinstance(dataloader, DataLoader)
            _check_enough_samples(dataloader, ranks, mode)
            return self._deal(dataloader, rank, ranks, mode)
        if training:
            self._refuse_undealt(dataloader)
            if self.trainer.leases is not None:
                raise ValueError(_ONLY_SINGLE_SAMPLES.format(loader=type(dataloader).__name__))
        if ours and uses_stream(dataloader):
            return self._deal_stream(dataloader, rank, ranks, training)  # type: ignore[arg-type]
        loader = super()._prepare_dataloader(dataloader, shuffle, mode)
        if ours:
            self._settle_other(loader, int(ranks or 1), training)
        elif training and isinstance(loader, DataLoader) and loader.batch_size:
            self.trainer.settle_global_batch(loader.batch_size, ranks or self.trainer.world_size)
        if training and state_source(loader) is not None:
            _auto_add_worker_init_fn(loader, self.trainer.global_rank)
            loader = RememberedStates(loader, lambda: self.trainer.accumulate_grad_batches)
        return self._even(loader, ranks, training)

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
        sampler: OrderedSampler
        if has_plain_batches(loader):
            sampler = self._rank_sampler(loader, rank, ranks, mode)
        else:
            if training:
                _refuse_to_deal_batches(trainer)
            self._settle_other(loader, ranks, training)
            sampler = DealtBatchSampler(loader.batch_sampler, trainer.data_seed, rank, ranks)
        dealt = replace_batches(loader, sampler, mode)
        if training:
            current = trainer.fit_loop.epoch_loop.batch_progress.current
            sampler.consumed = lambda: current.ready
            # By these Lightning knows that the loader can go on in mid-epoch.
            dealt.state_dict, dealt.load_state_dict = sampler.state_dict, sampler.load_state_dict
            if trainer.seed_samples:
                draw_seeded(dealt, sampler, trainer.data_seed)
        return dealt

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
        drop_last = loader.drop_last and mode != RunningStage.PREDICTING
        order = EpochOrder(loader.sampler, trainer.data_seed)
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
        order = EpochOrder(loader.sampler, trainer.data_seed)
        return LeasedBatchSampler(order, micro, accumulation, loader.drop_last, trainer.leases, most)

    def _partition(self, dataset: object) -> Partition | None:
        if self.trainer.data_partition == "interleave":
            return None
        if self.trainer.data_partition == "range":
            return RangePartition()
        return hash_partition(self.trainer.data_key, dataset)

    def _deal_stream(self, loader: DataLoader[Any], rank: int, ranks: int, training: bool) -> StreamLoader:
        trainer = self.trainer
        assert loader.batch_size is not None
        group = trainer.settle_global_batch(loader.batch_size, ranks) if training else 1
        dealt = StreamLoader(loader, rank, ranks, 1 if trainer.global_batch_size is None else group)
        _auto_add_worker_init_fn(dealt.loader, trainer.global_rank)
        return dealt

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

    def _even(self, loader: object, ranks: int | None, training: bool) -> object:
        """Keep ranks in step over loaders that may have unequal lengths."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        if ranks is None or not several:
            return loader
        is_unknown = sized_len(loader) is None
        lengths = torch.tensor([-1.0 if is_unknown else float(sized_len(loader) or 0)])
        smallest = lengths.clone()
        group = self.trainer.agreement_group()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=group)
        if smallest.item() == lengths.item() and not is_unknown and not has_iterable_dataset(loader):
            return loader
        if training and not getattr(self.trainer.strategy, "steps_are_collective", True):
            raise ValueError(
                f"The training loader ({type(loader).__name__}) may give ranks unequal numbers of batches, so they "
                f"would have to ask each other at every step, but under {type(self.trainer.strategy).__name__} as it "
                "is set they step by themselves. Use a DataLoader over a map-style data set, or a synchronous strategy."
            )
        _auto_add_worker_init_fn(loader, self.trainer.global_rank)
        return EvenLoader(loader, group, pad=not training)


_ONLY_SINGLE_SAMPLES = (
    "Leases are of single samples of a map-style data set, but the training loader is {loader}. Give a DataLoader with "
    "batch_size, or turn leases off (strategy.leases=none)."
)


def _refuse_to_deal_batches(trainer: Trainer) -> None:
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


def _check_partition(partition: str, data_key: object, kwargs: dict[str, Any]) -> None:
    problems = []
    if partition not in PARTITIONS:
        problems.append(f"data_partition={partition!r} (allowed: {', '.join(map(repr, PARTITIONS))})")
    elif data_key is not None and partition != "hash":
        problems.append(
            f"data_key={data_key!r} together with data_partition={partition!r}, which asks for no key (set "
            "data_partition='hash', or leave data_key out)"
        )
    if partition != "interleave" and _has_accumulation_schedule(kwargs):
        problems.append(
            f"GradientAccumulationScheduler together with data_partition={partition!r}, which deals whole steps (give "
            "one of them)"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _check_enough_samples(loader: DataLoader[Any], ranks: int, mode: RunningStage) -> None:
    samples = sized_len(loader.dataset)
    if mode == RunningStage.TRAINING and samples is not None and samples < ranks:
        raise ValueError(
            f"The training data set has {samples} sample(s), fewer than the {ranks} data ranks, so some rank would "
            f"have nothing to learn from. Use at most devices={max(samples, 1)}, or a larger data set."
        )


def _check_batch_options(global_batch_size: int | None, kwargs: dict[str, Any]) -> None:
    if global_batch_size is None:
        return
    problems = []
    if not isinstance(global_batch_size, int) or global_batch_size < 1:
        problems.append(f"global_batch_size={global_batch_size!r} (allowed: a whole number of samples, 1 or more)")
    if kwargs.get("accumulate_grad_batches", 1) != 1:
        problems.append(
            f"accumulate_grad_batches={kwargs['accumulate_grad_batches']} together with global_batch_size="
            f"{global_batch_size} (give one of them: the accumulation follows from the global batch)"
        )
    if _has_accumulation_schedule(kwargs):
        problems.append("GradientAccumulationScheduler together with global_batch_size (give one of them)")
    if problems:
        raise ValueError("; ".join(problems))


def _has_accumulation_schedule(kwargs: dict[str, Any]) -> bool:
    callbacks = kwargs.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)


def _resolve(strategy: str | Strategy, kwargs: dict[str, Any]) -> str | Strategy:
    if not isinstance(strategy, str):
        return strategy
    if strategy == "auto":
        count = _device_count(kwargs)
        if count is None:
            return strategy
        return make_strategy("single" if count == 1 else "ddp")  # type: ignore[no-any-return]
    if strategy in strategy_names():
        return make_strategy(strategy)  # type: ignore[no-any-return]
    if strategy not in StrategyRegistry.available_strategies():
        strategy_target(strategy)  # raises, naming what there is
    return strategy


def _accelerator_name(kwargs: dict[str, Any]) -> str | None:
    accelerator = kwargs.get("accelerator", "auto")
    if accelerator == "auto":
        return _select_auto_accelerator()
    return accelerator if isinstance(accelerator, str) else None


def _device_count(kwargs: dict[str, Any]) -> int | None:
    """Number of devices of the run; ``None`` where Lightning is to choose (accelerators that we know nothing of)."""
    name = _accelerator_name(kwargs)
    name = "cuda" if name == "gpu" and torch.cuda.is_available() else name
    if name not in ("cpu", "cuda"):
        return None
    accelerator = AcceleratorRegistry[name]["accelerator"]
    devices = kwargs.get("devices", "auto")
    devices = accelerator.auto_device_count() if devices == "auto" else devices
    if devices in ([], 0, "0"):
        return None  # Lightning's own error
    parsed = accelerator.parse_devices(devices)
    return len(accelerator.get_parallel_devices(parsed)) * int(kwargs.get("num_nodes", 1))


def _fp16_on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Lightning turns fp16 on CPU into bf16; torch can do it, so what was asked for is what is done."""
    if str(kwargs.get("precision")) not in ("16-mixed", "16") or _accelerator_name(kwargs) != "cpu":
        return {}
    plugins = kwargs.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    return {"precision": None, "plugins": [*plugins, AutocastPrecision("16-mixed", "cpu")]}


def _add_advice(trainer: Trainer) -> None:
    """Have somebody measure, if the strategy was made to ask for advice and nobody does."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    asked = getattr(trainer.strategy, "communication", "none") != "none"
    if asked and not any(isinstance(callback, CommunicationAdvice) for callback in callbacks):
        callbacks.insert(0, CommunicationAdvice())


def _set_loss_scale(trainer: Trainer, given: Mapping[str, Any]) -> None:
    # Which precision that is, its plugin says.
    problems = loss_scale_problems(given, LOSS_SCALING_PRECISION, "loss_scale.")
    if problems:
        raise ValueError("; ".join(problems))
    asked = LossScale(**given)
    if not asked.is_default:
        set_loss_scale(trainer.precision_plugin, asked.initial, asked.growth_interval, asked.least, asked.fixed)


def _set_error_if_nonfinite(trainer: Trainer, error_if_nonfinite: bool) -> None:
    if not error_if_nonfinite:
        return
    plugin = trainer.precision_plugin
    if not hasattr(plugin, "error_if_nonfinite"):
        raise ValueError(
            f"error_if_nonfinite=True is not supported with {type(plugin).__name__} and "
            f"{type(trainer.strategy).__name__}. Use one of the strategies {', '.join(strategy_names())} "
            "with precision 32, bf16-mixed, bf16-true or 16-mixed."
        )
    plugin.error_if_nonfinite = True
