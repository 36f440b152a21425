"""Compressed averages of gradients over replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.buckets import CompressedBucket, ReplicaPart, make_buckets
from trainwright.strategies.averaging.compression.names import make_compressor
from trainwright.strategies.averaging.compression.options import CompressionChoice


class ReplicaAverage:
    """Compressed averages of gradients over the replicas that hold copies.

    Args:
        choice: of the compressor.
        device: of the averages.
        scale: returns the current loss scale; ``None``: unscaled.
    """

    def __init__(
        self, choice: CompressionChoice, device: torch.device, scale: Callable[[], float] | None = None
    ) -> None:
        self.choice = choice
        self._compressor = make_compressor(choice)
        self._device = device
        self._scale = scale
        self.warmup_steps = choice.warmup_steps if choice.name != "onebit" else 0
        self._names: tuple[str, ...] = ()
        self.buckets: list[CompressedBucket] = []
        # Averages made, including those of the warm-up.
        self.steps = 0

    def take(self, parts: Sequence[ReplicaPart]) -> None:
        """Set the parts to average, keeping the residuals of known ones."""
        names = tuple(part.name for part in parts)
        if names == self._names:
            return
        before, self._names = self.buckets, names
        self.buckets = make_buckets(self._compressor, parts, self._device)
        for bucket in before:
            for part, kind, value in bucket.kept_back():
                self.keep_back(kind, {part.name: value})

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this rank per optimizer step, after the warm-up."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    def average(self, exactly: bool = False) -> None:
        """Replace gradients by their approximate means; exact in a warm-up. A collective of all ranks.

        Gradients that overflowed under a loss scale are averaged exactly: the step is dropped, and residuals do not
        change.

        Args:
            exactly: average without compression, leaving residuals unchanged.
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
        """Return whether a gradient of any rank is non-finite under a loss scale."""
        if self._scale is None or not self.choice.keeps_residual:
            return False
        sums = [part.gradient.sum() for b in self.buckets for part in b.parts if part.gradient is not None]
        finite = torch.stack([each.isfinite().to(self._device) for each in sums]).all() if sums else torch.tensor(True)
        flag = (~finite).float().to(self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def keep_back(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Load residuals by parameter name."""
        for bucket in self.buckets:
            bucket.keep_back(kind, values)

    def load_bucket_states(self, values: Mapping[str, Tensor]) -> None:
        """Load :meth:`bucket_states`; entries whose shape changed start anew."""
        for key, own in self.bucket_states().items():
            if key in values and values[key].shape == own.shape:
                own.copy_(values[key])

    def bucket_states(self) -> dict[str, Tensor]:
        """Return per-bucket compressor state by bucket and name; views."""
        return {
            f"{bucket.key}/{name}": value for bucket in self.buckets for name, value in bucket.shared_state().items()
        }
