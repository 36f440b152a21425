"""Who computes how much of the global batch: by measured speed, or as asked for.

A step consists of the same samples as ever, and the loss of a rank weighs as much as its samples, so that losses,
gradients and parameters are those of equal shares. What moves is where each wave is cut. Every rank computes as many
micro-batches as the others, of another size: forward and backward passes that are collectives still meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.modules.batchnorm import SyncBatchNorm

from trainwright.callbacks.step_clock import StepClock
from trainwright.callbacks.steps import StepCounter
from trainwright.callbacks.windows import Measuring
from trainwright.checkpoint.exchange.distinct import all_gather_rows
from trainwright.core.torch_internals import _BatchNorm
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.registry import strategy_names
from trainwright.trainer.balance.check import data_problems, layout_problems, micro_batch_problems, strategy_problems
from trainwright.trainer.balance.options import AUTO, FIXED, NONE, BalanceArgument, BalanceOptions, balance_options
from trainwright.trainer.balance.shares import Bounds, ShareSchedule, is_worth_it
from trainwright.trainer.data.data_order import RankBatchSampler
from trainwright.trainer.data.reading import dealer_of

# Steps at the beginning that are left out: they compile, warm caches and make connections.
_WARM_UP = 1
# Shares that a message lists.
_SHOWN = 16


@dataclass(frozen=True)
class Measured:
    """What one rank tells of a window.

    Args:
        data_rank: among those that read different samples.
        seconds: of its own computing, without waits.
        samples: that its data rank computed.
        drawn: batches of the epoch that its loader has drawn.
    """

    data_rank: int
    seconds: float
    samples: float
    drawn: int


class Balance(Measuring):
    """Deals the samples of a step to data ranks by their speed; made by ``Trainer(balance=...)``.

    With ``"auto"``, every ``every_steps`` optimizer steps all ranks tell each other for how long they computed
    (forward, backward and optimizer, without waits for other ranks) and for how many samples: one all-gather of four
    numbers. All of them then decide alike. A data rank is as slow as the slowest of its ranks (of a pipeline, or along
    the tensor and context axes). New shares hold from the first step on of which no loader has drawn a batch.

    Args:
        options: what was asked for, not ``"none"``.
        strategy: of the run.
    """

    def __init__(self, options: BalanceOptions, strategy: LayoutStrategy) -> None:
        self.options = options
        self.schedule = ShareSchedule(
            Bounds() if options.kind == FIXED else Bounds(options.least_share, options.most_share)
        )
        self.make_clock: Callable[[Any], StepClock] = StepClock
        """Makes what measures a rank's time, of what measures its waits."""
        self._strategy = strategy
        self._seconds: list[float] | None = None  # per sample of each data rank, smoothed; None: not measured yet
        self._steps = StepCounter()
        self._wave_size = 0
        self._done = -_WARM_UP  # steps of this window
        self._samples = 0  # of this window
        self._clock: StepClock | None = None

    # ---- what is dealt --------------------------------------------------------------------------------------------

    def shares_of(self, micro_batch_size: int) -> ShareSchedule:
        """The shares for a loader with micro-batches of this size.

        Raises:
            ValueError: if none of its samples can be moved.
        """
        problems = micro_batch_problems(micro_batch_size, self.schedule.bounds.least_samples)
        if problems:
            raise ValueError("; ".join(problems))
        self._wave_size = micro_batch_size * self._strategy.ranks.num_data_ranks
        return self.schedule

    @property
    def shares(self) -> list[int]:
        """Samples of each data rank in a full micro-batch of all, as decided last."""
        return self.schedule.latest_sizes(self._wave_size)

    @property
    def _dealer(self) -> RankBatchSampler:
        trainer: Any = self._strategy.lightning_module.trainer
        dealer = dealer_of(trainer.fit_loop._combined_loader.flattened[0])
        assert isinstance(dealer, RankBatchSampler)
        return dealer

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin with the shares asked for, or with equal ones."""
        if stage != "fit":
            return
        ranks = self._strategy.ranks.num_data_ranks
        # Torch refuses BatchNorm of a single value.
        least = max(self._strategy.options.least_batch(self._strategy.layout), 2 if _batch_norms(pl_module) else 1)
        self.schedule.bounds = replace(self.schedule.bounds, least_samples=least)
        self.schedule.start([1 / share for share in self.options.shares or [1.0] * ranks])
        self._seconds = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure.

        Raises:
            ValueError: if several loaders are read together.
        """
        loaders = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        if len(loaders) != 1:
            raise ValueError(
                f"balance={self.options.kind!r} with {len(loaders)} training loaders: nobody knows how their losses "
                "are put together, so that shares of unequal weight cannot be. Use one loader, or balance='none'."
            )
        _tell_of_batch_norm(pl_module)
        self._steps.start(trainer)
        self._forget_window()
        if self.options.kind != AUTO:
            return
        self._clock = self.make_clock(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at the end of a window, decide. A collective then."""
        if self._clock is None:
            return
        self._samples += self._dealer.count(batch_idx)
        if self._steps.ended(trainer) is None:
            return
        self._done += 1
        if self._done == 0:
            self._clock.take(wait_for_device=True)
            self._samples = 0
        elif self._done == self.options.every_steps:
            self._decide(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a window anew, after a step that is left out."""
        self._steps.start(trainer)
        self._forget_window()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def _forget_window(self) -> None:
        self._done, self._samples = -_WARM_UP, 0

    # ---- deciding -------------------------------------------------------------------------------------------------

    def _decide(self, trainer: Trainer) -> None:
        assert self._clock is not None
        seconds, *_ = self._clock.take(wait_for_device=True)
        dealer = self._dealer
        everyone = self._of_all_ranks(Measured(dealer.data_rank, seconds, self._samples, dealer.drawn))
        self._done = self._samples = 0
        self._clock.refresh()
        self.take_up(everyone, trainer)

    def take_up(self, everyone: Sequence[Measured], trainer: Any) -> None:
        """Deal by what all ranks have measured, if that is worth it; the same on every rank."""
        measured = _per_sample(everyone, self._strategy.ranks.num_data_ranks)
        if measured is None:
            return
        keep = self.options.smoothing if self._seconds is not None else 0.0
        before = self._seconds or measured
        self._seconds = [keep * old + (1 - keep) * new for old, new in zip(before, measured, strict=True)]
        now, bounds = self.schedule.seconds, self.schedule.bounds
        epoch, batch = self._dealer.current_epoch, int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if not is_worth_it(self._wave_size, now, self._seconds, bounds, self.options.least_gain):
            return
        per_step = trainer.accumulate_grad_batches
        first = -(-max(each.drawn for each in everyone) // per_step) * per_step
        self.schedule.forget_before(epoch, batch - 1)
        self.schedule.change(epoch, first, self._seconds)
        rank_zero_info(
            f"Step {trainer.global_step}: of the {self._wave_size} samples that are computed at a time, the data ranks "
            f"get {_listed(self.shares)} from batch {first} of epoch {epoch} on."
        )

    def _of_all_ranks(self, own: Measured) -> list[Measured]:
        device = self._strategy.root_device
        mine = torch.tensor([own.data_rank, own.seconds, own.samples, own.drawn], dtype=torch.float64, device=device)
        rows = all_gather_rows(mine).tolist()
        return [Measured(int(rank), seconds, samples, int(drawn)) for rank, seconds, samples, drawn in rows]

    # ---- the run state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a run needs to go on with the same shares; the same on every rank."""
        return {"measured": self._seconds, "dealt_by": list(self.schedule.seconds)}

    def go_on_with(self, state: dict[str, Any] | None) -> None:
        """Go on with the shares of another run, where they are of as many data ranks."""
        if self.options.kind != AUTO or state is None:
            return
        ranks, before = self._strategy.ranks.num_data_ranks, len(state["dealt_by"])
        if before != ranks:
            rank_zero_info(
                f"balance: begins with equal shares, since those saved are of {before} data ranks, not {ranks}."
            )
            self.schedule.start([1.0] * ranks)
            self._seconds = None
            return
        self.schedule.start(state["dealt_by"])
        self._seconds = state["measured"]


def _listed(shares: Sequence[int]) -> str:
    """The shares of the first data ranks, and between which those of the others are."""
    shown = ", ".join(map(str, shares[:_SHOWN]))
    rest = shares[_SHOWN:]
    return f"{shown} and {len(rest)} others {min(rest)} to {max(rest)}" if rest else shown


def _per_sample(everyone: Sequence[Measured], ranks: int) -> list[float] | None:
    """Seconds per sample of each data rank, those of its slowest rank; ``None`` if one cannot tell."""
    found = [0.0] * ranks
    for each in everyone:
        if each.samples <= 0 or each.seconds <= 0:
            return None
        found[each.data_rank] = max(found[each.data_rank], each.seconds / each.samples)
    return found


def _batch_norms(module: LightningModule) -> bool:
    """Whether the module normalises over the samples of one rank."""
    return any(isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm) for each in module.modules())


def _tell_of_batch_norm(module: LightningModule) -> None:
    if _batch_norms(module):
        rank_zero_warn(
            f"balance: {type(module).__name__} has BatchNorm, which normalises over the samples of one rank, so that "
            "results depend on the shares. sync_batchnorm=True (trainer.sync_batchnorm=true) normalises over all."
        )


def make_balance(trainer: Any, balance: BalanceArgument) -> Balance | None:
    """The callback that ``Trainer(balance=...)`` asks for, put in its place; ``None`` for ``"none"``.

    Raises:
        ValueError: if it cannot be had.
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
    problems = [
        *strategy_problems(options.kind, type(strategy).__name__, not strategy.traits.averages_every_step),
        *layout_problems(strategy.layout, options.kind, options.shares),
        *data_problems(trainer.data_partition, deals_samples, ""),
    ]
    if problems:
        raise ValueError("; ".join(problems))
    made = Balance(options, strategy)
    # Before those that save: what they save knows of the shares.
    trainer.callbacks.insert(0, made)
    return made
