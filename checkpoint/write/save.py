"""Writing of a run state by all ranks together, atomically."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import broadcast_value, problems_of_ranks
from trainwright.checkpoint.format.boxes import problem_of_boxes, to_json
from trainwright.checkpoint.format.contents import references
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import (
    SPLIT,
    STATE,
    TENSORS,
    WHOLE,
    FileRecord,
    Listed,
    Manifest,
    file_of,
    list_to_bytes,
)
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileWriter
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.store.write_errors import refuse_full
from trainwright.checkpoint.write.assignment import Assignment, WriteAssigner
from trainwright.checkpoint.write.box_index import directory_of, led_box_file, name_of, stored_by
from trainwright.checkpoint.write.objects import refuse_objects
from trainwright.checkpoint.write.split import MetadataSplit
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import json_bytes

# Numbers that describe a file: whether it exists, size, hash (2); for lists, number and bytes of listed files.
_NUMBERS = 6


@dataclass
class Content:
    """One rank's part of a checkpoint.

    Args:
        tree: everything that is not a tensor, as JSON (see ``tree``); the first rank's is written.
        tensors: boxes of tensors on this rank, by key. Ranks may hold the same box; one writes it.
        about: description for the manifest, as JSON; the first rank's is written.
        assignment: of boxes to ranks, if ``tensors`` are already what this rank writes; ``None``: not assigned yet.
        objects: entries of Lightning's checkpoint dict that ``tree`` lacks, since parts of them have no form as JSON;
            of ``objects.SECTIONS``, only those items. One file pickles those of the first rank.
    """

    tree: Any
    tensors: dict[str, TensorParts]
    about: dict[str, Any] = field(default_factory=dict)
    assignment: Assignment | None = None
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors on this rank."""
        return sum(parts.num_bytes for parts in self.tensors.values())


def with_assignment(content: Content, assigner: WriteAssigner) -> Content:
    """Return the part of ``content`` that this rank writes. A collective."""
    return replace(content, tensors=assigner.assign(content.tensors), assignment=assigner.last)


def write(content: Content, path: str, group: dist.ProcessGroup | None = None) -> Manifest | None:
    """Write and publish a checkpoint; blocks until it is readable. A collective.

    Traffic per rank does not grow with the number of ranks: the record of its file and whether it failed. With many
    ranks, several write metadata, see ``split``; only the first rank publishes. Boxes are assigned to ranks by
    :mod:`trainwright.checkpoint.write.assignment` at every call, unless ``content`` already is.

    Args:
        content: of this rank; it must not change meanwhile.
        path: folder of the checkpoint, local or any fsspec path. An existing one is replaced once the new one is
            complete.
        group: a gloo group of all ranks for exclusive use; ``None``: this process alone.

    Returns:
        The published manifest on the first rank; ``None`` on the others.

    Raises:
        CheckpointError: on every rank, if one of them failed; an existing checkpoint is untouched then.
    """
    rank = 0 if group is None else dist.get_rank(group)
    content = content if content.assignment is not None else with_assignment(content, WriteAssigner(group))
    pending = _create_pending(content, path, rank, group)
    try:
        return _write_together(pending, content, path, rank, group)
    except BaseException as error:
        if rank == 0 or not isinstance(error, CheckpointError):
            pending.discard()
        raise


def _write_together(
    pending: PendingFolder, content: Content, path: str, rank: int, group: dist.ProcessGroup | None
) -> Manifest | None:
    record = None
    lists: dict[str, Listed] = {}
    with fail_together(path, group):
        record = write_parts(pending, rank, content.tensors) if content.tensors else None
    assert content.assignment is not None
    split = content.assignment.split
    ranks = range(1 if group is None else dist.get_world_size(group)) if split is None else split.list_of(rank)
    records = _records_of(ranks, record, pending, group)
    files = {each.name: each for each in records}
    if split is not None:
        assert group is not None
        with fail_together(path, group):
            files, lists = write_divided(pending, content.assignment, split, records, group)
    with fail_together(path, group):
        return _publish(pending, content, files, lists) if rank == 0 else None


def write_parts(pending: PendingFolder, rank: int, tensors: Mapping[str, TensorParts]) -> FileRecord:
    """Write boxes into this rank's file, one tensor at a time.

    Args:
        pending: the unpublished folder.
        rank: this rank.
        tensors: the boxes, by key; at least one.

    Raises:
        CheckpointError: if writing fails.
    """
    boxes = [(held, offsets, box.shape, key) for key, held in tensors.items() for offsets, box in held.parts]
    # Widest dtypes first, so that every tensor is aligned to its element size.
    boxes.sort(key=lambda box: -box[0].dtype.itemsize)
    names = [name_of(key, offsets, sizes, held.shape) for held, offsets, sizes, key in boxes]
    entries = [
        TensorEntry(name, held.dtype, tuple(sizes)) for name, (held, _, sizes, _) in zip(names, boxes, strict=True)
    ]
    with pending.create_file(file_of(rank), rank) as file:
        writer = TensorFileWriter(file, entries)
        for name, (held, offsets, _, _) in zip(names, boxes, strict=True):
            writer.write(name, held.part_at(offsets).detach())  # reads lazy tensors of imports one at a time
        writer.close()
        return file.close()


def _create_pending(content: Content, path: str, rank: int, group: dist.ProcessGroup | None) -> PendingFolder:
    """Create the folder on the first rank, if there is room, and join it on the others, whatever their ``path``."""
    pending, needed = None, sum_of(content, group)
    with fail_together(path, group):
        if rank == 0:
            refuse_objects(content.objects)
            pending = PendingFolder.create(path)
            with pending:  # discarded on an error
                refuse_full(path, needed)
    token = pending.token if pending is not None else ""
    path, token = (path, token) if group is None else broadcast_value((path, token), 0, group)
    return pending if pending is not None else PendingFolder.join(path, token)


def sum_of(content: Content, group: dist.ProcessGroup | None) -> int:
    """Return the bytes of the tensors of all ranks."""
    own = 0
    with suppress(Exception):  # writing will fail and report it; the others must not wait here
        own = content.num_bytes
    total = torch.tensor(own, dtype=torch.int64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return int(total)


def _publish(
    pending: PendingFolder, content: Content, files: dict[str, FileRecord], lists: dict[str, Listed]
) -> Manifest:
    assignment = content.assignment
    assert assignment is not None
    if assignment.split is None:
        stored = stored_by(assignment)
        for key, tensor in stored.items():
            problem = problem_of_boxes(tensor.shape, tensor.boxes, files)
            if problem is not None:
                raise CheckpointError(f"{key} of shape {tensor.shape}, as sharded over the ranks, {problem}.")
        if absent := sorted(set(references(content.tree)) - stored.keys()):
            raise CheckpointError(f"The state refers to the tensor {absent[0]!r}, which no rank holds.")
        tensors = to_json(stored)
    else:
        if TENSORS not in assignment.composed:
            assignment.composed[TENSORS] = directory_of(assignment).to_bytes()
        tensors = assignment.composed[TENSORS]
    state = json_bytes(content.tree, "The state")
    written = [pending.write_file(STATE, state, rank=0), pending.write_file(TENSORS, tensors, rank=0)]
    version, token = (WHOLE, "") if assignment.split is None else (SPLIT, pending.token_in_names)
    files = {**files, **{record.name: record for record in written}}
    manifest = described(Manifest(files, content.about, version, lists, token))
    pending.publish(manifest)
    return manifest


def described(manifest: Manifest) -> Manifest:
    """Return a manifest that also has the size of the checkpoint and the present time."""
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    return replace(manifest, about={**manifest.about, "bytes": manifest.num_bytes, "created": created})


@contextmanager
def fail_together(path: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise on every rank if the context raises on one, with the messages of all that failed. A collective."""
    problem: BaseException | None = None
    try:
        yield
    except BaseException as error:
        problem = error
    own = None if problem is None else (str(problem) or type(problem).__name__, isinstance(problem, CheckpointError))
    found = problems_of_ranks(own, group)
    if problem is not None and not isinstance(problem, Exception):
        raise problem
    if not found:
        return
    texts = {rank: text for rank, (text, _) in found.items()}
    if len(set(texts.values())) == 1 and all(is_plain for _, is_plain in found.values()):
        raise CheckpointError(f"{next(iter(texts.values()))} (rank {', '.join(map(str, texts))})") from problem
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    raise CheckpointError(f"The checkpoint {path} was not written; an existing one is untouched. {causes}") from problem


def _records_of(
    ranks: range, record: FileRecord | None, pending: PendingFolder, group: dist.ProcessGroup | None
) -> list[FileRecord]:
    """Return the file records of some ranks on the first of them; 48 bytes from each. A collective of these.

    Args:
        ranks: this one and others, in order.
        record: of this rank's file; ``None``: it wrote none.
        pending: the folder.
        group: of all ranks; ``None``: this process alone.
    """
    if group is None:
        return [] if record is None else [record]
    own = _to_numbers(record)
    if dist.get_rank(group) != ranks[0]:
        dist.send(own, dist.get_global_rank(group, ranks[0]), group=group)
        return []
    received = [own, *(_received(other, group) for other in ranks[1:])]
    pairs = zip(ranks, received, strict=True)
    found = [_record_from(numbers, file_of(other), other, pending) for other, numbers in pairs]
    return [record for record, _ in filter(None, found)]


def write_divided(
    pending: PendingFolder,
    assignment: Assignment,
    split: MetadataSplit,
    records: Sequence[FileRecord],
    group: dist.ProcessGroup,
) -> tuple[dict[str, FileRecord], dict[str, Listed]]:
    """Write lists of files and box files on the ranks that ``split`` assigns. A collective, to the end even on errors.

    Args:
        pending: the folder.
        assignment: assignment of boxes to ranks.
        split: division of metadata among ranks.
        records: of the files of the list that this rank writes.
        group: of all ranks.

    Returns:
        Records of these files and summaries of the lists, by name; on the first rank only.

    Raises:
        CheckpointError: on a rank that could not write; the first rank's result then lacks files.
    """
    rank = dist.get_rank(group)
    lists, boxes = split.lists, split.boxes
    own: dict[str, Tensor] = {}
    problem: BaseException | None = None
    try:
        for name in (name for name, leader in lists if leader == rank):
            pending.check_present(records)
            listed = Listed(len(records), sum(each.size for each in records))
            own[name] = _to_numbers(pending.write_file(name, list_to_bytes(records), rank), listed)
        for name in (name for name, leader in boxes if leader == rank):
            if name not in assignment.composed:
                assignment.composed[name] = led_box_file(assignment)
            own[name] = _to_numbers(pending.write_file(name, assignment.composed[name], rank))
    except BaseException as error:  # the first rank waits for this one
        problem = error
    found = _gather_records(own, [*lists, *boxes], pending, group)
    if problem is not None:
        raise problem
    files = {name: each for name, (each, _) in found.items()}
    return files, {name: found[name][1] for name, _ in lists if name in found}


def _gather_records(
    own: Mapping[str, Tensor], expected: Sequence[tuple[str, int]], pending: PendingFolder, group: dist.ProcessGroup
) -> dict[str, tuple[FileRecord, Listed]]:
    """Return the records of the metadata files of all ranks, by name, on the first rank."""
    rank = dist.get_rank(group)
    found = {}
    for name, leader in expected:
        numbers = own.get(name, _to_numbers(None))
        if rank not in (0, leader):
            continue
        if rank != 0:
            dist.send(numbers, dist.get_global_rank(group, 0), group=group)
            continue
        heard = _record_from(numbers if leader == 0 else _received(leader, group), name, leader, pending)
        if heard is not None:
            found[name] = heard
    return found


def _received(rank: int, group: dist.ProcessGroup) -> Tensor:
    numbers = torch.zeros(_NUMBERS, dtype=torch.int64)
    dist.recv(numbers, dist.get_global_rank(group, rank), group=group)
    return numbers


def _to_numbers(record: FileRecord | None, listed: Listed | None = None) -> Tensor:
    if record is None:
        return torch.zeros(_NUMBERS, dtype=torch.int64)
    octets = bytes.fromhex(record.hash)
    halves = [int.from_bytes(half, "big", signed=True) for half in (octets[:8], octets[8:])]
    return torch.tensor([1, record.size, *halves, *(listed or (0, 0))], dtype=torch.int64)


def _record_from(numbers: Tensor, name: str, rank: int, pending: PendingFolder) -> tuple[FileRecord, Listed] | None:
    is_there, size, *halves, files, num_bytes = numbers.tolist()
    if not is_there:
        return None
    digest = b"".join(half.to_bytes(8, "big", signed=True) for half in halves).hex()
    return FileRecord(name, size, digest, rank, pending.stored_name(name)), Listed(files, num_bytes)
