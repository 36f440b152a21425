"""A copy of a run state in memory that is used again and again, so that training may go on while it is written."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts

# Rows of any dtype begin where its views may begin, and where a copy is fastest.
_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20


class Arena:
    """One block of host memory that grows and is used again.

    Fresh memory costs many times more than copying into it, since the kernel hands it out page by page when it is first
    touched. So the block stays, it can be touched beforehand, and where the system has huge pages (Linux) it is asked
    for them.

    Args:
        pinned: page-locked memory, into which a CUDA device copies while the host does something else.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._block: Tensor | None = None
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return self._used

    def reserve(self, num_bytes: int) -> Tensor:
        """``num_bytes`` of the block, uint8; what was in it before is lost."""
        if self._block is None or self._block.numel() < num_bytes:
            self.release()  # before asking for another
            self._block = _pinned(num_bytes) if self.pinned else _plain(num_bytes)
        self._used = max(self._used, num_bytes)
        return self._block[:num_bytes]

    def prepare(self, num_bytes: int) -> None:
        """Let the kernel hand out ``num_bytes`` now, so that nobody waits for that later."""
        if self._used < num_bytes:
            self.reserve(num_bytes).zero_()

    def release(self) -> None:
        """Give the memory back."""
        self._block, self._used = None, 0


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _plain(num_bytes: int) -> Tensor:
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Addresses for a quarter more than is needed: they cost nothing until they are touched, and a state that grows a
    # little then keeps the memory that it has.
    pages = -(-num_bytes * 5 // 4 // _HUGE_PAGE)
    block = mmap.mmap(-1, pages * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
        if not 0 <= self.start <= len(block) - count * self.dtype.itemsize or min(self.sizes, default=0) < 0:
            raise ValueError(f"a box of {self.sizes} at byte {self.start} is not in a block of {len(block)} bytes")
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

    def prepare(self, tensors: Mapping[str, TensorParts]) -> None:
        """Get the memory that a copy of ``tensors`` takes."""
        device = _device_of(tensors)
        self._arenas[device is not None].prepare(lay_out(tensors)[1])

    def stage(self, tensors: Mapping[str, TensorParts]) -> Staged:
        """Copy; what was staged before is overwritten.

        Args:
            tensors: boxes on the CPU or on one CUDA device, or on both.
        """
        slots, num_bytes = lay_out(tensors)
        sources = [box.detach() for parts in tensors.values() for _, box in parts.parts]
        device = _device_of(tensors)
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


def _device_of(tensors: Mapping[str, TensorParts]) -> torch.device | None:
    """The CUDA device that some of the boxes are on; ``None``: all are on the CPU."""
    boxes = (box for parts in tensors.values() for _, box in parts.parts)
    return next((box.device for box in boxes if box.is_cuda), None)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # one call: thousands of small tensors would otherwise cost more in Python than in copying
        torch._foreach_copy_(targets, sources, non_blocking=True)
