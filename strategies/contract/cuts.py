"""How a tensor is split along a model-parallel axis, how to gather it again, and what stands for it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts


def _getters(*names: str) -> set[Any]:
    of_class: Any = Tensor
    return {getattr(of_class, name).__get__ for name in names}


# Functions that need no values, so that they may be asked of what stands for a parameter.
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "is_cuda", "is_leaf", "layout", "is_sparse", "is_meta", "itemsize"),
    *_getters("is_quantized", "is_mkldnn", "is_xla", "is_mps", "is_cpu", "is_nested", "grad_fn", "output_nr"),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device, Tensor.__len__),
    *(Tensor.__hash__, torch.numel, torch.is_floating_point, torch.is_complex),
}
# Those of activations whose graph is that of a part.
METADATA_OF_PARTS = METADATA - _getters("is_leaf", "grad_fn", "output_nr")
METADATA_OF_PARTS |= {*_getters("requires_grad", "is_xpu"), Tensor.is_inference, torch.is_inference}


class StandIn(Tensor):
    """Base of tensors without memory, which stand for a whole of which this rank holds a part.

    Metadata is that of the whole; :meth:`run` runs the other functions of torch.

    Attributes:
        metadata: functions that need no values.
        refusal: error about a function that cannot run, whose name replaces ``{}``.
    """

    metadata: ClassVar[Set[Any]] = METADATA_OF_PARTS
    refusal: ClassVar[str]

    @classmethod
    def like(cls, part: Tensor, shape: Sequence[int], requires_grad: bool) -> Self:
        """Return one of a shape, with the dtype and device of ``part``."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=requires_grad
        )
        return made

    @classmethod
    def refused(cls, what: str) -> RuntimeError:
        """Return the error about a function that cannot run."""
        return RuntimeError(cls.refusal.format(what))

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that needs values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for the whole, or :meth:`run` the function."""
        if func in cls.metadata:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse calls that bypass :meth:`__torch_function__`."""
        raise cls.refused(str(func))


@dataclass(frozen=True)
class Cut:
    """How one parameter is split over the ranks of a process group.

    The part is contiguous rows of tensor dimension ``dim``. A packed parameter (queries, keys and values in one matrix)
    consists of sections along ``dim`` that are each split by themselves, so a rank holds its part of every section.

    Args:
        group: ranks that hold one part each, in order.
        dim: tensor dimension that is split.
        sections: lengths of the sections along ``dim``; ``None``: one section. Each must divide by the group's size.

    Raises:
        ValueError: from :meth:`part`, if the tensor cannot be split evenly.
    """

    group: dist.ProcessGroup
    dim: int = 0
    sections: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of parts."""
        return self.group.size()

    def part(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of ``whole``."""
        rank = self.group.rank()
        return torch.cat([piece.chunk(self.size, self.dim)[rank] for piece in self._sections(whole)], self.dim).clone()

    def whole(self, part: Tensor) -> Tensor:
        """Gather the whole tensor from every rank's part. A collective of the group."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        if self.sections is None:
            return torch.cat(parts, self.dim)
        lengths = [length // self.size for length in self.sections]
        split = [p.split(lengths, self.dim) for p in parts]
        return torch.cat([pieces[section] for section in range(len(lengths)) for pieces in split], self.dim)

    def whole_shape(self, part: Sequence[int]) -> torch.Size:
        """Return the shape of the whole tensor, given that of a part."""
        return torch.Size((*part[: self.dim], part[self.dim] * self.size, *part[self.dim + 1 :]))

    def in_whole(self, held: TensorParts) -> TensorParts:
        """Return boxes of this rank's part in the coordinates of the whole tensor.

        Args:
            held: boxes of the part, in the part's own coordinates.
        """
        dim, index = self.dim, self.group.rank()
        lengths = self.sections or (held.shape[dim] * self.size,)
        parts = []
        in_part = in_whole = 0  # offset of the current section
        for length in (section // self.size for section in lengths):
            start = in_whole + index * length
            for offsets, tensor in held.parts:
                first = max(offsets[dim], in_part)
                last = min(offsets[dim] + tensor.shape[dim], in_part + length)
                if first < last:
                    place = (*offsets[:dim], start + first - in_part, *offsets[dim + 1 :])
                    parts.append((place, tensor.narrow(dim, first - offsets[dim], last - first)))
            in_part, in_whole = in_part + length, in_whole + length * self.size
        return TensorParts(self.whole_shape(held.shape), held.dtype, parts)

    def _sections(self, whole: Tensor) -> tuple[Tensor, ...]:
        lengths = self.sections or (whole.shape[self.dim],)
        if any(length % self.size for length in lengths) or sum(lengths) != whole.shape[self.dim]:
            raise ValueError(
                f"A tensor of shape {tuple(whole.shape)} cannot be split into {self.size} equal parts along dim "
                f"{self.dim}" + (f" in sections of {lengths}" if self.sections else "") + "."
            )
        return whole.split(lengths, self.dim)  # type: ignore[no-any-return]
