"""Compressed averages of flat tensors over ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.contract.collectives.flat import gather_parts

State = dict[str, Tensor]
Shapes = Sequence[Sequence[int]]


class GradientCompressor(ABC):
    """Compressed average of a bucket of gradients over ranks.

    Stateless: the caller keeps each bucket's state, so that it can be saved by parameter name. A bucket is one flat
    tensor of several concatenated ones with the given ``shapes``.
    """

    @abstractmethod
    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """Return the initial state of a bucket averaged over ``ranks``; empty: stateless.

        An entry ``"residual"`` has the length of the bucket, element by element.
        """

    @abstractmethod
    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """Return the bytes that one rank sends to average a bucket over ``ranks``."""

    @abstractmethod
    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """Replace a bucket by its approximate mean over ``group``, bit-identical on all ranks. A collective.

        Args:
            flat: ``(numel,)``, float32; changed in place.
            shapes: of its tensors.
            group: process group; ``None``: all ranks.
            state: from :meth:`new_state`; changed in place.
        """


class Gathered(GradientCompressor):
    """All-gather of messages with error feedback, for small messages.

    Sent: ``(ranks - 1) x message``. The error of a message is added to the next one (arXiv:1809.07599): sent + residual
    = gradient + old residual.

    Args:
        codec: of a message.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """See :class:`GradientCompressor`."""
        return {"residual": torch.zeros(num_elements(shapes), device=device)}

    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """See :class:`GradientCompressor`."""
        return (ranks - 1) * self.codec.row_bytes(num_elements(shapes))

    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """See :class:`GradientCompressor`."""
        message = encode_with_feedback(self.codec, flat[None], state["residual"][None])
        messages = gather_parts(message[0], group)
        flat.zero_()
        for each in messages:  # one by one: decoding all at once would take the memory of as many gradients
            flat += self.codec.decode(each[None], flat.numel())[0]
        flat /= len(messages)


class TwoPhase(GradientCompressor):
    """All-to-all of chunks, mean, all-gather: bytes sent do not grow with the number of ranks.

    Sent: ``2 x (ranks - 1) x message of a chunk`` of ``numel / ranks`` elements. With feedback, the errors of both
    phases are added to the next messages (1-bit Adam, arXiv:2102.02888, section 4.2).

    Args:
        codec: of a message.
        feedback: keep the errors of messages.
    """

    def __init__(self, codec: Codec, feedback: bool = False) -> None:
        self.codec = codec
        self.feedback = feedback

    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """See :class:`GradientCompressor`."""
        if not self.feedback:
            return {}
        numel = num_elements(shapes)
        chunk = -(-numel // ranks)
        return {"residual": torch.zeros(numel, device=device), "chunk_residual": torch.zeros(chunk, device=device)}

    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """See :class:`GradientCompressor`."""
        return 2 * (ranks - 1) * self.codec.row_bytes(-(-num_elements(shapes) // ranks))

    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """See :class:`GradientCompressor`."""
        ranks, numel = dist.get_world_size(group), flat.numel()
        chunk = -(-numel // ranks)
        residuals = None if not self.feedback else _rows(state["residual"], ranks, chunk)
        messages = encode_with_feedback(self.codec, _rows(flat, ranks, chunk), residuals)
        if residuals is not None:
            state["residual"].copy_(residuals.view(-1)[:numel])
        received = torch.empty_like(messages)
        dist.all_to_all_single(received.view(-1), messages.view(-1), group=group)
        mean = self.codec.decode(received, chunk).mean(0, keepdim=True)
        # Padding of the last chunk must not enter the residual.
        filled_up = slice(max(numel - dist.get_rank(group) * chunk, 0), None)
        mean[:, filled_up] = 0.0
        own = encode_with_feedback(self.codec, mean, state["chunk_residual"][None] if self.feedback else None)
        if self.feedback:
            state["chunk_residual"][filled_up] = 0.0
        whole = gather_parts(own[0], group)
        flat.copy_(self.codec.decode(whole, chunk).reshape(-1)[:numel])


def num_elements(shapes: Shapes) -> int:
    """Return the number of elements in a bucket of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ring_bytes(numel: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce of ``numel`` float32."""
    return 2 * (ranks - 1) * 4 * -(-numel // ranks)


def encode_with_feedback(codec: Codec, rows: Tensor, residuals: Tensor | None) -> Tensor:
    """Encode rows plus the residual of earlier messages.

    Args:
        codec: of the rows.
        rows: ``(rows, length)``, float32.
        residuals: same shape; replaced by the error of this message. ``None``: no feedback.
    """
    if residuals is None:
        return codec.encode(rows)
    residuals += rows
    data = codec.encode(residuals)
    residuals -= codec.decode(data, rows.shape[1])
    # A non-finite gradient must not poison later steps: its own step is dropped anyway.
    residuals.nan_to_num_(0.0, 0.0, 0.0)
    return data


def _rows(flat: Tensor, ranks: int, chunk: int) -> Tensor:
    """Return a copy of ``flat`` as one zero-padded row per rank."""
    rows = flat.new_zeros(ranks, chunk)
    rows.view(-1)[: flat.numel()] = flat
    return rows
