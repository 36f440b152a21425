"""Copies of run states in reused host memory, so that training can continue while they are written."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts

# Aligned for views of any dtype and fast copies.
_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20


class Arena:
    """A reusable block of host memory that grows on demand.

    Fresh memory costs many times more than copying into it, since the kernel maps it page by page on first touch. So
    the block is kept, can be touched beforehand, and uses huge pages where the system has them (Linux).

    Args:
        pinned: page-locked memory, for asynchronous copies from a CUDA device.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._block: Tensor | None = None
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return self._used

    def reserve(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` of the block as uint8; its previous contents are lost."""
        if self._block is None or self._block.numel() < num_bytes:
            self.release()  # before allocating another
            self._block = _allocated(num_bytes, self.pinned)
        self._used = max(self._used, num_bytes)
        return self._block[:num_bytes]

    def prepare(self, num_bytes: int) -> None:
        """Touch ``num_bytes`` now, so that a later copy need not wait for page faults."""
        if self._used < num_bytes:
            self.reserve(num_bytes).zero_()

    def release(self) -> None:
        """Free the memory."""
        self._block, self._used = None, 0


def _allocated(num_bytes: int, pinned: bool) -> Tensor:
    if pinned or num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    # A quarter more address space than needed, free until touched, so that a slightly larger state fits later.
    pages = -(-num_bytes * 5 // 4 // _HUGE_PAGE)
    block = mmap.mmap(-1, pages * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)  # keeps the mapping alive


def lay_out(tensors: Mapping[str, TensorParts]) -> tuple[list[int], int]:
    """Return the first byte of every box in a flat block, in sequence, and the end."""
    starts, end = [], 0
    for box in _boxes(tensors):
        starts.append(end)
        end += -(-box.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def views(tensors: Mapping[str, TensorParts], block: Tensor) -> dict[str, TensorParts]:
    """Return boxes of the same sizes and dtypes over the memory of ``block`` (uint8), in the order of :func:`lay_out`.

    Raises:
        ValueError: if the block is too short.
    """
    starts = iter(lay_out(tensors)[0])

    def view(box: Tensor) -> Tensor:
        start = next(starts)
        if start + box.nbytes > len(block):
            raise ValueError(f"a box of {tuple(box.shape)} at byte {start} is outside of a block of {len(block)} bytes")
        return block[start : start + box.nbytes].view(box.dtype).view(box.shape)

    return {key: parts.map(view) for key, parts in tensors.items()}


@dataclass(frozen=True)
class Staged:
    """A copy of a run state's tensors.

    Args:
        tensors: the copies; valid until the same :class:`Staging` stages again.
        block: memory of all of them, uint8.
        copied: CUDA event recorded after the copy; ``None``: already copied.
    """

    tensors: dict[str, TensorParts]
    block: Tensor
    copied: Any = None

    def wait(self) -> None:
        """Block until the copy is complete; returns at once if nothing came from a CUDA device."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Copier of tensors into one reused block of host memory.

    From the CPU the copy is complete when :meth:`stage` returns. From a CUDA device it runs on its own stream into
    page-locked memory: the host continues at once, and kernels launched later on the current stream wait for it, so
    that they cannot overwrite its source.
    """

    def __init__(self) -> None:
        self._arenas = {pinned: Arena(pinned) for pinned in (False, True)}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(arena.num_bytes for arena in self._arenas.values())

    def prepare(self, tensors: Mapping[str, TensorParts]) -> None:
        """Allocate the memory for a copy of ``tensors``."""
        device = _device_of(tensors)
        self._arenas[device is not None].prepare(lay_out(tensors)[1])

    def stage(self, tensors: Mapping[str, TensorParts]) -> Staged:
        """Copy tensors, overwriting the previous copy.

        Args:
            tensors: boxes on the CPU, on one CUDA device, or on both.
        """
        device = _device_of(tensors)
        block = self._arenas[device is not None].reserve(lay_out(tensors)[1])
        staged = views(tensors, block)
        sources, targets = [box.detach() for box in _boxes(tensors)], list(_boxes(staged))
        copied = _copy(targets, sources) if device is None else self._copy_from(device, targets, sources)
        return Staged(staged, block, copied)

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
                source.record_stream(stream)  # otherwise its memory could be reused while it is read
        current.wait_event(copied)
        return copied

    def release(self) -> None:
        """Free the memory."""
        for arena in self._arenas.values():
            arena.release()


def _device_of(tensors: Mapping[str, TensorParts]) -> torch.device | None:
    """Return the CUDA device of some boxes; ``None`` if all are on the CPU."""
    return next((box.device for box in _boxes(tensors) if box.is_cuda), None)


def _boxes(tensors: Mapping[str, TensorParts]) -> Iterator[Tensor]:
    return (box for parts in tensors.values() for _, box in parts.parts)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # one call avoids Python overhead for thousands of small tensors
        torch._foreach_copy_(targets, sources, non_blocking=True)
