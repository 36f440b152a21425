"""Exact attention over the whole sequence when each rank holds some of its positions.

Three methods, for ``c`` ranks, with KV the bytes of one rank's keys and values and Q those of its queries; bytes sent
per rank:

=========  ==============================================  ==========================  =============================
method     how                                             forward                     memory of keys and values
=========  ==============================================  ==========================  =============================
ring       keys and values rotate, results are merged      (c - 1) KV                  those of two ranks
ulysses    all-to-all: from positions to heads and back    (c - 1) / c (2 Q + KV)      all positions, 1 / c of heads
gather     all-gather of keys and values                   (c - 1) KV                  all positions
=========  ==============================================  ==========================  =============================

Ring: Liu et al., https://arxiv.org/abs/2310.01889. Ulysses: Jacobs et al., https://arxiv.org/abs/2309.14509.
"""

# Shapes: B = sequences, H = query heads, K = key-value heads, S = positions of a rank, T = positions of the whole
# sequence, d = width of a head.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.context.collectives import gather_all, to_heads, to_positions
from trainwright.strategies.context.documents import (
    ATTENTION,
    attend_documents,
    document_mask,
    documents_of,
    is_readable,
    is_starts,
)
from trainwright.strategies.context.kernels import PartialAttention
from trainwright.strategies.context.order import SequenceOrder
from trainwright.strategies.contract.collectives.flat import gather_parts, scatter_sum

Method = Literal["ring", "ulysses", "gather"]


class DistributedAttention:
    """``scaled_dot_product_attention`` of queries, keys and values whose positions are split over ranks.

    Args:
        group: the ranks that share a sequence.
        order: their positions.
        method: see above.
    """

    def __init__(self, group: dist.ProcessGroup, order: SequenceOrder, method: Method) -> None:
        self.group, self.order, self.method = group, order, method

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention of this rank's queries over the whole sequence.

        Args:
            query: ``(B, H, S, d)``, or ``(N, S, d)``.
            key, value: like ``query``; with a different number of positions, a replicated other sequence
                (cross-attention).
            attn_mask: boolean or additive; rows: this rank's, the whole sequence's or one for all; columns: the whole
                sequence's, or this rank's if it has one row. Or starts of documents, see ``document_attention``.
            dropout_p: of attention weights; not with ``ring``. The pattern differs from that of one process.
            is_causal: position t sees positions 0 to t of the whole sequence.
            scale: of the scores; ``None``: one over the root of ``d``.
            enable_gqa: ``K`` may be a divisor of ``H``.

        Raises:
            ValueError: for a mask of unsupported shape, dropout or a mask with a gradient under ``ring``, or heads
                that ``ulysses`` cannot divide.
        """
        if query.ndim == 3:  # one head, as in torch
            mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
            q, k, v = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return self(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1)
        if is_causal and attn_mask is not None:
            raise ValueError("attn_mask with is_causal=True (allowed: one of them; put causality into the mask).")
        # Fused kernels assume contiguous features.
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in _autocast(query, key, value))
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if query.size(2) != key.size(2):
            return self._across(call)
        if attn_mask is not None:
            call = call._replace(mask=self._whole_columns(attn_mask, query.size(2)))
        if self.method == "ulysses":
            return self._by_heads(call)
        if call.mask is not None and is_starts(call.mask) and is_readable(call.mask) and not dropout_p:
            return self._by_pieces(call)
        call = call._replace(mask=self._own_rows(call.mask, query.size(2)))
        if self.method == "gather" and (call.mask is not None or dropout_p):
            return self._by_rows(call)
        return self._by_pieces(call)

    def _across(self, call: _Call) -> Tensor:
        """Attend to the keys of another sequence."""
        if call.is_causal:
            raise ValueError(
                f"Causal attention of {call.query.size(2)} queries of this rank over {call.key.size(2)} keys (allowed: "
                "keys of the same sequence). With a cache of earlier keys, pass use_cache=False while context is split."
            )
        return call._replace(mask=self._own_rows(call.mask, call.query.size(2))).computed()

    def _by_pieces(self, call: _Call) -> Tensor:
        query, key, value, mask, dropout, causal, scale = call
        if dropout:
            raise ValueError(
                f"Attention dropout {dropout} with the context method 'ring' (allowed: 0). Set the model's attention "
                "dropout to 0, or use the method 'gather' or 'ulysses'."
            )
        if mask is not None and mask.requires_grad:
            raise ValueError(
                "The context method 'ring' has no gradient for an attention mask, but this one is learned (a position "
                "bias). Use the method 'gather' or 'ulysses'."
            )
        scale = query.size(-1) ** -0.5 if scale is None else scale
        documents = None
        if mask is not None and is_starts(mask):
            documents, mask = documents_of(mask), None
        job = _Job(self.group, self.order, self.method == "ring", causal, scale, documents)
        # Without autocast, which would round the products of the plain kernel.
        with torch.autocast(query.device.type, enabled=False):
            out: Tensor = _SplitAttention.apply(query, key, value, mask, job)
        return out

    def _by_rows(self, call: _Call) -> Tensor:
        """Attend to all keys and values with the rows of this rank."""
        key, value = (gather_all(tensor, self.group, self.order, 2) for tensor in (call.key, call.value))
        mask = call.mask
        if call.is_causal:
            length = key.size(2)
            rows = self.order.positions(length, key.device)
            mask = rows[:, None] >= torch.arange(length, device=key.device)
        return call._replace(key=key, value=value, mask=mask, is_causal=False).computed()

    def _by_heads(self, call: _Call) -> Tensor:
        """Attend over all positions with a subset of heads."""
        query, key, value, mask, *_ = call
        size = self.order.size
        if problem := heads_problem(query.size(1), key.size(1), size):
            raise ValueError(problem)
        if mask is not None and mask.size(-2) not in (1, mask.size(-1)):
            raise ValueError(
                f"An attention mask of shape {tuple(mask.shape)} with the context method 'ulysses' (allowed: rows of "
                "the whole sequence, or one row for all). Pass the whole mask to the block."
            )
        if mask is not None and mask.ndim == 4 and mask.size(1) > 1:
            mask = mask.chunk(size, 1)[self.order.rank]
        if key.size(1) % size:
            key, value = (tensor.repeat_interleave(size // tensor.size(1), 1) for tensor in (key, value))
        query, key, value = to_heads(self.group, self.order, query, key, value)
        out = call._replace(query=query, key=key, value=value, mask=mask).computed()
        (local,) = to_positions(self.group, self.order, out)
        return local

    def _whole_columns(self, mask: Tensor, held: int) -> Tensor:
        """Return ``mask`` as ``(B | 1, H | 1, rows, T)`` or ``(rows, T)``."""
        columns, length = mask.size(-1), held * self.order.size
        if columns == length and mask.size(-2) in (1, held, length):
            return mask
        if columns == held and mask.size(-2) == 1:  # a padding mask that was split with the hidden states
            if mask.requires_grad:
                return gather_all(mask, self.group, self.order, mask.ndim - 1)
            sent = mask.to(torch.uint8) if mask.dtype is torch.bool else mask  # NCCL has no booleans
            whole = self.order.whole(gather_parts(sent, self.group).unbind(), mask.ndim - 1)
            return whole.to(mask.dtype)
        raise ValueError(
            f"An attention mask of shape {tuple(mask.shape)} for {held} of {length} positions (allowed: "
            f"{length} columns with 1, {held} or {length} rows). A mask that a block builds from the length of its "
            "input covers this rank's positions only: build it before the blocks and pass it in, or use is_causal=True."
        )

    def _own_rows(self, mask: Tensor | None, held: int) -> Tensor | None:
        if mask is not None and is_starts(mask):
            return document_mask(mask, self.order.positions(mask.size(-1), mask.device))
        is_whole = mask is not None and mask.size(-2) == held * self.order.size
        return self.order.part(mask, mask.ndim - 2) if mask is not None and is_whole else mask


class _Call(NamedTuple):
    """Arguments of one call of attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None

    def computed(self) -> Tensor:
        """Compute attention in this process."""
        query, key, value, mask, dropout, is_causal, scale = self
        if mask is not None and is_starts(mask):
            return attend_documents(ATTENTION, query, key, value, mask, dropout, scale)
        gqa = query.size(1) != key.size(1)
        return ATTENTION(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=gqa)


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast queries, keys and values to autocast's dtype, or check that they have one dtype."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"Queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype} (allowed: one dtype for all)."
        )
    return query, key, value


def heads_problem(heads: int, kv_heads: int, size: int) -> str | None:
    """Return why ``ulysses`` cannot divide heads over ``size`` ranks; ``None`` if it can.

    Key-value heads are repeated if there are fewer than ranks.
    """
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return None
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return (
        f"context={size} with the method 'ulysses' and {heads} query heads, {kv_heads} key/value heads (allowed: "
        f"context of {', '.join(map(str, possible))}; or the method 'ring' or 'gather', which do not divide heads)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Ring and gather: merged pieces


class _Piece(NamedTuple):
    """Part of the attention of a rank's queries to a rank's keys: rows and columns ``(start, length)``, causality, and
    the sequences of the batch."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool
    batch: slice = slice(None)

    def rows_of(self, tensor: Tensor) -> Tensor:
        return tensor[self.batch].narrow(2, *self.rows)

    def columns_of(self, tensor: Tensor) -> Tensor:
        return tensor[self.batch].narrow(2, *self.columns)


class _Job(NamedTuple):
    """One call of attention; ``documents`` of each sequence, if attention is causal within these."""

    group: dist.ProcessGroup
    order: SequenceOrder
    ring: bool
    causal: bool
    scale: float
    documents: Sequence[Sequence[tuple[int, int]]] | None = None

    def pieces(self, source: int, held: int) -> list[_Piece]:
        """Return the pieces for the keys of rank ``source``; none if they are all masked."""
        rank, everything = self.order.rank, (0, held)
        if self.documents is not None:
            return [piece for index in range(len(self.documents)) for piece in self._of_documents(index, source, held)]
        if not self.causal or source == rank:
            return [_Piece(everything, everything, self.causal)]
        if not self.order.balance:
            return [_Piece(everything, everything, False)] if source < rank else []
        half = held // 2
        # All second chunks come after all first chunks, in reverse order of ranks.
        if source < rank:
            return [_Piece(everything, (0, half), False)]
        return [_Piece((half, half), everything, False)]

    def _of_documents(self, index: int, source: int, held: int) -> Iterator[_Piece]:
        assert self.documents is not None
        own, others = (self.order.held(rank) for rank in (self.order.rank, source))
        length = held // len(own)
        for begin, end in self.documents[index]:
            for (i, row), (j, column) in product(enumerate(own), enumerate(others)):
                rows, columns = (
                    (max(begin, chunk * length), min(end, (chunk + 1) * length)) for chunk in (row, column)
                )
                if column <= row and rows[0] < rows[1] and columns[0] < columns[1]:
                    yield _Piece(
                        (rows[0] + (i - row) * length, rows[1] - rows[0]),
                        (columns[0] + (j - column) * length, columns[1] - columns[0]),
                        row == column,
                        slice(index, index + 1),
                    )

    def partial(
        self, piece: _Piece, source: int, query: Tensor, packed: Sequence[Tensor], mask: Tensor | None
    ) -> PartialAttention:
        """Return the attention of a piece: rows of ``query`` over keys and values of rank ``source``."""
        key, value = map(piece.columns_of, packed)
        mask = None if mask is None else self.order.part(mask, mask.ndim - 1, source)
        return PartialAttention(piece.rows_of(query), key, value, mask, piece.causal, self.scale)

    def source(self, step: int) -> int:
        """Return the rank whose keys this rank holds at ``step``, its own first."""
        return (self.order.rank - step) % self.order.size

    def rotate(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Start sending ``tensor`` to the next rank; returns the previous rank's tensor and the works to wait for."""
        arriving = torch.empty_like(tensor)
        after, before = ((self.order.rank + step) % self.order.size for step in (1, -1))
        ranks = [dist.get_global_rank(self.group, peer) for peer in (after, before)]
        sending = dist.P2POp(dist.isend, tensor, ranks[0], self.group)
        return arriving, dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, arriving, ranks[1], self.group)])

    def visits(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield keys and values of all ranks, this one's first, as ``(rank, packed)``, receiving the next meanwhile."""
        for step in range(self.order.size):
            more = step < self.order.size - 1
            arriving, works = self.rotate(packed) if more else (packed, [])
            yield self.source(step), packed
            for work in works:
                work.wait()
            packed = arriving


class _SplitAttention(torch.autograd.Function):
    """Attention of this rank's queries by pieces, merged by the log-sum-exp of their scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, job: _Job) -> Tensor:
        packed = _pack(key, value)
        gathered = None if job.ring else gather_parts(packed, job.group)
        merged = _Merged(query.shape[:3])
        for source, flat in job.visits(packed) if gathered is None else _from_own(gathered, job):
            for piece in job.pieces(source, query.size(2)):
                partial = job.partial(piece, source, query, _unpack(flat, key, value), mask)
                merged.add(*partial.attend(), piece)
        out = merged.out.to(query.dtype)
        ctx.job = job
        ctx.save_for_backward(query, key, value, mask, out, merged.lse, gathered)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse, gathered = ctx.saved_tensors
        job: _Job = ctx.job
        gradient = _Gradient(job, (query, key, value, mask), (grads[0].contiguous(), out, lse))
        with torch.autocast(query.device.type, enabled=False):
            if gathered is None:
                flat = _backward_by_ring(gradient, _pack(key, value))
            else:
                flat = _backward_gathered(gradient, gathered)
        d_key, d_value = _unpack(flat, key, value)
        return gradient.query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _backward_by_ring(gradient: _Gradient, packed: Tensor) -> Tensor:
    """Return the gradient of this rank's packed keys and values, accumulated while it follows them around the ring."""
    job = gradient.job
    total: Tensor | None = None
    flat, works = packed, list[Any]()  # the received gradient
    for source, keys in job.visits(packed):
        own = gradient.add(source, keys)
        if total is None:
            total = own  # of this rank's own keys; the other ranks' part arrives last
            continue
        for work in works:
            work.wait()
        sent = flat.add_(own) if works else own
        flat, works = job.rotate(sent)
    assert total is not None
    for work in works:
        work.wait()
    return total.add_(flat) if works else total


def _backward_gathered(gradient: _Gradient, gathered: Tensor) -> Tensor:
    """Return the same as :func:`_backward_by_ring` from gathered keys and values."""
    rows = torch.empty(gathered.shape, dtype=gradient.dtype, device=gathered.device)
    for source, packed in _from_own(gathered, gradient.job):
        rows[source] = gradient.add(source, packed)
    return scatter_sum(rows, gradient.job.group)


class _Gradient:
    """Accumulated gradient of the queries, and gradients of each rank's keys and values.

    Args:
        job: the call.
        given: queries, keys, values and mask.
        rows: gradient of the result, result, and log-sum-exp of the scores.
    """

    def __init__(
        self, job: _Job, given: tuple[Tensor, Tensor, Tensor, Tensor | None], rows: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.job = job
        # Accumulated in full precision, since pieces of many ranks are added.
        self.dtype = rows[-1].dtype
        self._query, *self._like, self._mask = given
        self._rows = rows
        self.query = torch.zeros_like(self._query, dtype=self.dtype)

    def add(self, source: int, packed: Tensor) -> Tensor:
        """Return this rank's contribution to the packed gradient of the keys and values of ``source``."""
        flat = torch.zeros(packed.shape, dtype=self.dtype, device=packed.device)
        for piece in self.job.pieces(source, self.query.size(2)):
            partial = self.job.partial(piece, source, self._query, _unpack(packed, *self._like), self._mask)
            d_query, *d_packed = partial.backward(*map(piece.rows_of, self._rows))
            piece.rows_of(self.query).add_(d_query)
            for total, part in zip(_unpack(flat, *self._like), d_packed, strict=True):
                piece.columns_of(total).add_(part)
        return flat


class _Merged:
    """Attention over several sets of keys, merged from that over each.

    Args:
        shape: ``(B, H, S)``.
    """

    out: Tensor
    lse: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)

    def add(self, out: Tensor, lse: Tensor, piece: _Piece) -> None:
        """Merge the rows of a piece.

        Args:
            out: ``(B, H, length, d)``.
            lse: log-sum-exp of the scores, ``(B, H, length)``; -inf for fully masked rows.
            piece: its place.
        """
        if not hasattr(self, "out"):
            if lse.shape == self._shape:
                self.out, self.lse = out.to(lse.dtype, copy=True), lse.clone(memory_format=torch.contiguous_format)
                return
            self.out = lse.new_zeros(*self._shape, out.size(-1))
            self.lse = lse.new_full(self._shape, -torch.inf)
        so_far, seen = map(piece.rows_of, (self.out, self.lse))
        both = torch.logaddexp(seen, lse)
        # Fully masked rows: -inf minus -inf would be NaN.
        reference = both.masked_fill(both == -torch.inf, 0.0)
        so_far.mul_((seen - reference).exp().unsqueeze(-1)).addcmul_(out, (lse - reference).exp().unsqueeze(-1))
        seen.copy_(both)


def _from_own(gathered: Tensor, job: _Job) -> Iterator[tuple[int, Tensor]]:
    for step in range(job.order.size):
        yield job.source(step), gathered[job.source(step)]


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of ``packed`` in the shapes of ``key`` and ``value``."""
    return packed[: key.numel()].view(key.shape), packed[key.numel() :].view(value.shape)
