"""Adam with a variance frozen after a warm-up, so that replicas exchange compressed momentum or steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.compression.replica_average import ReplicaAverage
from trainwright.strategies.contract.gradients import local_tensor

# Least warm-up for a usable variance estimate: the mean of ten squares is below a hundredth of its expectation once in
# 1e8 cases, a single square in eight of a hundred, and too small a variance makes huge steps.
LEAST_WARMUP = 10
# Largest step of one weight, in learning rates. Without the bound, delayed updates overshoot again and again: gpt
# diverged in a run of 900 steps.
FARTHEST = 10.0

# Default units of the residual.
GRADIENTS = "gradients"


@dataclass(frozen=True)
class MomentumExchange:
    """Quantity that replicas average after the warm-up, and how it becomes Adam's momentum ``m``.

    Args:
        momentum: ``"sent"``: each replica's ``beta1 m + (1 - beta1) g``, whose mean is ``m``;
            ``"after"``: gradients, whose mean is Adam's gradient, so that ``v`` keeps learning;
            ``"none"``: gradients, whose mean is ``m`` itself, of at most :data:`FARTHEST` learning rates.
        in_rates: scale gradients by the learning rate, so that residuals from times of a larger rate keep their weight.
        in_steps: scale gradients by ``1 / (sqrt(v) + eps)``. With both, a replica sends its own Adam step.
    """

    momentum: str
    in_rates: bool = False
    in_steps: bool = False

    @property
    def keeps_variance(self) -> bool:
        """True if Adam's variance is frozen after the warm-up."""
        return self.momentum != "after"

    @property
    def units(self) -> str:
        """Units of the residual."""
        if self.momentum == "sent":
            return "momentum"
        return "steps" if self.in_steps else "gradients times learning rates" if self.in_rates else GRADIENTS


# 1-bit Adam, algorithm 1 of arXiv:2102.02888.
_MOMENTUM = MomentumExchange("sent")
# A delayed element carries all its missed updates, which acts as momentum (arXiv:1605.09774), so there is none besides;
# scaled by steps, top-k picks the weights that would move farthest.
_STEPS = MomentumExchange("none", in_rates=True, in_steps=True)
# A low-rank factor is rough at each step, which momentum evens out; without bursts the variance can keep learning.
_FACTORS = MomentumExchange("after", in_rates=True)

# Compressor -> what replicas exchange.
EXCHANGES = {"onebit": _MOMENTUM, "topk": _STEPS, "powersgd": _FACTORS}


class CompressedAdam:
    """Compressed averages within the steps of an unmodified ``torch.optim.Adam`` or ``AdamW``.

    For ``warmup_steps`` optimizer steps gradients are averaged exactly. From then on, in each step, replica ``i`` with
    its own gradient ``g_i`` (clipped locally, if at all):

    1. sends the quantity of ``exchange``, of which the compressor returns the approximate mean and keeps the residual,
    2. ``m`` is computed from the mean, equally on all replicas,
    3. ``v`` stays as at the end of the warm-up, bias correction included (unless momentum comes ``"after"``),
    4. the optimizer applies its own update with this ``m`` and ``v``: ``lr``, ``eps``, weight decay and the bias
       correction of ``m`` are its own.

    A variance that kept learning would see delayed updates as large gradients and shrink their steps. Where it is
    frozen, elements with ``v`` of zero (no gradient in the whole warm-up) get no momentum: any step would be huge.
    Coupled weight decay (``Adam(weight_decay=...)``) is part of ``g_i``. At a learning rate of zero, exchanges in rates
    send nothing.

    Implementation: before the optimizer's step, ``grad`` is set to ``sqrt(v)``, which leaves ``exp_avg_sq`` unchanged,
    and ``exp_avg`` to the value that the step turns into ``m``; afterwards both are set to ``m`` and ``v``.

    Args:
        average: over the replicas.
        exchange: what they exchange.
        warmup_steps: optimizer steps with exact averages.

    Attributes:
        steps: optimizer steps made, including those before a resume.
    """

    def __init__(self, average: ReplicaAverage, exchange: MomentumExchange, warmup_steps: int) -> None:
        self.average = average
        self.exchange = exchange
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._after: list[Callable[[], None]] = []

    @property
    def is_warm(self) -> bool:
        """True if the warm-up is over, so that gradients stay local until the optimizer steps."""
        return self.steps >= self.warmup_steps

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Average over replicas and prepare the optimizer for its step. A collective."""
        self._after = []  # of a step that was skipped
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
        """Set the optimizer's momentum and variance."""
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
    """Adam's state of a part, this replica's contribution, and the update from the mean.

    Attributes:
        given: averaged in place; ``None``: nothing of this part is sent in this step.
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
        if not exchange.keeps_variance:  # Adam does the rest, weight decay included
            self.given = gradient * self._rate if self._rate else None
            return
        self._exp_avg, self._exp_avg_sq = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        self._beta1, beta2 = (float(beta) for beta in group["betas"])
        is_decoupled = group.get("decoupled_weight_decay", False)
        self._decay = None if is_decoupled or group["weight_decay"] == 0 else part.local * group["weight_decay"]
        # The step advances the bias correction, so a frozen variance must grow by the same factor.
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
        # Clamped to the largest gradient that Adam's variance could have seen. Elements without variance are not
        # trained.
        sizes = (gradient / self._size).clamp_(-self._most, self._most)
        return sizes.mul_(self._variance > 0).mul_(self._rate)

    def prepare(self) -> Callable[[], None]:
        """Set the optimizer's state for its own update; returns what to do after the step."""
        if not self._exchange.keeps_variance:
            # At a rate of zero nothing was exchanged, and local gradients must not enter the state.
            self._gradient.copy_(torch.zeros_like(self._gradient) if self.given is None else self.given / self._rate)
            return lambda: None
        self._momentum = self._new_momentum().mul_(self._variance > 0)
        root = self._variance.sqrt()
        self._exp_avg.copy_((self._momentum - (1 - self._beta1) * root) / self._beta1)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(root if self._decay is None else root - self._decay)
        return self._finish

    def _new_momentum(self) -> Tensor:
        if self.given is None:  # a step of rate 0 moves nothing
            return self._exp_avg.clone()
        if self._size is None:
            return self.given
        steps = (self.given / self._rate).clamp_(-FARTHEST, FARTHEST)
        return steps * self._size * self._bias1  # Adam divides by it

    def _finish(self) -> None:
        self._exp_avg.copy_(self._momentum)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(self._momentum)  # gradient observers see the gradient of the step


def adam_problems(optimizers: list[Optimizer], asked: str, instead: str) -> Iterator[str]:
    """Yield why these optimizers do not support averages within Adam's steps, and what to type instead.

    Args:
        optimizers: of the run.
        asked: option that needs Adam's steps, as typed.
        instead: what to type to keep the optimizer.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in (Adam, AdamW):
            yield (
                f"{asked} with the optimizer {name}: it compresses Adam's momentum and variance (torch.optim.Adam or "
                f"AdamW); {instead}, or compression=powersgd, which support any optimizer"
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
