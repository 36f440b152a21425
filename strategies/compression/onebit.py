"""1-bit Adam: after a warm-up, ranks exchange the signs of their momentum (arXiv:2102.02888)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from trainwright.strategies.compression.buckets import ReplicaPart
from trainwright.strategies.compression.replicas import ReplicaAverage
from trainwright.strategies.gradients import local_tensor


class OneBitAdam:
    """Algorithm 1 of the paper around the steps of an unmodified ``torch.optim.Adam`` or ``AdamW``.

    For ``warmup_steps`` optimizer steps gradients are averaged exactly and the optimizer does what it does. From then
    on, in step ``t``, each rank ``i`` with its own gradient ``g_i`` (clipped by itself, where clipping is on):

    1. ``m_i = beta1 * m + (1 - beta1) * g_i``, where ``m`` is the momentum of step ``t - 1``, equal on all ranks,
    2. ``m`` = the average of all ``m_i`` by signs and a scale per block, with error feedback on both ways,
    3. ``v`` stays what it was at the end of the warm-up, bias correction included,
    4. the optimizer's own update with this ``m`` and ``v``: ``lr``, ``eps``, weight decay and the bias correction of
       ``m`` are its own.

    Numbers whose ``v`` is zero, which had no gradient in the whole warm-up, have no momentum either: any step along
    them would be a huge one. Weight decay that is part of the gradient (``Adam(weight_decay=...)``) goes into ``g_i``.

    How the optimizer is brought to do so: before its step, ``grad`` becomes ``sqrt(v)``, which leaves ``exp_avg_sq``
    as it is, and ``exp_avg`` what becomes ``m`` by it; after the step both are set to ``m`` and ``v``.

    Args:
        average: of the replicas.
        warmup_steps: optimizer steps that average exactly.
        steps: optimizer steps that were made before.
    """

    def __init__(self, average: ReplicaAverage, warmup_steps: int, steps: int = 0) -> None:
        self.average = average
        self.warmup_steps = warmup_steps
        self.steps = steps
        self._after: list[Callable[[], None]] = []

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that gradients stay those of this rank until the optimizer steps."""
        return self.steps >= self.warmup_steps

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Average momentum, and prepare the optimizer for its step. A collective."""
        if not self.is_warm:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for bucket in self.average.buckets:
            numbers = [self._numbers_of(part, optimizer, groups) for part in bucket.parts]
            bucket.average([None if each is None else each.momentum for each in numbers])
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

    def abandon(self) -> None:
        """The step was not made."""
        self._after = []

    def _numbers_of(self, part: ReplicaPart, optimizer: Optimizer, groups: dict[int, Any]) -> _Numbers | None:
        gradient = part.gradient
        if gradient is None or id(part.parameter) not in groups:
            return None
        state = optimizer.state.get(part.parameter, {})
        if "exp_avg" not in state:
            raise RuntimeError(
                f"compression=onebit: {part.name} got its first gradient after the {self.warmup_steps} steps in which "
                "Adam's variance is learned. Raise compression.warmup_steps, or type compression=topk."
            )
        return _Numbers(part, state, groups[id(part.parameter)], gradient)


class _Numbers:
    """What Adam remembers of a part, and the momentum of its next step as this rank alone would have it."""

    def __init__(self, part: ReplicaPart, state: dict[str, Any], group: dict[str, Any], gradient: Tensor) -> None:
        self._exp_avg, self._exp_avg_sq = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        self._gradient = gradient
        self._beta1, beta2 = (float(beta) for beta in group["betas"])
        is_decoupled = group.get("decoupled_weight_decay", False)
        self._decay = None if is_decoupled or group["weight_decay"] == 0 else part.local * group["weight_decay"]
        # Bias is corrected by one step more each time; a variance that stays must be larger by as much.
        step = local_tensor(state["step"]).double()
        growth = (1 - beta2 ** (step + 1)) / (1 - beta2**step)
        self._variance = self._exp_avg_sq * growth.to(self._exp_avg_sq)
        whole = gradient if self._decay is None else gradient + self._decay
        self.momentum = torch.lerp(self._exp_avg, whole, 1 - self._beta1)

    def prepare(self) -> Callable[[], None]:
        """Let the optimizer's own update use the averaged momentum; returns what is to be done after it."""
        self.momentum *= self._variance > 0
        root = self._variance.sqrt()
        self._exp_avg.copy_((self.momentum - (1 - self._beta1) * root) / self._beta1)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(root if self._decay is None else root - self._decay)
        return self._finish

    def _finish(self) -> None:
        self._exp_avg.copy_(self.momentum)
        self._exp_avg_sq.copy_(self._variance)
        self._gradient.copy_(self.momentum)  # whoever looks at it sees what the step was made with


def onebit_problems(optimizers: list[Optimizer]) -> Iterator[str]:
    """What speaks against 1-bit Adam with these optimizers, each with what to type instead."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in (Adam, AdamW):
            yield (
                f"compression=onebit with the optimizer {name}: the scheme is that of Adam's momentum and variance "
                "(torch.optim.Adam or AdamW); type compression=topk or compression=powersgd, which serve any optimizer"
            )
            continue
        for group in optimizer.param_groups:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    yield f"compression=onebit with {name}({option}=True); leave {option} out, or type compression=topk"
            if float(group["betas"][0]) == 0:
                yield f"compression=onebit with {name}(betas=(0, ...)): there is no momentum; type compression=topk"
    if len(optimizers) > 1:
        yield f"compression=onebit with {len(optimizers)} optimizers (allowed: one); type compression=topk"
