"""Keeps NaN and spikes of the loss out of the weights: the step is dropped, made again from a copy, or the run ends."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad

from trainwright.callbacks.guard.nonfinite import Blame, any_nonfinite, find_gradient, first_bad, in_words
from trainwright.callbacks.guard.options import guard_problems
from trainwright.callbacks.guard.verdict import DropStep, GoBack
from trainwright.callbacks.steps import log_metrics
from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.checkpoint.exchange.groups import wait_for_all
from trainwright.core.problems import DivergedError
from trainwright.core.run.traits import traits_of

if TYPE_CHECKING:
    from trainwright.callbacks.guard.copies import StateCopies

# How long a rank that sees something bad in what all ranks have alike waits for the others to see it. They have the
# same gradients at the same time.
_ALONE_SECONDS = 20.0
# Makes the median of absolute deviations an estimate of the standard deviation of normal numbers: 1 / Phi^-1(3/4).
_NORMAL = 1.4826


@dataclass(eq=False, repr=False)
class LossGuard(Callback):
    """Looks at loss and gradients of every optimizer step before it is made, on all ranks together.

    A step is bad if its loss or a gradient is NaN or infinite, or if its loss has jumped: it lies more than
    ``threshold`` robust standard deviations above the median of the last ``window`` good ones
    (``LossHistory``), and more than ``min_jump`` of that median. A step that
    fp16's gradient scaler skips is a normal one: with a scaler only the loss is looked at.

    What is done with a bad step (``policy``):

    - ``"skip"``: it is dropped. Parameters, the optimizer's state, averages and schedulers stay as they are, and it
      does not count as a step; its samples are recorded as skipped.
    - ``"rollback"``: training goes back to a copy of the run state in this rank's memory, in the same process, and
      makes the same steps again. If the step is good then, the fault was transient, and nothing is left of it: what
      follows has the bits of an undisturbed run. If it is bad again, the fault is reproducible, and
      ``on_reproducible`` says what is done.
    - ``"stop"``: the step is dropped and training ends as at its regular end, with what is saved then, and
      :class:`DivergedError` is raised on every rank.

    It costs a pass over the gradients, an all-reduce of three numbers and a wait for the device at every step. Where
    all ranks have the same averaged gradients (DDP) each sees in its own what all see, and the losses are added up
    while the last backward of the step runs, so that no rank waits for another. ``"rollback"`` costs the copies as
    well, in host memory of ``keep_snapshots`` times what the rank holds.

    Args:
        policy: see above.
        on_reproducible: ``"skip_window"`` goes back once more and passes over the samples of ``skip_steps`` optimizer
            steps, from the bad one on (to the end of the epoch at most); ``"stop"`` ends training as the policy does.
        threshold: robust standard deviations; ``None`` (off): only NaN and infinity are bad.
        min_jump: part of the median by which a loss must exceed it as well, so that a loss that hardly moves is not
            taken to have jumped.
        window: good optimizer steps that are remembered.
        min_history: good optimizer steps before anything is taken for a jump.
        snapshot_every_n_steps: optimizer steps between copies; ``None``: as many as lose least time, by ``mtbf``.
        mtbf: hours between two bad steps that are expected, see ``StateCopies``.
        keep_snapshots: how many copies are kept, at least.
        back_steps: go back by at least so many steps where a copy is old enough: a jump may come from an update some
            steps before it.
        skip_steps: optimizer steps whose samples ``"skip_window"`` passes over.
        max_rollbacks: how often training may go back within ``per_steps``; once more ends it.
        max_skips: how many steps ``"skip"`` may drop within ``per_steps``; one more ends training.
        per_steps: optimizer steps for which ``max_rollbacks`` and ``max_skips`` count.

    Raises:
        ValueError: naming everything that is impossible about the arguments.
    """

    # It must not forget what it went back for.
    keeps_its_state = True

    needs_collective_steps = True
    """Whether it needs all ranks at the same optimizer step."""

    policy: Literal["skip", "rollback", "stop"] = "rollback"
    _: KW_ONLY
    on_reproducible: Literal["skip_window", "stop"] = "skip_window"
    threshold: float | None = 6.0
    min_jump: float = 0.1
    window: int = 128
    min_history: int = 32
    snapshot_every_n_steps: int | None = None
    mtbf: float = 3.0
    keep_snapshots: int = 2
    back_steps: int = 0
    skip_steps: int = 10
    max_rollbacks: int = 4
    max_skips: int = 10
    per_steps: int = 1000

    def __post_init__(self) -> None:
        problems = guard_problems(vars(self))
        if problems:
            raise ValueError("LossGuard: " + "; ".join(problems))
        self.counts = {"skipped": 0, "rollbacks": 0, "transient": 0, "reproducible": 0}
        """Steps dropped, times gone back, and faults that did or did not come again, in this run."""
        self._history = LossHistory(self.window, self.min_history)
        self._interventions: list[int] = []  # steps done at each
        self._suspect: int | None = None  # steps done when a fault was met that may come again
        self._losses: list[Tensor] = []  # of the micro-batches of this optimizer step
        self._early: EarlySum | None = None
        self._faults = 0  # that were seen in gradients which all ranks have alike

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of losses and faults."""
        return {
            "losses": self._history.entries(),
            "counts": dict(self.counts),
            "interventions": list(self._interventions),
            "suspect": self._suspect,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what a run remembered."""
        self._history.restore(state_dict["losses"])
        self.counts.update(state_dict["counts"])
        self._interventions = list(state_dict["interventions"])
        self._suspect = state_dict["suspect"]

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be guarded.

        Raises:
            ValueError: naming it, with what to type instead.
        """
        if stage == TrainerFn.FITTING:
            _refuse(_setup_problem(self, trainer, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count.

        Raises:
            ValueError: if the optimizer, or with ``"rollback"`` a loader, cannot be guarded.
        """
        _refuse(_start_problem(self, trainer))
        self._losses, self._early = [], None
        if self.policy == "rollback":
            every = self.snapshot_every_n_steps
            _copies(trainer).want(
                keep=self.keep_snapshots, every_n_steps=every, mtbf=self.mtbf if every is None else None
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss of a micro-batch; begin to add up those of a step while its last backward runs."""
        self._losses.append(loss.detach())
        ours: Any = trainer
        if traits_of(ours.strategy).gradients_agree and not ours.fit_loop._should_accumulate():
            self._early = EarlySum(self._of_losses(trainer))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Judge the step, which the ranks do from the same numbers; a bad one is not made.

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
            self._was_transient(trainer)
        if seen["has_loss"]:
            self._tell_z_score(trainer, seen["loss"])
            self._history.add(trainer.global_step + 1, seen["loss"])

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the losses of steps that are made again."""
        self._history.forget_after(trainer.global_step)
        self._losses = []

    # ---- judging ----------------------------------------------------------------------------------------------------

    def _measure(self, trainer: Trainer) -> dict[str, float]:
        """What the ranks have seen of this step, the same on each. A collective."""
        strategy: Any = trainer.strategy
        bad_gradient = torch.zeros((), device=strategy.root_device)
        if _scaler(trainer) is None:
            bad_gradient = any_nonfinite((gradient for _, gradient in strategy.named_gradients()), strategy.root_device)
        early, self._early = self._early, None
        if early is None:
            loss, has_loss, bad = mean_of_ranks(torch.cat((self._of_losses(trainer), bad_gradient.view(1)))).tolist()
        else:
            (loss, has_loss), bad = early.mean().tolist(), float(bad_gradient)
        weights = getattr(trainer, "token_weights", None)
        if weights is not None and weights.step_loss is not None and math.isfinite(loss):
            loss = float(weights.step_loss)  # the mean over all tokens of the step, the same on every rank
        # A loss of any rank that is NaN or infinite makes the mean so.
        seen = {"loss": loss, "has_loss": has_loss, "bad_loss": not math.isfinite(loss), "bad_gradient": bad}
        if early is not None and bad and not seen["bad_loss"]:
            self._faults += 1
            refuse_alone(self._faults, f"LossGuard: step {trainer.global_step}")
        return seen

    def _of_losses(self, trainer: Trainer) -> Tensor:
        """Sum of this rank's losses, as they add up to that of the step, and whether there are any: ``(2,)``."""
        if not self._losses:
            return torch.zeros(2, device=trainer.strategy.root_device)
        total = torch.stack([loss.float().sum() for loss in self._losses]).sum()
        scaler = _scaler(trainer)
        total = total if scaler is None else total / scaler._scale.to(total.device)
        return pad(total.view(1), (0, 1), value=1.0)

    def _fault(self, seen: Mapping[str, float]) -> str | None:
        """What is wrong with the step; ``None``: nothing."""
        if seen["bad_loss"] or seen["bad_gradient"]:
            return "NaN or infinity"
        jump = self._history.jump(seen["loss"]) if seen["has_loss"] else None
        if jump is None or self.threshold is None or jump[0] <= self.threshold or jump[1] <= self.min_jump:
            return None
        z_score, part = jump
        return (
            f"the loss has jumped to {seen['loss']:.6g}, {z_score:.1f} robust standard deviations (allowed: "
            f"{self.threshold:g}) and {100 * part:.0f} % above the median"
        )

    def _origin(self, trainer: Any, seen: Mapping[str, float]) -> str:
        """Where NaN or infinity came from. A collective, of steps that are bad so."""
        if not seen["bad_loss"] and not seen["bad_gradient"]:
            return ""
        strategy, rank = trainer.strategy, int(trainer.global_rank)
        gradients = strategy.named_gradients() if _scaler(trainer) is None else ()
        blame = Blame(
            rank,
            int(strategy.ranks.data_rank),
            int(strategy.layout.coordinates(rank)["pipeline"]),
            first_bad(self._losses),
            *find_gradient(gradients),
        )
        own = blame if blame.micro_batch is not None or blame.position >= 0 else None
        told = [own] if trainer.world_size == 1 else all_gather_values(own, trainer.agreement_group())
        return f": {in_words([each for each in told if each is not None])}"

    # ---- intervening ------------------------------------------------------------------------------------------------

    def _intervene(self, trainer: Trainer, fault: str) -> None:
        step = trainer.global_step
        if self.policy == "stop":
            self._stop(trainer, fault)
        limit = self.max_skips if self.policy == "skip" else self.max_rollbacks
        recent = sum(each > step - self.per_steps for each in self._interventions)
        if recent >= limit:
            done = "dropped" if self.policy == "skip" else "gone back for"
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
        came_again = self._suspect == step
        if came_again:
            self.counts["reproducible"] += 1
            if self.on_reproducible == "stop":
                self._stop(trainer, f"{fault}; it came again when the same steps were made again")
        snapshots = _copies(trainer).snapshots
        held = snapshots.newest(step - self.back_steps) or snapshots.oldest()
        if held is None:
            self._stop(trainer, f"{fault}; there is no copy in memory yet to go back to")
            return
        self.counts["rollbacks"] += 1
        self._suspect = None if came_again else step
        then = (
            f"It came again, so the samples of {self.skip_steps} step(s) from this one on are passed over."
            if came_again
            else "The same steps are made again, to see whether it comes again."
        )
        rank_zero_warn(f"LossGuard: {fault}. Going back to step {held.step} in memory. {then}")
        self._log_counts(trainer)
        raise GoBack(held, self.skip_steps if came_again else 0)

    def _stop(self, trainer: Any, fault: str) -> None:
        self._log_counts(trainer)
        trainer.fit_loop.end_with(
            DivergedError(
                f"LossGuard: {fault}. Training ends; weights and checkpoints are those of before that step, and a run "
                "that goes on from there begins with the samples after those of that step."
            )
        )
        raise DropStep

    def _was_transient(self, trainer: Trainer) -> None:
        self.counts["transient"] += 1
        rank_zero_info(
            f"LossGuard: step {trainer.global_step} is good this time: the fault was transient, and nothing is "
            "left of it. If such faults come again, have the device looked at."
        )
        self._suspect = None
        self._log_counts(trainer)

    # ---- logging ----------------------------------------------------------------------------------------------------

    def _tell_z_score(self, trainer: Any, loss: float) -> None:
        every, number = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop._batches_that_stepped
        if not every or (number + 1) % every:
            return
        jump = self._history.jump(loss)
        if jump is not None and math.isfinite(jump[0]):
            log_metrics(trainer, {"guard/z_score": jump[0]}, number)

    def _log_counts(self, trainer: Trainer) -> None:
        values = {f"guard/{name}": float(value) for name, value in self.counts.items()}
        log_metrics(trainer, values, trainer.fit_loop.epoch_loop._batches_that_stepped)


def _copies(trainer: Any) -> StateCopies:
    copies: StateCopies = trainer.copies
    return copies


def _scaler(trainer: Trainer) -> Any:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(f"LossGuard: {problem}")


def _setup_problem(guard: LossGuard, trainer: Any, module: LightningModule) -> str | None:
    if not hasattr(trainer.fit_loop, "end_with") or not hasattr(trainer.strategy, "run_state"):
        return "needs trainwright.Trainer with one of its strategies, such as strategy='ddp'"
    if not module.automatic_optimization:
        return (
            f"{type(module).__name__} optimizes manually (automatic_optimization = False), so there is no step to "
            "drop. Look at the loss in training_step, or leave the guard out (guard=none)"
        )
    if guard.policy == "rollback" and any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        return (
            "StochasticWeightAveraging exchanges optimizers' schedulers while it runs, which going back cannot undo; "
            "use policy='skip', or WeightAveraging in its place"
        )
    return None


def _start_problem(guard: LossGuard, trainer: Any) -> str | None:
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        return "LBFGS computes the loss several times within a step; use another optimizer, or guard=none"
    why = trainer.fit_loop.why_not_back() if guard.policy == "rollback" else None
    return None if why is None else f"{why}, so the same samples cannot be read again; use policy='skip' or 'stop'"


class LossHistory:
    """The losses of the last good optimizer steps.

    Args:
        window: how many steps are remembered.
        min_history: with fewer of them nothing is said about a loss.
    """

    def __init__(self, window: int, min_history: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=window)
        self._min_history = min_history

    def add(self, step: int, loss: float) -> None:
        """Remember the loss of a good step."""
        self._losses.append((step, loss))

    def forget_after(self, step: int) -> None:
        """Forget the steps after ``step``, which are made again."""
        self.restore([entry for entry in self._losses if entry[0] <= step])

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Remember what :meth:`entries` gave, as far as it fits the window."""
        self._losses = deque(((int(step), float(loss)) for step, loss in losses), maxlen=self._losses.maxlen)

    def entries(self) -> list[tuple[int, float]]:
        """Steps and their losses, oldest first."""
        return list(self._losses)

    def jump(self, loss: float) -> tuple[float, float] | None:
        """How far ``loss`` lies above those before it; ``None`` while too few are remembered.

        Returns:
            The robust z-score, ``(loss - median) / (1.4826 MAD)`` (MAD: the median of the absolute deviations from the
            median; Iglewicz and Hoaglin, 1993), and ``(loss - median) / |median|``. Both are below 0 for a loss that is
            lower; infinite where what they are divided by is 0.
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


def mean_of_ranks(numbers: Tensor) -> Tensor:
    """The mean over all ranks, in place. A collective where there are several."""
    return EarlySum(numbers).mean()


class EarlySum:
    """Begins to add up numbers over all ranks, and gives their mean when it is asked for.

    Args:
        numbers: ``(n,)``, as many on every rank; where collectives run.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._work = dist.all_reduce(numbers, async_op=True) if several else None

    def mean(self) -> Tensor:
        """Wait until all ranks have told theirs."""
        if self._work is not None:
            self._work.wait()
            self._numbers /= dist.get_world_size()
            self._work = None
        return self._numbers


def refuse_alone(number: int, what: str) -> None:
    """Make sure that all ranks have found the same gradients to be bad. To be called by those that have.

    A rank that is alone with it must not take part in what all do about it, as the others will not.

    Args:
        number: of the call, the same on all ranks.
        what: was found, for the message.

    Raises:
        RuntimeError: if others have not.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not wait_for_all(f"trainwright/bad_gradient/{number}", timedelta(seconds=_ALONE_SECONDS)):
        raise RuntimeError(
            f"{what}: a gradient is NaN or infinite on rank {dist.get_rank()}, and is not on others, which averaged "
            "the same ones with it. Either a hook changes gradients on this rank alone after they were averaged, "
            "or its memory or device is at fault: have it looked at. launch=resilient starts such a rank again"
        )
