"""What ranks tell of the files that they wrote, and who writes it down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.format.records import FileRecord, Listed, file_of, list_to_bytes
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.write.dealing import Deal
from trainwright.checkpoint.write.split import Split
from trainwright.checkpoint.write.writing import led_boxes

# Numbers by which a rank tells of a file: whether there is one, its size, its hash; and what it lists, if it is a list.
_NUMBERS = 6


def records_of_ranks(
    record: FileRecord | None, pending: PendingFolder, group: dist.ProcessGroup | None
) -> list[FileRecord]:
    """The records of the files of all ranks, on the first; 48 bytes from each. A collective.

    Args:
        record: of the file of this rank; ``None``: it wrote none.
        pending: the folder.
        group: of all ranks; ``None``: this process alone.
    """
    if group is None:
        return [] if record is None else [record]
    own = _told(record)
    is_first = dist.get_rank(group) == 0
    everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))] if is_first else None
    dist.gather(own, everyone, dst=dist.get_global_rank(group, 0), group=group)
    found = [_heard(numbers, file_of(rank), rank, pending) for rank, numbers in enumerate(everyone or ())]
    return [record for record, _ in filter(None, found)]


def write_divided(
    pending: PendingFolder, deal: Deal, split: Split, record: FileRecord | None, group: dist.ProcessGroup
) -> tuple[dict[str, FileRecord], dict[str, Listed]]:
    """Let the ranks that ``split`` says write lists of files and files of boxes. A collective, which nobody leaves
    early: what a rank raises, it raises when it has told the others.

    Args:
        pending: the folder.
        deal: who has written what.
        split: how that is divided.
        record: of the file of this rank; ``None``: it wrote none.
        group: of all ranks.

    Returns:
        The records of these files by name, and what the lists among them tell of; both on the first rank alone.

    Raises:
        CheckpointError: on a rank that could not write; files are missing in what is returned on the first then.
    """
    rank = dist.get_rank(group)
    lists, boxes = split.lists, split.boxes
    own: list[tuple[str, FileRecord, Listed | None]] = []
    problem: BaseException | None = None
    records = _records_of_list(record, pending, split, group)
    try:
        for name in (name for name, leader in lists if leader == rank):
            pending.check_present(records)
            listed = Listed(len(records), sum(each.size for each in records))
            own.append((name, pending.write_file(name, list_to_bytes(records), rank), listed))
        for name in (name for name, leader in boxes if leader == rank):
            if name not in deal.composed:
                deal.composed[name] = led_boxes(deal)
            own.append((name, pending.write_file(name, deal.composed[name], rank), None))
    except BaseException as error:  # the first rank waits for this one
        problem = error
    found = _at_first(own, [*lists, *boxes], pending, group)
    if problem is not None:
        raise problem
    files = {name: each for name, (each, _) in found.items()}
    return files, {name: found[name][1] for name, _ in lists if name in found}


def _records_of_list(
    record: FileRecord | None, pending: PendingFolder, split: Split, group: dist.ProcessGroup
) -> list[FileRecord]:
    """The records of the files of one list, on the rank that writes it."""
    rank, own = dist.get_rank(group), _told(record)
    ranks = split.list_of(rank)
    if rank != ranks[0]:
        dist.send(own, dist.get_global_rank(group, ranks[0]), group=group)
        return []
    told = [own, *(_received(other, group) for other in ranks[1:])]
    found = [_heard(numbers, file_of(other), other, pending) for other, numbers in zip(ranks, told, strict=True)]
    return [record for record, _ in filter(None, found)]


def _at_first(
    own: Sequence[tuple[str, FileRecord, Listed | None]],
    expected: Sequence[tuple[str, int]],
    pending: PendingFolder,
    group: dist.ProcessGroup,
) -> dict[str, tuple[FileRecord, Listed]]:
    """What the ranks that wrote files for all tell of them, by name, on the first rank."""
    rank = dist.get_rank(group)
    mine = {name: _told(record, listed) for name, record, listed in own}
    found = {}
    for name, leader in expected:
        numbers = mine.get(name, _told(None))
        if rank not in (0, leader):
            continue
        if rank != 0:
            dist.send(numbers, dist.get_global_rank(group, 0), group=group)
            continue
        heard = _heard(numbers if leader == 0 else _received(leader, group), name, leader, pending)
        if heard is not None:
            found[name] = heard
    return found


def _received(rank: int, group: dist.ProcessGroup) -> Tensor:
    numbers = torch.zeros(_NUMBERS, dtype=torch.int64)
    dist.recv(numbers, dist.get_global_rank(group, rank), group=group)
    return numbers


def _told(record: FileRecord | None, listed: Listed | None = None) -> Tensor:
    if record is None:
        return torch.zeros(_NUMBERS, dtype=torch.int64)
    octets = bytes.fromhex(record.hash)
    halves = [int.from_bytes(half, "big", signed=True) for half in (octets[:8], octets[8:])]
    return torch.tensor([1, record.size, *halves, *(listed or (0, 0))], dtype=torch.int64)


def _heard(numbers: Tensor, name: str, rank: int, pending: PendingFolder) -> tuple[FileRecord, Listed] | None:
    is_there, size, *halves, files, num_bytes = numbers.tolist()
    if not is_there:
        return None
    digest = b"".join(half.to_bytes(8, "big", signed=True) for half in halves).hex()
    return FileRecord(name, size, digest, rank, pending.stored_name(name)), Listed(files, num_bytes)
