"""One synchronous step: workers' gradients are averaged and parameters stepped once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class Round:
    """Pushes of one step. Not thread-safe.

    Gradients are summed in worker order once all are there, so the sum does not depend on arrival. Average and norm are
    computed as in DDP and ``torch.nn.utils.clip_grad_norm_``, so that on two workers a step is bit-identical to theirs.
    """

    def __init__(self) -> None:
        self.hyper: Tensor | None = None
        self.hold = False
        """True if workers need the norm before the step."""
        self.mean: Tensor | None = None
        """Averaged gradient, once all are there."""
        self.present: list[bool] = []
        """True if any worker has a gradient, for each slice."""
        self.norms = torch.zeros(0, dtype=torch.float64)
        """With :attr:`hold`, the norm of each slice of :attr:`mean`; -1 where no worker has a gradient."""
        self.coefficient, self.clip_value = 1.0, 0.0
        self.made = False
        self._gradients: dict[int, Tensor] = {}
        self._present: dict[int, Sequence[bool]] = {}
        self._committed: set[int] = set()
        self._of: set[int] = set()
        self._writer: int | None = None

    @property
    def workers(self) -> set[int]:
        """Workers that pushed; after averaging, those in the average."""
        return self._of if self.mean is not None else set(self._gradients)

    def add(self, worker: int, gradient: Tensor, present: Sequence[bool], hyper: Tensor) -> None:
        """Add the push of a worker."""
        self._gradients[worker], self._present[worker], self.hyper = gradient, present, hyper

    def takes_values(self, worker: int) -> bool:
        """Return whether parameters that a worker has written before this step count, as those of the first do."""
        if self._writer is not None and self._writer < worker:
            return False
        self._writer = worker
        return True

    def leave(self, worker: int) -> None:
        """Remove a lost worker's push, unless it is averaged already."""
        self._gradients.pop(worker, None)
        self._present.pop(worker, None)
        self._committed.discard(worker)

    def has_all(self, workers: Iterable[int]) -> bool:
        """Return whether all of ``workers``, and at least one, have pushed."""
        return self.mean is None and bool(self._gradients) and set(workers) <= set(self._gradients)

    def average(self, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Average the pushed gradients.

        Args:
            split: returns the slices of a gradient.
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

    def set_clipping(self, worker: int, coefficient: float, clip_value: float) -> None:
        """Set the clipping of a worker's commit; all send the same."""
        self._committed.add(worker)
        self.coefficient, self.clip_value = coefficient, clip_value

    def may_be_made(self, living: Iterable[int]) -> bool:
        """Return whether the step may be made."""
        if self.mean is None or self.made:
            return False
        return not self.hold or (bool(self._committed) and self._of & set(living) <= self._committed)

    @property
    def clipped(self) -> Tensor:
        """Clipped gradient for the step."""
        assert self.mean is not None
        if self.coefficient != 1.0:
            self.mean *= self.coefficient
        if self.clip_value:
            self.mean.clamp_(-self.clip_value, self.clip_value)
        return self.mean


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    """Return the mean in the memory of the first tensor; the others change, too."""
    count = len(gradients)
    total, is_exact = gradients[0], count & (count - 1) == 0
    if is_exact:  # division by a power of two is exact before or after the sum
        for gradient in gradients[1:]:
            total += gradient
        return total if count == 1 else total.div_(count)
    total *= 1 / count
    for gradient in gradients[1:]:
        total += gradient.mul_(1 / count)
    return total
