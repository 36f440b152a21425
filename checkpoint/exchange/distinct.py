"""Collectives for plain values that are equal on most ranks: values are compared by hash, and each is sent once.

``all_gather_object`` sends every rank's value to every rank, padded to the longest, as pickles, which can run code of
anything that reaches a rank's socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.format.tree import UnsupportedValueError
from trainwright.core.errors import CheckpointError

# Renamed in newer torch versions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_CPU = torch.device("cpu")


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None, device: torch.device = _CPU) -> list[Any]:
    """Return the values of all ranks of a group, by rank. A collective.

    Each rank sends 24 bytes to each other, then each distinct value is sent once; nothing more if all are equal. Ranks
    with equal values share one object, which must not be modified.

    Args:
        value: of this rank; see :func:`~trainwright.checkpoint.exchange.plain_bytes.pack`.
        group: ``None``: all ranks.
        device: of the group's collectives.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    own = pack(value)
    equal = equal_ranks(own, group, device)
    if len(equal.lengths) == 1:
        return [value] * len(equal.of_rank)
    begins = [0, *accumulate(equal.lengths)]
    block = torch.zeros(begins.pop(), dtype=torch.uint8, device=device)
    rank = dist.get_rank(group)
    mine = equal.of_rank[rank]
    if equal.firsts[mine] == rank:
        block[begins[mine] : begins[mine] + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    dist.all_reduce(block, group=group)
    octets = block.cpu().numpy()
    values = [
        unpack(octets[begin : begin + length].tobytes()) for begin, length in zip(begins, equal.lengths, strict=True)
    ]
    return [values[number] for number in equal.of_rank]


def broadcast_value(
    value: Any, source: int, group: dist.ProcessGroup | None = None, device: torch.device = _CPU
) -> Any:
    """Broadcast a value of one rank of a group. A collective.

    Args:
        value: of that rank; ignored on others. See :func:`~trainwright.checkpoint.exchange.plain_bytes.pack`.
        source: the rank within the group.
        group: ``None``: all ranks.
        device: of the group's collectives.

    Raises:
        UnsupportedValueError: on every rank, if the value cannot be sent.
    """
    is_source = dist.get_rank(group) == source
    data, error = _packed(value) if is_source else (b"", None)
    header = torch.tensor([len(data), error is not None], device=device)
    dist.broadcast(header, group=group, group_src=source)
    length, failed = header.tolist()
    octets = bytearray(data) if is_source else bytearray(length)
    block = torch.frombuffer(octets, dtype=torch.uint8).to(device)
    dist.broadcast(block, group=group, group_src=source)
    if is_source and error is None:
        return value
    received = unpack(block.cpu().numpy().tobytes())
    if failed:
        raise error or CheckpointError(received)
    return received


def _packed(value: Any) -> tuple[bytes, UnsupportedValueError | None]:
    try:
        return pack(value), None
    except UnsupportedValueError as error:
        return pack(str(error)), error


def any_of_ranks(value: bool, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> bool:
    """Return whether ``value`` is true on any rank. A collective of one number; ``group=None``: this process alone."""
    if group is None:
        return value
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def problems_of_ranks(problem: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """Return the problems of all ranks, by rank. A collective of one number if there are none.

    Args:
        problem: of this rank; ``None``: none.
        group: of the CPU; ``None``: this process alone.
    """
    if not any_of_ranks(problem is not None, group):
        return {}
    values = [problem] if group is None else all_gather_values(problem, group)
    return {rank: each for rank, each in enumerate(values) if each is not None}


def all_gather_rows(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather a vector into a tensor ``(ranks, numbers)``, faster than one tensor per rank. A collective.

    Args:
        mine: of this rank, ``(numbers,)``, the same length on each; on the device of the group's collectives.
        group: ``None``: all ranks; without a process group, this process alone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return mine.view(1, -1)
    everyone = mine.new_empty(dist.get_world_size(group) * len(mine))
    _all_gather(everyone, mine, group=group)
    return everyone.view(-1, len(mine))


@dataclass(frozen=True)
class EqualRanks:
    """Partition of ranks by equal values.

    Args:
        of_rank: by rank, the index of its value; values are numbered by their first rank.
        firsts: by index, the first rank with the value.
        lengths: by index, its bytes.
    """

    of_rank: list[int]
    firsts: list[int]
    lengths: list[int]


def equal_ranks(own: bytes, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> EqualRanks:
    """Return which ranks have equal bytes. A collective of 24 bytes from each.

    Args:
        own: bytes of this rank.
        group: ``None``: all ranks.
        device: of the group's collectives.
    """
    digest = xxhash.xxh3_128_digest(own)
    words = [int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)]
    mine = torch.tensor([*words, len(own)], dtype=torch.int64, device=device)
    return _numbered(all_gather_rows(mine, group).cpu())


def _numbered(words: Tensor) -> EqualRanks:
    known: dict[tuple[int, int, int], int] = {}
    of_rank: list[int] = []
    firsts: list[int] = []
    lengths: list[int] = []
    for rank, (high, low, length) in enumerate(words.tolist()):
        number = known.setdefault((high, low, length), len(known))
        if number == len(firsts):
            firsts.append(rank)
            lengths.append(length)
        of_rank.append(number)
    return EqualRanks(of_rank, firsts, lengths)


def gather_distinct(
    own: bytes, equal: EqualRanks, group: dist.ProcessGroup | None, every: int | None = None
) -> dict[int, bytes]:
    """Gather each distinct value once. A collective.

    Args:
        own: bytes of this rank.
        equal: partition by these bytes, see :func:`equal_ranks`.
        group: of the CPU; ``None``: all ranks.
        every: number of consecutive values per receiving rank, which is the first rank with the first of them.
            ``None``: all are sent to the first rank.

    Returns:
        The values received, by index; empty on other ranks.
    """
    rank, every = dist.get_rank(group), every or len(equal.firsts)
    number = equal.of_rank[rank]
    begin = number - number % every
    leader = equal.firsts[begin]
    if rank != leader:
        if equal.firsts[number] == rank:
            dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), _global(leader, group), group=group)
        return {}
    found = {number: own}
    for other in range(begin + 1, min(begin + every, len(equal.firsts))):
        block = torch.empty(equal.lengths[other], dtype=torch.uint8)
        dist.recv(block, _global(equal.firsts[other], group), group=group)
        found[other] = block.numpy().tobytes()
    return found


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
