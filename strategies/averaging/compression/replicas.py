"""The average of gradients over replicas with fewer bytes, as one object that a strategy holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.buckets import CompressedBucket, ReplicaPart, make_buckets
from trainwright.strategies.averaging.compression.names import make_compressor
from trainwright.strategies.averaging.compression.options import CompressionChoice


class ReplicaAverage:
    """Averages the gradients of parts over the replicas that hold copies of them.

    Args:
        choice: what compresses them.
        device: of the averages.
        scale: what gradients are multiplied by at the moment, a loss scale; ``None``: nothing.
    """

    def __init__(
        self, choice: CompressionChoice, device: torch.device, scale: Callable[[], float] | None = None
    ) -> None:
        self.choice = choice
        self._compressor = make_compressor(choice.name, **choice.options)
        self._device = device
        self._scale = scale
        # Averages that are exact at the beginning.
        self.warmup_steps = choice.warmup_steps if choice.name != "onebit" else 0
        self._names: tuple[str, ...] = ()
        self.buckets: list[CompressedBucket] = []
        # Averages of optimizer steps that were made, those of the warm-up among them.
        self.steps = 0

    def take(self, parts: Sequence[ReplicaPart]) -> None:
        """Know the parts; what was kept back of those that were known stays, if others come or go."""
        names = tuple(part.name for part in parts)
        if names == self._names:
            return
        before, self._names = self.buckets, names
        self.buckets = make_buckets(self._compressor, parts, self._device)
        for bucket in before:
            for part, kind, value in bucket.kept_back():
                for each in self.buckets:
                    each.keep_back(kind, {part.name: value})

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for the average of an optimizer step, when the warm-up is over."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    def average(self, exactly: bool = False) -> None:
        """Replace all gradients by about their means; exactly in a warm-up. A collective of all ranks of the run.

        Gradients that overflowed under a loss scale are averaged as they are: the step is dropped, and what is kept
        back stays as if it had never been.

        Args:
            exactly: send everything, and leave what is kept back alone.
        """
        has_overflowed = self._has_overflowed()
        exactly = exactly or has_overflowed or self.steps < self.warmup_steps
        self.steps += not has_overflowed
        scale = 1.0 if self._scale is None else self._scale()
        for bucket in self.buckets:
            gradients = [part.gradient for part in bucket.parts]
            if exactly:
                bucket.average_exactly(gradients)
            else:
                bucket.average(gradients, scale)

    def _has_overflowed(self) -> bool:
        """Whether a gradient of any rank is not finite, if losses are scaled; each rank drops its step then."""
        if self._scale is None or not self.choice.keeps_residual:
            return False
        sums = [part.gradient.sum() for b in self.buckets for part in b.parts if part.gradient is not None]
        finite = torch.stack([each.isfinite().to(self._device) for each in sums]).all() if sums else torch.tensor(True)
        flag = (~finite).float().to(self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def kept_back(self) -> Iterator[tuple[ReplicaPart, str, Tensor]]:
        """Part, kind and value of all that is kept back of single numbers."""
        for bucket in self.buckets:
            yield from bucket.kept_back()

    def keep_back(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`kept_back` gave, by name."""
        for bucket in self.buckets:
            bucket.keep_back(kind, values)

    def parts(self) -> Iterator[ReplicaPart]:
        """All that is averaged."""
        for bucket in self.buckets:
            yield from bucket.parts

    def put_back_of_buckets(self, values: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`of_buckets` gave; what has another shape by now begins anew."""
        for key, own in self.of_buckets().items():
            if key in values and values[key].shape == own.shape:
                own.copy_(values[key])

    def of_buckets(self) -> dict[str, Tensor]:
        """What is remembered of buckets as a whole, by bucket and name; views."""
        return {f"{bucket.key}/{name}": value for bucket in self.buckets for name, value in bucket.others().items()}
