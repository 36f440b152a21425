"""Adam whose variance stays after a warm-up, so that replicas may exchange something else than whole gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.compression.replicas import ReplicaAverage
from trainwright.strategies.contract.gradients import local_tensor

# Squares of gradients of which Adam's variance is the mean at least: of fewer, some come out so small by chance that
# steps become huge (of ten, one in a hundred million is a hundredth of what it should be; of one, eight in a hundred).
LEAST_WARMUP = 10
# Learning rates that one number moves at most in one step where what comes has waited. Without a bound, weights that
# have gone too far are corrected too late and too much, again and again: gpt diverged in a run of 900 steps.
FARTHEST = 10.0

# What is kept back where nothing else is said.
GRADIENTS = "gradients"


@dataclass(frozen=True)
class MomentumExchange:
    """What replicas average after the warm-up, and what becomes Adam's momentum ``m`` then.

    Args:
        momentum: ``"sent"``: each replica's ``beta1 m + (1 - beta1) g``, whose mean is ``m``;
            ``"after"``: gradients, whose mean Adam takes for its gradient, so that ``v`` goes on learning;
            ``"none"``: gradients, whose mean is ``m`` itself, of at most :data:`FARTHEST` learning rates' way.
        in_rates: gradients are multiplied by the learning rate before, and divided by it afterwards: what is kept back
            under a larger rate counts by as much more when it is sent.
        in_steps: likewise ``1 / (sqrt(v) + eps)``. With both, a replica hands in the step that it would make alone.
    """

    momentum: str
    in_rates: bool = False
    in_steps: bool = False

    @property
    def keeps_variance(self) -> bool:
        """Whether Adam's variance stays what it was at the end of the warm-up."""
        return self.momentum != "after"

    @property
    def units(self) -> str:
        """Of what is kept back."""
        if self.momentum == "sent":
            return "momentum"
        return "steps" if self.in_steps else "gradients times learning rates" if self.in_rates else GRADIENTS


# 1-bit Adam, algorithm 1 of arXiv:2102.02888.
_MOMENTUM = MomentumExchange("sent")
# A number that waits for its turn comes with all that it has missed at once. That wait does what momentum does
# (arXiv:1605.09774), so there is none besides; and whose turn it is, is a matter of how far the weight would move.
_STEPS = MomentumExchange("none", in_rates=True, in_steps=True)
# What is sent of a matrix at each step is rough, and momentum evens it out; it is no burst that a variance would
# have to be kept from.
_FACTORS = MomentumExchange("after", in_rates=True)

# Compressor -> what replicas exchange.
EXCHANGES = {"onebit": _MOMENTUM, "topk": _STEPS, "powersgd": _FACTORS}


class CompressedAdam:
    """Compressed averages in the steps of an unmodified ``torch.optim.Adam`` or ``AdamW``.

    For ``warmup_steps`` optimizer steps gradients are averaged exactly and the optimizer does what it does. From then
    on, in each step, replica ``i`` with its own gradient ``g_i`` (clipped by itself, where clipping is on):

    1. hands in what ``exchange`` says, of which the compressor finds about the mean; what it leaves out is kept back,
    2. ``m`` becomes what ``exchange`` makes of the mean, equal on all replicas,
    3. ``v`` stays what it was at the end of the warm-up, bias correction included (unless momentum comes ``"after"``),
    4. the optimizer's own update with this ``m`` and ``v``: ``lr``, ``eps``, weight decay and the bias correction of
       ``m`` are its own.

    A variance that went on learning would take what comes late and at once for large gradients, and would make their
    steps small. Where it stays, numbers whose ``v`` is zero, which had no gradient in the whole warm-up, have no
    momentum either: any step along them would be a huge one. Weight decay that is part of the gradient
    (``Adam(weight_decay=...)``) goes into ``g_i``. While the learning rate of a parameter is zero, nothing of it is
    sent where the exchange is in rates.

    How the optimizer is brought to do so: before its step, ``grad`` becomes ``sqrt(v)``, which leaves ``exp_avg_sq``
    as it is, and ``exp_avg`` what becomes ``m`` by it; after the step both are set to ``m`` and ``v``.

    Args:
        average: of the replicas.
        exchange: what they exchange.
        warmup_steps: optimizer steps that average exactly.

    Attributes:
        steps: optimizer steps that were made; those before a run is resumed are set.
    """

    def __init__(self, average: ReplicaAverage, exchange: MomentumExchange, warmup_steps: int) -> None:
        self.average = average
        self.exchange = exchange
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._after: list[Callable[[], None]] = []

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that gradients stay those of this rank until the optimizer steps."""
        return self.steps >= self.warmup_steps

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Average over replicas, and prepare the optimizer for its step. A collective."""
        self._after = []  # of a step that was not made
        if not self.is_warm:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for bucket in self.average.buckets:
            numbers = [self._numbers_of(part, optimizer, groups) for part in bucket.parts]
            bucket.average([None if each is None else each.given for each in numbers])
            for each in numbers:
                if each is not None:
                    self._after.append(each.prepare())

    @torch.no_grad()
    def after_step(self) -> None:
        """Let the optimizer remember momentum and variance."""
        for finish in self._after:
            finish()
        self._after = []
        self.steps += 1

    def _numbers_of(self, part: ReplicaPart, optimizer: Optimizer, groups: dict[int, Any]) -> _Numbers | None:
        gradient = part.gradient
        if gradient is None or id(part.parameter) not in groups:
            return None
        state = optimizer.state.get(part.parameter, {})
        if "exp_avg" not in state and self.exchange.keeps_variance:
            raise RuntimeError(
                f"compression={self.average.choice.name}: {part.name} got its first gradient after the "
                f"{self.warmup_steps} steps in which Adam's variance is learned. Raise compression.warmup_steps, or "
                "type compression=topk compression.sends=gradients."
            )
        return _Numbers(part, state, groups[id(part.parameter)], gradient, self.exchange)


class _Numbers:
    """What Adam remembers of a part, what this replica gives to be averaged, and what becomes of the mean.

    Attributes:
        given: is averaged in place; ``None``: nothing of this part is sent in this step.
    """

    def __init__(
        self,
        part: ReplicaPart,
        state: dict[str, Any],
        group: dict[str, Any],
        gradient: Tensor,
        exchange: MomentumExchange,
    ) -> None:
        self.given: Tensor | None
        self._gradient = gradient
        self._exchange = exchange
        self._rate = float(group["lr"]) if exchange.in_rates else 1.0
        if not exchange.keeps_variance:  # Adam does all the rest, weight decay included
            self.given = gradient * self._rate if self._rate else None
            return
        self._exp_avg, self._exp_avg_sq = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        self._beta1, beta2 = (float(beta) for beta in group["betas"])
        is_decoupled = group.get("decoupled_weight_decay", False)
        self._decay = None if is_decoupled or group["weight_decay"] == 0 else part.local * group["weight_decay"]
        # Bias is corrected by one step more each time; a variance that stays must be larger by as much.
        step = local_tensor(state["step"]).double()
        growth = (1 - beta2 ** (step + 1)) / (1 - beta2**step)
        self._variance = self._exp_avg_sq * growth.to(self._exp_avg_sq)
        self._bias1 = (1 - self._beta1 ** (step + 1)).to(self._exp_avg)
        self._size: Tensor | None = None
        if exchange.in_steps:
            bias2 = (1 - beta2 ** (step + 1)).to(self._exp_avg_sq)
            self._size = (self._variance / bias2).sqrt() + float(group["eps"])
        self._most = (1 - beta2) ** -0.5
        self.given = self._to_give(gradient if self._decay is None else gradient + self._decay)

    def _to_give(self, gradient: Tensor) -> Tensor | None:
        if self._exchange.momentum == "sent":
            return torch.lerp(self._exp_avg, gradient, 1 - self._beta1)
        if self._rate == 0:
            return None
        assert self._size is not None
        # One gradient moves a weight as far at most as where Adam's variance took note of it. What has no variance is
        # not trained, so nothing of it may be among what is sent.
        sizes = (gradient / self._size).clamp_(-self._most, self._most)
        return sizes.mul_(self._variance > 0).mul_(self._rate)

    def prepare(self) -> Callable[[], None]:
        """Let the optimizer's own update use what was averaged; returns what is to be done after it."""
        if not self._exchange.keeps_variance:
            # At a rate of zero nothing came in; each replica's own gradient must not get into what it remembers.
            self._gradient.copy_(torch.zeros_like(self._gradient) if self.given is None else self.given / self._rate)
            return _nothing
        self._momentum = self._new_momentum().mul_(self._variance > 0)
        root = self._variance.sqrt()
        self._exp_avg.copy_((self._momentum - (1 - self._beta1) * root) / self._beta1)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(root if self._decay is None else root - self._decay)
        return self._finish

    def _new_momentum(self) -> Tensor:
        if self.given is None:  # a step of rate 0 moves nothing, whatever its momentum is
            return self._exp_avg.clone()
        if self._size is None:
            return self.given
        steps = (self.given / self._rate).clamp_(-FARTHEST, FARTHEST)
        return steps * self._size * self._bias1  # Adam will divide by it

    def _finish(self) -> None:
        self._exp_avg.copy_(self._momentum)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(self._momentum)  # whoever looks at it sees what the step was made with


def _nothing() -> None:
    """Nothing is to be done."""


def adam_problems(optimizers: list[Optimizer], asked: str, instead: str) -> Iterator[str]:
    """What speaks against averages in Adam's steps with these optimizers, each with what to type instead.

    Args:
        optimizers: of the run.
        asked: what needs Adam's steps, as it is typed.
        instead: what to type where the optimizer is to stay.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in (Adam, AdamW):
            yield (
                f"{asked} with the optimizer {name}: the scheme is that of Adam's momentum and variance "
                f"(torch.optim.Adam or AdamW); {instead}, or compression=powersgd, which serve any optimizer"
            )
            continue
        for group in optimizer.param_groups:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    yield f"{asked} with {name}({option}=True); leave {option} out, or {instead}"
            if float(group["betas"][0]) == 0:
                yield f"{asked} with {name}(betas=(0, ...)): there is no momentum; {instead}"
    if len(optimizers) > 1:
        yield f"{asked} with {len(optimizers)} optimizers (allowed: one); {instead}"
