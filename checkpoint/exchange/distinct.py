"""What ranks tell each other where most say the same: each says it in few bytes, and what is said is sent once.

``all_gather_object`` sends what each rank says to every rank, padded to the longest. Of 100,000 ranks that have nothing
to say, each reads 100,000 answers, and they are pickles: whoever reaches a socket of a rank could have it run code.
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

# torch has renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Numbers by which ranks say what they have to say: its hash (128 bits) and its length.
_WORDS = 3
_CPU = torch.device("cpu")


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None, device: torch.device = _CPU) -> list[Any]:
    """What every rank of a group says, by rank. A collective.

    Each rank sends 24 bytes to each, and then what is said, once for all who say it. Nothing more is sent where all say
    the same. Ranks that said the same share one object, which is not to be changed.

    Args:
        value: what this rank says; see :func:`~trainwright.checkpoint.exchange.plain_bytes.pack`.
        group: ``None``: all ranks.
        device: where collectives of the group run.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    own = pack(value)
    kin = kin_of(own, group, device)
    if len(kin.lengths) == 1:
        return [value] * len(kin.of_rank)
    begins = [0, *accumulate(kin.lengths)]
    block = torch.zeros(begins.pop(), dtype=torch.uint8, device=device)
    rank = dist.get_rank(group)
    mine = kin.of_rank[rank]
    if kin.firsts[mine] == rank:
        block[begins[mine] : begins[mine] + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    dist.all_reduce(block, group=group)
    octets = block.cpu().numpy()
    said = [unpack(octets[begin : begin + length].tobytes()) for begin, length in zip(begins, kin.lengths, strict=True)]
    return [said[number] for number in kin.of_rank]


def from_rank(value: Any, source: int, group: dist.ProcessGroup | None = None, device: torch.device = _CPU) -> Any:
    """What one rank of a group says, on every rank. A collective.

    Args:
        value: of that rank; others' does not count. See :func:`~trainwright.checkpoint.exchange.plain_bytes.pack`.
        source: the rank, by its place in the group.
        group: ``None``: all ranks.
        device: where collectives of the group run.

    Raises:
        UnsupportedValueError: on every rank, if the value cannot be sent.
    """
    is_source = dist.get_rank(group) == source
    data, error = _packed(value) if is_source else (b"", None)
    header = torch.tensor([len(data), error is not None], device=device)
    dist.broadcast(header, group=group, group_src=source)
    length, failed = header.tolist()
    octets = torch.empty(length, dtype=torch.uint8)
    if is_source:
        octets = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    block = octets.to(device)
    dist.broadcast(block, group=group, group_src=source)
    if is_source and error is None:
        return value
    said = unpack(block.cpu().numpy().tobytes())
    if failed:
        raise error or CheckpointError(said)
    return said


def _packed(value: Any) -> tuple[bytes, UnsupportedValueError | None]:
    try:
        return pack(value), None
    except UnsupportedValueError as error:
        return pack(str(error)), error


def any_of_ranks(value: bool, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> bool:
    """Whether it is so on any rank. A collective of one number; ``group`` is ``None`` where this process is alone."""
    if group is None:
        return value
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def problems_of_ranks(problem: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """What is wrong, by rank; empty if nothing is. A collective of one number while nothing is.

    Args:
        problem: of this rank; ``None``: none.
        group: of the CPU; ``None``: this process is alone.
    """
    if not any_of_ranks(problem is not None, group):
        return {}
    said = [problem] if group is None else of_all_ranks(problem, group)
    return {rank: each for rank, each in enumerate(said) if each is not None}


def rows_of_ranks(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The numbers of every rank, ``(ranks, numbers)``, in one tensor: as many tensors as ranks take long to make.

    A collective, where there is a process group.

    Args:
        mine: of this rank, ``(numbers,)``, as many on each; where collectives of the group run.
        group: ``None``: all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return mine.view(1, -1)
    everyone = mine.new_empty(dist.get_world_size(group) * len(mine))
    _all_gather(everyone, mine, group=group)
    return everyone.view(-1, len(mine))


@dataclass(frozen=True)
class Kin:
    """Which ranks say the same.

    Args:
        of_rank: by rank, a number that those have in common who say the same; numbered by their first ranks.
        firsts: by that number, the first rank.
        lengths: by that number, the bytes of what they say.
    """

    of_rank: list[int]
    firsts: list[int]
    lengths: list[int]


def kin_of(own: bytes, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> Kin:
    """Find out which ranks have the same bytes. A collective of 24 bytes from each.

    Args:
        own: of this rank.
        group: ``None``: all ranks.
        device: where collectives of the group run.
    """
    digest = xxhash.xxh3_128_digest(own)
    words = [int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)]
    mine = torch.tensor([*words, len(own)], dtype=torch.int64, device=device)
    return _numbered(rows_of_ranks(mine, group).cpu())


def _numbered(words: Tensor) -> Kin:
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
    return Kin(of_rank, firsts, lengths)


def to_first(own: bytes, kin: Kin, group: dist.ProcessGroup | None, every: int | None = None) -> dict[int, bytes]:
    """Bring what is said to the first rank, once for all who say it. A collective.

    Args:
        own: bytes of this rank.
        kin: of these bytes, see :func:`kin_of`.
        group: of the CPU; ``None``: all ranks.
        every: how many that say something else have a rank for themselves to which it is brought: the first of those
            who say what comes first among it. ``None``: all are brought to the first rank.

    Returns:
        What was brought to this rank, by its number; empty on ranks to which nothing is.
    """
    rank, every = dist.get_rank(group), every or len(kin.firsts)
    number = kin.of_rank[rank]
    begin = number - number % every
    leader = kin.firsts[begin]
    if rank != leader:
        if kin.firsts[number] == rank:
            dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), _global(leader, group), group=group)
        return {}
    found = {number: own}
    for other in range(begin + 1, min(begin + every, len(kin.firsts))):
        block = torch.empty(kin.lengths[other], dtype=torch.uint8)
        dist.recv(block, _global(kin.firsts[other], group), group=group)
        found[other] = block.numpy().tobytes()
    return found


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
