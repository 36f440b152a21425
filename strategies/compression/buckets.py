"""Buckets of named parameters, and what a compressor remembers of each."""

# Annotations stay what they are: torch looks at that of a hook's bucket.

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.compression.compressor import GradientCompressor, State

# torch's DDP makes its buckets anew after the first backward, in the order in which gradients came.
_UNSTABLE_ROUNDS = 2


class CompressedBuckets:
    """Averages buckets of gradients, and knows by the names of their parameters what is kept back of each.

    Args:
        compressor: what averages them.
        names: parameter -> its name.
        group: the ranks that are averaged over; ``None`` = all.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.compressor = compressor
        self._names = dict(names)
        self._group = group
        self._states: dict[tuple[str, ...], State] = {}

    def average(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Replace a bucket by about its mean over the ranks. A collective.

        Args:
            flat: ``(numel,)`` of any floating-point type: the gradients of ``parameters``, one behind the other.
            parameters: of the bucket; the same ones come together each time.
        """
        names = tuple(self._names[parameter] for parameter in parameters)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        if names not in self._states:
            ranks = dist.get_world_size(self._group)
            self._states[names] = self.compressor.new_state(shapes, ranks, flat.device)
        exact = flat.float()  # the same memory where it is float32
        self.compressor.average(exact, shapes, self._group, self._states[names])
        if exact is not flat:
            flat.copy_(exact)

    def residuals(self) -> dict[str, Tensor]:
        """What this rank keeps back of each parameter's gradient, by name, flat; views."""
        found: dict[str, Tensor] = {}
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        for names, state in self._states.items():
            if "residual" in state:
                found.update(zip(names, state["residual"].split([sizes[name] for name in names]), strict=True))
        return found


class CompressedReduction:
    """The state of :func:`reduce_compressed`.

    The first rounds are averaged as they are: until DDP has made its buckets anew, what is kept back of one would be
    added to another.

    Args:
        buckets: what averages a bucket.
        group: as ``buckets`` has it.
    """

    def __init__(self, buckets: CompressedBuckets, group: dist.ProcessGroup | None = None) -> None:
        self._buckets = buckets
        self._group = group
        self._rounds = 0

    def average(self, bucket: dist.GradBucket) -> Tensor:
        """Average a bucket in place. A collective."""
        flat = bucket.buffer()
        if self._rounds < _UNSTABLE_ROUNDS:
            flat /= dist.get_world_size(self._group)
            dist.all_reduce(flat, group=self._group)
        else:
            self._buckets.average(flat, bucket.parameters())
        self._rounds += bucket.is_last()
        return flat


def reduce_compressed(state: CompressedReduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of torch's ``DistributedDataParallel``."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(state.average(bucket))
    return done
