"""Balancing of the global batch over data ranks, by measured speed or fixed shares.

A step consists of the same samples, and a rank's loss is weighted by its samples, so that losses, gradients and
parameters equal those of equal shares. Only the cuts of each wave move. Every rank computes equally many micro-batches,
of different sizes, so that collectives in forward and backward still match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import SyncBatchNorm

from trainwright.callbacks.step_clock import StepClock
from trainwright.callbacks.windows import Clocked, Windowed
from trainwright.checkpoint.exchange.distinct import all_gather_rows
from trainwright.core.config.options import refuse
from trainwright.core.torch_internals import _BatchNorm
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.registry import strategy_names
from trainwright.strategies.data.batch_norm import SynchronizedBatchNorm
from trainwright.trainer.balance.check import data_problems, layout_problems, micro_batch_problems, strategy_problems
from trainwright.trainer.balance.options import AUTO, FIXED, NONE, BalanceArgument, BalanceOptions, balance_options
from trainwright.trainer.balance.shares import Bounds, ShareSchedule, divide, pays_off
from trainwright.trainer.data.data_order import RankBatchSampler
from trainwright.trainer.data.reading import dealer_of

# Shares listed in a message.
_SHOWN = 16


class Balance(Clocked[StepClock], Windowed):
    """Assigns samples of a step to data ranks by speed; created by ``Trainer(balance=...)``.

    With ``"auto"``, all ranks exchange their computation time (forward, backward and optimizer, without waits) and
    number of samples every ``every_steps`` optimizer steps, in one all-gather of four numbers, and decide alike. A data
    rank is as slow as the slowest of its ranks (pipeline, tensor or context). New shares apply from the first step of
    which no loader has drawn a batch.

    Args:
        options: not ``"none"``.
        strategy: of the run.

    Attributes:
        make_clock: creates the clock of a rank.
    """

    _warm_up = 1

    def __init__(self, options: BalanceOptions, strategy: LayoutStrategy) -> None:
        super().__init__(options.every_steps)
        self.options = options
        self.schedule = ShareSchedule(
            Bounds() if options.kind == FIXED else Bounds(options.least_share, options.most_share)
        )
        self.make_clock: Callable[[Any], StepClock] = StepClock
        self._strategy = strategy
        self._seconds: list[float] | None = None  # per sample of each data rank, smoothed; None before measuring
        self._wave_size = 0
        self._samples = 0  # in this window

    # ---- shares ---------------------------------------------------------------------------------------------------

    def shares_of(self, micro_batch_size: int) -> ShareSchedule:
        """Return the shares for a loader with micro-batches of this size.

        Raises:
            ValueError: if none of its samples can be moved.
        """
        refuse(micro_batch_problems(micro_batch_size, self.schedule.bounds.least_samples))
        self._wave_size = micro_batch_size * self._strategy.ranks.num_data_ranks
        return self.schedule

    @property
    def shares(self) -> list[int]:
        """Samples of each data rank in a full micro-batch, by the latest decision."""
        return divide(self._wave_size, self.schedule.seconds, self.schedule.bounds)

    @property
    def _dealer(self) -> RankBatchSampler:
        trainer: Any = self._strategy.lightning_module.trainer
        dealer = dealer_of(trainer.fit_loop._combined_loader.flattened[0])
        assert isinstance(dealer, RankBatchSampler)
        return dealer

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start with the given shares, or equal ones."""
        if stage != "fit":
            return
        ranks = self._strategy.ranks.num_data_ranks
        # Torch refuses BatchNorm of a single value.
        least = max(self._strategy.options.least_batch(self._strategy.layout), 2 if _has_batch_norm(pl_module) else 1)
        self.schedule.bounds = replace(self.schedule.bounds, least_samples=least)
        self.schedule.start([1 / share for share in self.options.shares or [1.0] * ranks])
        self._seconds = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring.

        Raises:
            ValueError: if there are several training loaders.
        """
        loaders = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        if len(loaders) != 1:
            raise ValueError(
                f"balance={self.options.kind!r} with {len(loaders)} training loaders: it is unknown how their losses "
                "are combined, so unequal shares cannot be weighted. Use one loader, or balance='none'."
            )
        if _has_batch_norm(pl_module):
            rank_zero_warn(
                f"balance: {type(pl_module).__name__} has BatchNorm, which normalizes over the samples of one rank, so "
                "results depend on the shares. sync_batchnorm=True (trainer.sync_batchnorm=true) normalizes over all."
            )
        super().on_train_start(trainer, pl_module)
        if self.options.kind == AUTO:
            self._clock = self.make_clock(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at the end of a window, decide. A collective then."""
        if self._clock is not None:
            self._samples += self._dealer.count(batch_idx)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    # ---- decisions ------------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._running_clock.take(wait_for_device=True)
        self._samples = 0

    def _ends_window(self, step: int) -> bool:
        return self._done == self._window

    def _report(self, trainer: Trainer, step: int) -> None:
        seconds, *_ = self._running_clock.take(wait_for_device=True)
        dealer = self._dealer
        # Seconds of its own computation without waits, samples of its data rank, batches drawn by its loader.
        own = [dealer.data_rank, seconds, self._samples, dealer.drawn]
        mine = torch.tensor(own, dtype=torch.float64, device=self._strategy.root_device)
        rows = all_gather_rows(mine).tolist()
        self._samples = 0
        self._running_clock.refresh()
        self._apply(rows, trainer)

    def _apply(self, rows: Sequence[Sequence[float]], trainer: Any) -> None:
        """Change shares by the measurements of all ranks, if that pays off; equal on every rank."""
        measured = _per_sample(rows, self._strategy.ranks.num_data_ranks)
        if measured is None:
            return
        keep = self.options.smoothing if self._seconds is not None else 0.0
        before = self._seconds or measured
        self._seconds = [keep * old + (1 - keep) * new for old, new in zip(before, measured, strict=True)]
        now, bounds = self.schedule.seconds, self.schedule.bounds
        epoch, batch = self._dealer.current_epoch, int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if not pays_off(self._wave_size, now, self._seconds, bounds, self.options.least_gain):
            return
        per_step = trainer.accumulate_grad_batches
        first = -(-max(int(drawn) for *_, drawn in rows) // per_step) * per_step
        self.schedule.drop_before(epoch, batch - 1)
        self.schedule.change(epoch, first, self._seconds)
        rank_zero_info(
            f"Step {trainer.global_step}: of the {self._wave_size} samples that are computed at a time, the data ranks "
            f"get {_listed(self.shares)} from batch {first} of epoch {epoch} on."
        )

    # ---- the run state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the shares, equal on every rank."""
        return {"measured": self._seconds, "dealt_by": list(self.schedule.seconds)}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Resume saved shares, if the number of data ranks is the same."""
        if self.options.kind != AUTO or state is None:
            return
        ranks, before = self._strategy.ranks.num_data_ranks, len(state["dealt_by"])
        if before != ranks:
            rank_zero_info(
                f"balance: starts with equal shares, since those saved are of {before} data ranks, not {ranks}."
            )
            self.schedule.start([1.0] * ranks)
            self._seconds = None
            return
        self.schedule.start(state["dealt_by"])
        self._seconds = state["measured"]


def _listed(shares: Sequence[int]) -> str:
    """Format the shares of the first data ranks, and the range of the others."""
    shown = ", ".join(map(str, shares[:_SHOWN]))
    rest = shares[_SHOWN:]
    return f"{shown} and {len(rest)} others {min(rest)} to {max(rest)}" if rest else shown


def _per_sample(rows: Sequence[Sequence[float]], ranks: int) -> list[float] | None:
    """Return the seconds per sample of each data rank (its slowest rank); ``None`` if unknown."""
    found = [0.0] * ranks
    for data_rank, seconds, samples, _ in rows:
        if samples <= 0 or seconds <= 0:
            return None
        found[int(data_rank)] = max(found[int(data_rank)], seconds / samples)
    return found


def _has_batch_norm(module: LightningModule) -> bool:
    """Return whether the module normalizes over the samples of one rank."""
    synchronized = (SyncBatchNorm, SynchronizedBatchNorm)
    return any(isinstance(each, _BatchNorm) and not isinstance(each, synchronized) for each in module.modules())


def make_balance(trainer: Any, balance: BalanceArgument) -> Balance | None:
    """Create and insert the callback for ``Trainer(balance=...)``; ``None`` for ``"none"``.

    Raises:
        ValueError: if it is not supported.
    """
    options = balance_options(balance)
    if options.kind == NONE:
        return None
    strategy = trainer.strategy
    if not isinstance(strategy, LayoutStrategy):
        raise ValueError(
            f"balance={options.kind!r} is not supported with {type(strategy).__name__}. Use one of the strategies "
            f"{', '.join(strategy_names())}."
        )
    deals_samples = trainer._accelerator_connector.use_distributed_sampler
    refuse(
        [
            *strategy_problems(options.kind, type(strategy).__name__, not strategy.traits.averages_every_step),
            *layout_problems(strategy.layout, options.kind, options.shares),
            *data_problems(trainer.data_partition, deals_samples, ""),
        ]
    )
    created = Balance(options, strategy)
    # Before callbacks that save, whose state includes the shares.
    trainer.callbacks.insert(0, created)
    return created
