"""Averaging over ranks with fewer bytes than the numbers themselves have."""

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
    """What is sent in place of a bucket of gradients, and what of it is kept back for later.

    It has no memory of its own: what it must remember of a bucket is a state, which the caller keeps, so that it can be
    saved by the names of the parameters. A bucket is several tensors in one flat one; ``shapes`` are theirs, in order.
    """

    @abstractmethod
    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """What must be remembered of a bucket that is averaged over ``ranks``; empty: nothing.

        What is called ``"residual"`` is as long as the bucket, and each number of it belongs to the one at its place.
        """

    @abstractmethod
    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """Bytes that one rank sends to average a bucket over ``ranks``."""

    @abstractmethod
    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """Replace a bucket by about its mean over the ranks of ``group``, the same bits on each. A collective.

        Args:
            flat: ``(numel,)``, float32; changed in place.
            shapes: of its tensors.
            group: ``None`` = all ranks.
            state: of :meth:`new_state`; changed in place.
        """


class Gathered(GradientCompressor):
    """Every rank gets the message of every other: for messages so small that this is little.

    Sent: ``(ranks - 1) x message``. What a message lacks is added to the next one (error feedback, arXiv:1809.07599):
    sent + residual = gradient + old residual.

    Args:
        codec: how a message is written.
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
        for each in messages:  # one after the other: all decoded at once would be as many whole gradients
            flat += self.codec.decode(each[None], flat.numel())[0]
        flat /= len(messages)


class TwoPhase(GradientCompressor):
    """Every rank averages a chunk for all, and sends it to all: what is sent does not grow with the ranks.

    Sent: ``2 x (ranks - 1) x message of a chunk``, the chunk being ``numel / ranks`` numbers. With feedback, what the
    messages lack is added to the next ones, in both phases (the scheme of 1-bit Adam, arXiv:2102.02888, section 4.2).

    Args:
        codec: how a message is written.
        feedback: keep what messages lack; ``False``: it is lost.
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
        return {
            "residual": torch.zeros(numel, device=device),
            "chunk_residual": torch.zeros(chunk, device=device),
        }

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
        # What fills up the last chunk belongs to no number, so nothing of it may be kept.
        filled_up = slice(max(numel - dist.get_rank(group) * chunk, 0), None)
        mean[:, filled_up] = 0.0
        own = encode_with_feedback(self.codec, mean, state["chunk_residual"][None] if self.feedback else None)
        if self.feedback:
            state["chunk_residual"][filled_up] = 0.0
        whole = gather_parts(own[0], group)
        flat.copy_(self.codec.decode(whole, chunk).reshape(-1)[:numel])


def num_elements(shapes: Shapes) -> int:
    """Numbers in a bucket of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ring_bytes(numel: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of ``numel`` float32."""
    return 2 * (ranks - 1) * 4 * -(-numel // ranks)


def encode_with_feedback(codec: Codec, rows: Tensor, residuals: Tensor | None) -> Tensor:
    """Encode rows together with what earlier messages lacked.

    Args:
        codec: how they are written.
        rows: ``(rows, length)``, float32.
        residuals: of the same shape; replaced by what this message lacks. ``None``: nothing is kept.
    """
    if residuals is None:
        return codec.encode(rows)
    residuals += rows
    data = codec.encode(residuals)
    residuals -= codec.decode(data, rows.shape[1])
    # One gradient that is not finite must not spoil every later one: the step that it belongs to is dropped, not sent.
    residuals.nan_to_num_(0.0, 0.0, 0.0)
    return data


def _rows(flat: Tensor, ranks: int, chunk: int) -> Tensor:
    """``flat`` as one row per rank, filled up with zeros; a copy."""
    rows = flat.new_zeros(ranks, chunk)
    rows.view(-1)[: flat.numel()] = flat
    return rows
