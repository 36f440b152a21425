"""The bytes of tensors: hashed where they lie, or sent from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

# Bytes of a CUDA tensor that are brought to the host at a time.
_CHUNK = 64 << 20


def digest_of(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes in the order of its elements (xxh3, 128 bits).

    Args:
        tensor: of any type, on any device; a CUDA tensor is waited for and copied to the host piece by piece.
    """
    octets = octets_of(tensor)
    found = xxhash.xxh3_128()
    for piece in [octets] if octets.device.type == "cpu" else _on_host(octets):
        found.update(piece.numpy().data)
    return found.digest()


def send(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Send a tensor's bytes to a global rank, which calls :func:`receive`.

    Args:
        tensor: on any device.
        rank: of the default process group.
        device: that the backend of the group works on.
    """
    dist.send(octets_of(tensor).to(device), rank)


@torch.no_grad()
def receive(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Overwrite a tensor in place with the bytes that a global rank sends by :func:`send`."""
    arrived = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=device)
    dist.recv(arrived, rank)
    tensor.copy_(arrived.view(tensor.dtype).view(tensor.shape))


def octets_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 ``(bytes,)``; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _on_host(octets: Tensor) -> Iterator[Tensor]:
    """Pieces of a CUDA tensor in host memory; while one is hashed, the next one is on its way."""
    room = min(_CHUNK, octets.numel())
    buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    waiting: Tensor | None = None
    reached = torch.cuda.Event()
    for number, piece in enumerate(octets.split(_CHUNK)):
        target = buffers[number % 2][: piece.numel()]
        if waiting is not None:
            reached.synchronize()
        target.copy_(piece, non_blocking=True)
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(octets.device))
        if waiting is not None:
            yield waiting
        waiting = target
    reached.synchronize()
    if waiting is not None:
        yield waiting
