"""The exact loss of every optimizer step, over the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from trainwright.callbacks.monitor.records import emit
from trainwright.callbacks.steps import are_synchronous, is_dropped, log_metrics, step_number
from trainwright.callbacks.windows import Windowed

_ADVICE = "Lower the learning rate (optimizer.lr=...)"
_CLIP = "clip gradients (trainer.gradient_clip_val=1.0)"
ADVICE = f"{_ADVICE}, {_CLIP}, or keep such steps out of the weights (guard=skip, guard=rollback or guard=stop)."
ADVICE_ASYNCHRONOUS = (
    f"{_ADVICE} and a large momentum, or {_CLIP}: asynchronous workers need about the learning rate of synchronous "
    "ones divided by their number."
)


class GlobalLoss(Windowed):
    """Log ``loss``, the mean over the global batch of each optimizer step, to every logger, each at its own step.

    A value logged in ``training_step`` is that of one micro-batch on one rank. This callback takes the mean of the
    losses of a step's micro-batches, however few (at the end of an epoch), and of the data ranks, weighted as in the
    step, in one small all-reduce per ``every_n_steps``; on one process the value is the plain loss, bit for bit.
    Pending values are also written when validation begins and training ends; a failed run loses them.

    With ``loss_weighting="tokens"`` it is the mean over all valid tokens of the step, which the Trainer has summed
    already. With asynchronous steps (``strategy.traits.steps_are_collective`` is false) it is the loss of this rank.

    The first loss that is NaN or infinite is reported once, when its window is written, by a warning and an ``event``
    record.

    With manual optimization the loss is what ``training_step`` returns (or returns under ``"loss"``), summed over the
    batches of a step. A step without a loss on any rank is left out.

    Args:
        every_n_steps: optimizer steps per all-reduce; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Attributes:
        latest: the last loss written; ``None`` before the first.
        diverged: the first non-finite loss of this fit; ``None``: all were finite.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: float | None = None
        self.diverged: Divergence | None = None
        self._micro_losses: list[Tensor] = []
        self._weight = 0.0  # of these losses on this rank; the mean over ranks is 1 for a whole step
        self._pending: list[tuple[int, list[Tensor], float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset, and start counting."""
        self._pending, self.diverged = [], None
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss; at the end of a window, average and log."""
        if not self._window:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._micro_losses.append(loss.detach())
            self._weight += loss_weight(trainer, batch_idx)
        if is_dropped(trainer):
            self._micro_losses, self._weight = [], 0.0
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _end_step(self, trainer: Trainer, step: int) -> None:
        weights = getattr(trainer, "token_weights", None)
        if weights is not None and weights.step_loss is not None:
            self._micro_losses, self._weight = [weights.step_loss], 1.0
        # With manual optimization losses are not divided, but summed.
        is_mean = trainer.lightning_module.automatic_optimization
        weight = self._weight if is_mean else float(bool(self._micro_losses))
        self._pending.append((step, self._micro_losses, round(weight, 9)))  # exactly 1 for a whole step
        self._micro_losses, self._weight = [], 0.0
        super()._end_step(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop pending losses of steps that will be repeated."""
        super().on_gone_back(trainer, pl_module)
        self._micro_losses, self._weight = [], 0.0
        next_step = step_number(trainer)
        self._pending = [each for each in self._pending if each[0] < next_step]
        if self.diverged is not None and self.diverged.step >= next_step:
            self.diverged = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log pending losses, so that logs are complete up to a validation or the end."""
        self._report(trainer)

    on_train_end = on_validation_start

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Flush pending losses to disk: a run resumed from this state does not repeat these steps."""
        self._report(trainer)
        for logger in trainer.loggers:
            logger.save()

    def _report(self, trainer: Trainer, step: int = 0) -> None:
        if not self._pending:
            return
        steps = [step for step, *_ in self._pending]
        own, losses = self._averaged(trainer)
        for step, value in zip(steps, losses, strict=True):
            if value is not None:
                log_metrics(trainer, {"loss": value}, step)
                self.latest = value
        self._pending = []
        known = [0.0 if value is None else value for value in losses]
        first = first_nonfinite(known) if self.diverged is None else None
        if first is not None:
            self._report_divergence(trainer, steps[first], known[first], own[first])

    def _averaged(self, trainer: Trainer) -> tuple[Tensor, list[float | None]]:
        """Return the loss of each pending step on this rank, and over data ranks; ``None`` if none has one."""
        device = trainer.strategy.root_device
        weights = torch.tensor([weight for *_, weight in self._pending], device=device)
        own = _sums([micro for _, micro, _ in self._pending], device)
        both = torch.cat((own, weights))
        if are_synchronous(trainer):
            both = trainer.strategy.reduce(both, reduce_op="mean")
        values, weights = both.chunk(2)
        # A step with fewer micro-batches is divided by the full accumulation.
        means = (values / weights).tolist()
        return own, [mean if weight else None for mean, weight in zip(means, weights.tolist(), strict=True)]

    def _report_divergence(self, trainer: Trainer, step: int, loss: float, own: Tensor) -> None:
        """Report a non-finite loss. A collective with synchronous ranks, which have all seen it."""
        together = are_synchronous(trainer)
        self.diverged = Divergence(step, loss, _ranks_where(not bool(own.isfinite()), trainer))
        advice = ADVICE if together else ADVICE_ASYNCHRONOUS
        rank_zero_warn(f"GlobalLoss: {self.diverged}, the first that is not finite. Training continues. {advice}")
        # Without ranks if asynchronous, so that the report shows one event.
        text = str(self.diverged if together else replace(self.diverged, ranks=()))
        emit(trainer, "event", {"what": "diverged", "text": text, "seconds": 0}, step)


def loss_weight(trainer: Any, batch_idx: int) -> float:
    """Return the factor by which the loss of a micro-batch was multiplied; 0: it only matched collectives."""
    loop = getattr(trainer.fit_loop.epoch_loop, "automatic_optimization", None)
    divisor = getattr(loop, "loss_divisor", None)  # absent on Lightning's own Trainer
    return 1 / float(trainer.accumulate_grad_batches if divisor is None else divisor.divisor(batch_idx))


def _sums(parts: list[list[Tensor]], device: torch.device) -> Tensor:
    """Return the sum of each part, float32 ``(len(parts),)``; 0 for an empty one."""
    sizes = [len(part) for part in parts]
    if not any(sizes):
        return torch.zeros(len(parts), device=device)
    values = torch.stack([value for part in parts for value in part]).float()
    return torch.stack([piece.sum() for piece in values.split(sizes)])


@dataclass(frozen=True)
class Divergence:
    """The first step with a NaN or infinite loss.

    Args:
        step: its number in the logs, from 0.
        loss: of that step.
        ranks: ranks whose own loss was not finite; ``()``: only the mean overflowed.
    """

    step: int
    loss: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        where = f" (rank{'s' if len(self.ranks) > 1 else ''} {ranks})" if self.ranks else ""
        return f"the loss is {self.loss:g} at step {self.step}{where}"


def losses_of(trainer: Any) -> GlobalLoss | None:
    """Return the Trainer's :class:`GlobalLoss`, ``None`` if it has none."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, GlobalLoss)), None)


def first_nonfinite(values: Sequence[float]) -> int | None:
    """Return the index of the first NaN or infinite value, ``None`` if all are finite."""
    return next((index for index, value in enumerate(values) if not math.isfinite(value)), None)


def _ranks_where(found: bool, trainer: Any) -> tuple[int, ...]:
    """Return the ranks on which ``found`` is true, in a collective; of asynchronous ranks only this one."""
    if not are_synchronous(trainer):
        return (trainer.global_rank,) if found else ()
    flags = torch.zeros(trainer.world_size, device=trainer.strategy.root_device)
    flags[trainer.global_rank] = float(found)
    flags = trainer.strategy.reduce(flags, reduce_op="sum")
    return tuple(flags.nonzero().flatten().tolist())
