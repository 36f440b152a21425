"""A copy of a run state in memory that is used again and again, so that training may go on while it is written."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.parts import TensorParts

# Rows of any dtype begin where its views may begin, and where a copy is fastest.
_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20


class Arena:
    """One block of host memory that grows and is used again.

    Fresh memory costs more than copying into it: the kernel hands it out page by page, each with a fault. So the block
    stays, and where the system offers huge pages (Linux) it is asked for them.

    Args:
        pinned: page-locked memory, into which a CUDA device copies while the host does something else.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._block: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._block is None else self._block.numel()

    def reserve(self, num_bytes: int) -> Tensor:
        """``num_bytes`` of the block, uint8; what was in it before is lost."""
        if self._block is None or self.num_bytes < num_bytes:
            self._block = None  # give the old one back before asking for another
            self._block = _pinned(num_bytes) if self.pinned else _plain(num_bytes)
        return self._block[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._block = None


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _plain(num_bytes: int) -> Tensor:
    if num_bytes < _HUGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    block = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)  # keeps the mapping alive


@dataclass(frozen=True)
class Slot:
    """Where one box of a tensor lies in a flat block.

    Args:
        key: of the tensor.
        offsets: of the box in the whole tensor.
        sizes: of the box.
        dtype: of its elements.
        start: its first byte.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int

    def view(self, block: Tensor) -> Tensor:
        """The box as a tensor over the memory of ``block``."""
        count = 1
        for size in self.sizes:
            count *= size
        return block[self.start : self.start + count * self.dtype.itemsize].view(self.dtype).view(self.sizes)


def lay_out(tensors: Mapping[str, TensorParts], start: int = 0) -> tuple[list[Slot], int]:
    """A place for every box, one behind the other from byte ``start``, and the first byte after the last."""
    slots = []
    for key, parts in tensors.items():
        for offsets, box in parts.parts:
            slots.append(Slot(key, tuple(offsets), tuple(box.shape), box.dtype, start))
            length = box.numel() * box.element_size()
            start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return slots, start


@dataclass(frozen=True)
class Staged:
    """A run state's tensors in memory of their own.

    Args:
        tensors: as those that were staged; valid until the same :class:`Staging` stages again.
        block: the memory of all of them, uint8.
        slots: where each box lies in it.
    """

    tensors: dict[str, TensorParts]
    block: Tensor
    slots: list[Slot]
    copied: Any = None

    def wait(self) -> None:
        """Block until the copy is there; at once where nothing came from a CUDA device."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Copies tensors into one reused block of host memory.

    From the CPU the copy is done when :meth:`stage` returns. From a CUDA device it runs on a stream of its own into
    page-locked memory: the host goes on at once, and kernels started later on the device's current stream wait for it,
    so that they cannot change what is still to be copied.
    """

    def __init__(self) -> None:
        self._arenas = {pinned: Arena(pinned) for pinned in (False, True)}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return sum(arena.num_bytes for arena in self._arenas.values())

    def stage(self, tensors: Mapping[str, TensorParts]) -> Staged:
        """Copy; what was staged before is overwritten.

        Args:
            tensors: boxes on the CPU or on one CUDA device, or on both.
        """
        slots, num_bytes = lay_out(tensors)
        sources = [box.detach() for parts in tensors.values() for _, box in parts.parts]
        device = next((source.device for source in sources if source.is_cuda), None)
        block = self._arenas[device is not None].reserve(num_bytes)
        targets = [slot.view(block) for slot in slots]
        copied = _copy(targets, sources) if device is None else self._copy_from(device, targets, sources)
        rest = iter(targets)
        staged = {key: parts.map(lambda _: next(rest)) for key, parts in tensors.items()}
        return Staged(staged, block, slots, copied)

    def _copy_from(self, device: torch.device, targets: list[Tensor], sources: list[Tensor]) -> torch.cuda.Event:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _copy(targets, sources)
            copied = torch.cuda.Event()
            copied.record(stream)
        for source in sources:
            if source.is_cuda:
                source.record_stream(stream)  # else its memory could be given to others while it is read
        current.wait_event(copied)
        return copied

    def release(self) -> None:
        """Give the memory back."""
        for arena in self._arenas.values():
            arena.release()


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # one call: thousands of small tensors would otherwise cost more in Python than in copying
        torch._foreach_copy_(targets, sources, non_blocking=True)
