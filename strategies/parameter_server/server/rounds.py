"""One step that workers make together: their gradients are averaged, and the parameters are stepped once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class Round:
    """What has been pushed for one step. Not safe between threads.

    Gradients are kept until all are there and are added in the order of the workers, so that the sum does not depend on
    who came first. Average and norm are computed as DDP and ``torch.nn.utils.clip_grad_norm_`` do, so that on two
    workers a step is theirs to the bit.
    """

    def __init__(self) -> None:
        self.hyper: Tensor | None = None
        self.hold = False
        """Whether workers want to know the norm before the step is made."""
        self.mean: Tensor | None = None
        """The averaged gradient, once all are there."""
        self.present: list[bool] = []
        """For each slice, whether any worker has a gradient of it."""
        self.norms = torch.zeros(0, dtype=torch.float64)
        """With :attr:`hold`, the norm of each slice of :attr:`mean`; -1 where no worker has a gradient of it."""
        self.coefficient, self.clip_value = 1.0, 0.0
        self.made = False
        self._gradients: dict[int, Tensor] = {}
        self._present: dict[int, Sequence[bool]] = {}
        self._said: set[int] = set()
        self._of: set[int] = set()

    @property
    def workers(self) -> set[int]:
        """Those that have pushed; once averaged, those that are in the average."""
        return self._of if self.mean is not None else set(self._gradients)

    def add(self, worker: int, gradient: Tensor, present: Sequence[bool], hyper: Tensor) -> None:
        """A worker has pushed."""
        self._gradients[worker], self._present[worker], self.hyper = gradient, present, hyper

    def leave(self, worker: int) -> None:
        """A worker is gone: what it pushed does not count, unless it has been averaged already."""
        self._gradients.pop(worker, None)
        self._present.pop(worker, None)
        self._said.discard(worker)

    def has_all(self, workers: Iterable[int]) -> bool:
        """Whether these have pushed, and anybody has."""
        return self.mean is None and bool(self._gradients) and set(workers) <= set(self._gradients)

    def average(self, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Average over those that have pushed.

        Args:
            split: the slices of a gradient.
        """
        workers = sorted(self._gradients)
        self._of = set(workers)
        total = _mean([self._gradients[worker] for worker in workers])
        self.present = [any(has) for has in zip(*(self._present[w] for w in workers), strict=True)]
        self._gradients, self._present = {}, {}
        self.mean = total
        if self.hold:
            norms = torch._foreach_norm(list(split(total)))
            self.norms = torch.tensor(
                [float(norm) if has else -1.0 for norm, has in zip(norms, self.present, strict=True)],
                dtype=torch.float64,
            )

    def say(self, worker: int, coefficient: float, clip_value: float) -> None:
        """A worker has said how gradients are clipped; all say the same."""
        self._said.add(worker)
        self.coefficient, self.clip_value = coefficient, clip_value

    def may_be_made(self, living: Iterable[int]) -> bool:
        """Whether the step may be made."""
        if self.mean is None or self.made:
            return False
        return not self.hold or (bool(self._said) and self._of & set(living) <= self._said)

    @property
    def clipped(self) -> Tensor:
        """The gradient to step with."""
        assert self.mean is not None
        if self.coefficient != 1.0:
            self.mean *= self.coefficient
        if self.clip_value:
            self.mean.clamp_(-self.clip_value, self.clip_value)
        return self.mean


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    """The mean, in the memory of the first; the others are changed, too."""
    count = len(gradients)
    total, is_exact = gradients[0], count & (count - 1) == 0
    if is_exact:  # dividing by a power of two before or after the sum is the same
        for gradient in gradients[1:]:
            total += gradient
        return total if count == 1 else total.div_(count)
    total *= 1 / count
    for gradient in gradients[1:]:
        total += gradient.mul_(1 / count)
    return total
