"""Detection of NaN and loss spikes before they reach the weights: drop the step, roll back, or stop."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad

from trainwright.callbacks.guard.nonfinite import NonfiniteReport, any_nonfinite, describe, find_gradient, first_bad
from trainwright.callbacks.guard.options import GuardOptions
from trainwright.callbacks.guard.verdict import DropStep, RollBack
from trainwright.callbacks.steps import log_metrics, step_number
from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.checkpoint.exchange.groups import wait_for_all
from trainwright.core.config.options import refuse
from trainwright.core.problems import DivergedError
from trainwright.core.run.traits import traits_of

# How long a rank waits for the others to find the same fault in gradients that all have at the same time.
_ALONE_SECONDS = 20.0
# Makes the median absolute deviation estimate the standard deviation of a normal distribution: 1 / Phi^-1(3/4).
_NORMAL = 1.4826


@dataclass(eq=False, repr=False)
class LossGuard(GuardOptions, Callback):
    """Checks loss and gradients before every optimizer step, on all ranks together.

    A step is bad if its loss or a gradient is NaN or infinite, or if its loss jumped: by more than ``threshold`` robust
    standard deviations above the median of the last ``window`` good ones (``LossHistory``), and by more than
    ``min_jump`` of that median. A step that fp16's gradient scaler skips is a normal one: with a scaler only the loss
    is checked.

    Policies for a bad step:

    - ``"skip"``: drop it. Parameters, optimizer state, averages and schedulers stay as they are, and it does not count
      as a step; its samples are recorded as skipped.
    - ``"rollback"``: restore an in-memory copy of the run state in the same process and repeat the steps. If the step
      is good then, the fault was transient and the run continues bit-identically to an undisturbed one. If it is bad
      again, the fault is reproducible and ``on_reproducible`` applies.
    - ``"stop"``: drop it and end training regularly, with the usual final save; :class:`DivergedError` is raised on
      every rank.

    Cost per step: a pass over the gradients, an all-reduce of three numbers and a device synchronization. Where all
    ranks have the same averaged gradients (DDP) only losses are reduced, during the last backward, so that no rank
    waits for another. ``"rollback"`` adds the copies, in host memory of ``keep_snapshots`` times the state of a rank.

    Args:
        policy: see above.
        on_reproducible: ``"skip_window"`` rolls back once more and skips the samples of ``skip_steps`` optimizer steps
            from the bad one on (at most to the end of the epoch); ``"stop"`` ends training as the policy does.
        threshold: robust standard deviations; ``None``: only NaN and infinity are bad.
        min_jump: fraction of the median by which a loss must exceed it as well, for losses that hardly vary.
        window: number of good optimizer steps remembered.
        min_history: good optimizer steps required before a jump is detected.
        snapshot_every_n_steps: optimizer steps between copies; ``None``: the interval that minimizes lost time, by
            ``mtbf``.
        mtbf: expected mean hours between bad steps, see ``StateCopies``.
        keep_snapshots: minimum number of copies kept.
        back_steps: roll back at least so many steps if a copy is old enough: an earlier update may have caused the
            jump.
        skip_steps: optimizer steps whose samples ``"skip_window"`` skips.
        max_rollbacks: rollbacks within ``per_steps``; one more ends training.
        max_skips: dropped steps within ``per_steps``; one more ends training.
        per_steps: optimizer steps over which ``max_rollbacks`` and ``max_skips`` count.

    Attributes:
        counts: dropped steps, rollbacks, and faults that did not or did recur, in this run.

    Raises:
        ValueError: naming all invalid arguments.
    """

    # A rollback must not reset it.
    keeps_its_state = True

    needs_collective_steps = True
    """All ranks must be at the same optimizer step."""

    def __post_init__(self) -> None:
        refuse(self.option_problems(), "LossGuard")
        self.counts = {"skipped": 0, "rollbacks": 0, "transient": 0, "reproducible": 0}
        self._history = LossHistory(self.window, self.min_history)
        self._interventions: list[int] = []  # global step of each
        self._suspect: int | None = None  # global step of a fault that may recur
        self._losses: list[Tensor] = []  # of the micro-batches of this optimizer step
        self._pending_mean: AsyncMean | None = None
        self._faults = 0  # found in gradients that all ranks share

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loss history, counts and interventions."""
        return {
            "losses": self._history.entries(),
            "counts": dict(self.counts),
            "interventions": list(self._interventions),
            "suspect": self._suspect,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._history.restore(state_dict["losses"])
        self.counts.update(state_dict["counts"])
        self._interventions = list(state_dict["interventions"])
        self._suspect = state_dict["suspect"]

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` if the run cannot be guarded."""
        problem = _setup_problem(self, trainer, pl_module) if stage == TrainerFn.FITTING else None
        if problem is not None:
            raise ValueError(f"LossGuard: {problem}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start, and request copies for rollbacks.

        Raises:
            ValueError: if the optimizer, or with ``"rollback"`` a loader, cannot be guarded.
        """
        problem = _start_problem(self, trainer)
        if problem is not None:
            raise ValueError(f"LossGuard: {problem}")
        self._losses, self._pending_mean = [], None
        if self.policy == "rollback":
            every = self.snapshot_every_n_steps
            trainer.copies.request(  # type: ignore[attr-defined]
                keep=self.keep_snapshots, every_n_steps=every, mtbf=self.mtbf if every is None else None
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss; with the last one of a step, start reducing them during its backward."""
        self._losses.append(loss.detach())
        ours: Any = trainer
        if traits_of(ours.strategy).gradients_agree and not ours.fit_loop._should_accumulate():
            self._pending_mean = AsyncMean(self._of_losses(trainer))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Judge the step, equally on all ranks.

        Raises:
            Verdict: if the step is bad.
        """
        seen = self._measure(trainer)
        fault = self._fault(seen)
        if fault is not None:
            fault = f"step {trainer.global_step}: {fault}{self._origin(trainer, seen)}"
        self._losses = []
        if fault is not None:
            self._intervene(trainer, fault)
        if self._suspect is not None and self._suspect <= trainer.global_step:
            self._report_transient(trainer)
        if seen["has_loss"]:
            self._log_z_score(trainer, seen["loss"])
            self._history.add(trainer.global_step + 1, seen["loss"])

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the losses of steps that will be repeated."""
        self._history.forget_after(trainer.global_step)
        self._losses = []

    # ---- judging ----------------------------------------------------------------------------------------------------

    def _measure(self, trainer: Trainer) -> dict[str, float]:
        """Return what ranks found in this step, equal on each. A collective."""
        strategy: Any = trainer.strategy
        bad_gradient = torch.zeros((), device=strategy.root_device)
        if _scaler(trainer) is None:
            bad_gradient = any_nonfinite((gradient for _, gradient in strategy.named_gradients()), strategy.root_device)
        pending, self._pending_mean = self._pending_mean, None
        if pending is None:
            numbers = torch.cat((self._of_losses(trainer), bad_gradient.view(1)))
            loss, has_loss, bad = AsyncMean(numbers).wait().tolist()
        else:
            (loss, has_loss), bad = pending.wait().tolist(), float(bad_gradient)
        weights = getattr(trainer, "token_weights", None)
        if weights is not None and weights.step_loss is not None and math.isfinite(loss):
            loss = float(weights.step_loss)  # the mean over all tokens of the step, equal on every rank
        # One non-finite loss makes the mean non-finite.
        seen = {"loss": loss, "has_loss": has_loss, "bad_loss": not math.isfinite(loss), "bad_gradient": bad}
        if pending is not None and bad and not seen["bad_loss"]:
            self._faults += 1
            require_all_ranks(self._faults, f"LossGuard: step {trainer.global_step}")
        return seen

    def _of_losses(self, trainer: Trainer) -> Tensor:
        """Return this rank's loss of the step and whether there is one, ``(2,)``."""
        if not self._losses:
            return torch.zeros(2, device=trainer.strategy.root_device)
        total = torch.stack([loss.float().sum() for loss in self._losses]).sum()
        scaler = _scaler(trainer)
        total = total if scaler is None else total / scaler._scale.to(total.device)
        return pad(total.view(1), (0, 1), value=1.0)

    def _fault(self, seen: Mapping[str, float]) -> str | None:
        """Return why the step is bad; ``None`` if it is good."""
        if seen["bad_loss"] or seen["bad_gradient"]:
            return "NaN or infinity"
        jump = self._history.jump(seen["loss"]) if seen["has_loss"] else None
        if jump is None or self.threshold is None or jump[0] <= self.threshold or jump[1] <= self.min_jump:
            return None
        z_score, part = jump
        return (
            f"the loss jumped to {seen['loss']:.6g}, {z_score:.1f} robust standard deviations (allowed: "
            f"{self.threshold:g}) and {100 * part:.0f} % above the median"
        )

    def _origin(self, trainer: Any, seen: Mapping[str, float]) -> str:
        """Return the source of NaN or infinity, if that is the fault. A collective then."""
        if not seen["bad_loss"] and not seen["bad_gradient"]:
            return ""
        strategy, rank = trainer.strategy, int(trainer.global_rank)
        gradients = strategy.named_gradients() if _scaler(trainer) is None else ()
        data_rank, stage = int(strategy.ranks.data_rank), int(strategy.layout.coordinates(rank)["pipeline"])
        report = NonfiniteReport(rank, data_rank, stage, first_bad(self._losses), *find_gradient(gradients))
        own = report if report.micro_batch is not None or report.position >= 0 else None
        reports = [own] if trainer.world_size == 1 else all_gather_values(own, trainer.agreement_group())
        return f": {describe([each for each in reports if each is not None])}"

    # ---- intervening ------------------------------------------------------------------------------------------------

    def _intervene(self, trainer: Trainer, fault: str) -> None:
        step = trainer.global_step
        if self.policy == "stop":
            self._stop(trainer, fault)
        limit = self.max_skips if self.policy == "skip" else self.max_rollbacks
        recent = sum(each > step - self.per_steps for each in self._interventions)
        if recent >= limit:
            done = "dropped" if self.policy == "skip" else "rolled back"
            self._stop(trainer, f"{fault} ({recent} bad step(s) of the last {self.per_steps} were {done} already)")
        self._interventions = [*(each for each in self._interventions if each > step - self.per_steps), step]
        if self.policy == "skip":
            self._skip(trainer, fault)
        else:
            self._roll_back(trainer, fault)

    def _skip(self, trainer: Trainer, fault: str) -> None:
        self.counts["skipped"] += 1
        rank_zero_warn(f"LossGuard: {fault}. The step is dropped.")
        self._log_counts(trainer)
        raise DropStep

    def _roll_back(self, trainer: Trainer, fault: str) -> None:
        step = trainer.global_step
        is_reproducible = self._suspect == step
        if is_reproducible:
            self.counts["reproducible"] += 1
            if self.on_reproducible == "stop":
                self._stop(trainer, f"{fault}; it recurred when the same steps were repeated")
        snapshots = trainer.copies.snapshots  # type: ignore[attr-defined]
        held = snapshots.newest(step - self.back_steps) or snapshots.oldest()
        if held is None:
            self._stop(trainer, f"{fault}; there is no copy in memory yet to roll back to")
            return
        self.counts["rollbacks"] += 1
        self._suspect = None if is_reproducible else step
        then = (
            f"It recurred, so the samples of {self.skip_steps} step(s) from this one on are skipped."
            if is_reproducible
            else "The same steps are repeated to see whether it recurs."
        )
        rank_zero_warn(f"LossGuard: {fault}. Rolling back to step {held.step} in memory. {then}")
        self._log_counts(trainer)
        raise RollBack(held, self.skip_steps if is_reproducible else 0)

    def _stop(self, trainer: Any, fault: str) -> None:
        self._log_counts(trainer)
        trainer.fit_loop.end_with(
            DivergedError(
                f"LossGuard: {fault}. Training ends; weights and checkpoints are those before that step, and a run "
                "resumed from them starts with the samples after those of that step."
            )
        )
        raise DropStep

    def _report_transient(self, trainer: Trainer) -> None:
        self.counts["transient"] += 1
        rank_zero_info(
            f"LossGuard: step {trainer.global_step} is good this time: the fault was transient and has been undone. "
            "If such faults recur, have the device checked."
        )
        self._suspect = None
        self._log_counts(trainer)

    # ---- logging ----------------------------------------------------------------------------------------------------

    def _log_z_score(self, trainer: Any, loss: float) -> None:
        every, number = trainer.log_every_n_steps, step_number(trainer)
        if not every or (number + 1) % every:
            return
        jump = self._history.jump(loss)
        if jump is not None and math.isfinite(jump[0]):
            log_metrics(trainer, {"guard/z_score": jump[0]}, number)

    def _log_counts(self, trainer: Trainer) -> None:
        values = {f"guard/{name}": float(value) for name, value in self.counts.items()}
        log_metrics(trainer, values, step_number(trainer))


def _scaler(trainer: Trainer) -> Any:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _setup_problem(guard: LossGuard, trainer: Any, module: LightningModule) -> str | None:
    if not hasattr(trainer.fit_loop, "end_with") or not hasattr(trainer.strategy, "run_state"):
        return "needs trainwright.Trainer with one of its strategies, such as strategy='ddp'"
    if not module.automatic_optimization:
        return (
            f"{type(module).__name__} optimizes manually (automatic_optimization = False), so there is no step to "
            "drop. Check the loss in training_step, or leave the guard out (guard=none)"
        )
    if guard.policy == "rollback" and any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        return (
            "StochasticWeightAveraging replaces schedulers while it runs, which a rollback cannot undo; use "
            "policy='skip', or WeightAveraging instead"
        )
    return None


def _start_problem(guard: LossGuard, trainer: Any) -> str | None:
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        return "LBFGS computes the loss several times within a step; use another optimizer, or guard=none"
    problem = trainer.fit_loop.rollback_problem() if guard.policy == "rollback" else None
    return problem and f"{problem}, so the same samples cannot be read again; use policy='skip' or 'stop'"


class LossHistory:
    """The losses of the last good optimizer steps.

    Args:
        window: number of steps remembered.
        min_history: minimum number of steps for :meth:`jump`.
    """

    def __init__(self, window: int, min_history: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=window)
        self._min_history = min_history

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a good step."""
        self._losses.append((step, loss))

    def forget_after(self, step: int) -> None:
        """Drop the steps after ``step``, which will be repeated."""
        self.restore([entry for entry in self._losses if entry[0] <= step])

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Restore the result of :meth:`entries`, as far as it fits the window."""
        self._losses = deque(((int(step), float(loss)) for step, loss in losses), maxlen=self._losses.maxlen)

    def entries(self) -> list[tuple[int, float]]:
        """Return steps and their losses, oldest first."""
        return list(self._losses)

    def jump(self, loss: float) -> tuple[float, float] | None:
        """Return how far ``loss`` lies above the history; ``None`` while that is too short.

        Returns:
            The robust z-score ``(loss - median) / (1.4826 MAD)`` (MAD: median absolute deviation; Iglewicz and Hoaglin,
            1993), and ``(loss - median) / |median|``. Negative for a lower loss; infinite if a denominator is 0.
        """
        if len(self._losses) < self._min_history:
            return None
        losses = [each for _, each in self._losses]
        median = statistics.median(losses)
        spread = _NORMAL * statistics.median(abs(each - median) for each in losses)
        return _ratio(loss - median, spread), _ratio(loss - median, abs(median))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return 0.0 if numerator == 0 else math.copysign(math.inf, numerator)


class AsyncMean:
    """An asynchronous mean over all ranks, computed in place.

    Args:
        numbers: ``(n,)``, on a device that the backend supports.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._work = dist.all_reduce(numbers, async_op=True) if several else None

    def wait(self) -> Tensor:
        """Wait for all ranks and return the mean."""
        if self._work is not None:
            self._work.wait()
            self._numbers /= dist.get_world_size()
            self._work = None
        return self._numbers


def require_all_ranks(number: int, what: str) -> None:
    """Raise unless all ranks have found a fault in the gradients that they share; called by those that have.

    A rank alone with a fault must not enter the collectives that handle it.

    Args:
        number: of the call, equal on all ranks.
        what: prefix of the message.

    Raises:
        RuntimeError: if other ranks have not.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not wait_for_all(f"trainwright/bad_gradient/{number}", timedelta(seconds=_ALONE_SECONDS)):
        raise RuntimeError(
            f"{what}: a gradient is NaN or infinite on rank {dist.get_rank()}, and is not on others, with which it was "
            "averaged. Either a hook changes gradients on this rank alone after averaging, or its memory or device is "
            "faulty: have it checked. launch=resilient restarts such a rank"
        )
