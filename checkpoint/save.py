"""Writing a run state: all ranks together, whole or not at all."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from trainwright.checkpoint.dcp import TENSORS, PartsSavePlanner, RunStateWriter, StoredMetadata, to_json
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import FileRecord, Manifest
from trainwright.checkpoint.parts import TensorParts
from trainwright.checkpoint.storage import PendingFolder, free_bytes
from trainwright.checkpoint.write_errors import size_text

STATE = "state.json"

# One process needs no group, and DCP says so at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

T = TypeVar("T")


@dataclass
class Content:
    """What one rank contributes to a checkpoint.

    Args:
        tree: everything that is not a tensor, as JSON (see :mod:`trainwright.checkpoint.tree`); that of the first rank
            is written.
        tensors: the boxes of tensors that this rank holds, by key. Ranks may hold the same box; one writes it.
        about: what the manifest says of the checkpoint, as JSON; that of the first rank is written.
    """

    tree: Any
    tensors: dict[str, TensorParts]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this rank holds."""
        return sum(parts.num_bytes for parts in self.tensors.values())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Content:
        """The same content with every tensor exchanged for what ``function`` makes of it, of the same shape."""
        return replace(self, tensors={key: parts.map(function) for key, parts in self.tensors.items()})


def write(content: Content, path: str, group: dist.ProcessGroup | None = None) -> Manifest:
    """Write a checkpoint and publish it; it blocks until it can be read. A collective.

    Args:
        content: what this rank holds; it must not change meanwhile.
        path: folder of the checkpoint, local or any fsspec path. What is there is replaced once the new one is whole.
        group: a gloo group of all ranks that nothing else uses meanwhile; ``None``: this process alone.

    Returns:
        What was published, on every rank.

    Raises:
        CheckpointError: on every rank, if one of them failed; nothing new is there then, and what was there is whole.
    """
    rank = 0 if group is None else dist.get_rank(group)
    pending = _meet(path, rank, group)
    published: list[Manifest] = []

    def publish(records: list[FileRecord], stored: Mapping[str, StoredMetadata]) -> None:
        published.append(_publish(pending, content, records, stored))

    writer = RunStateWriter(pending, rank, publish, lambda needed: _refuse_full(path, needed))
    try:
        dcp.save(
            content.tensors,
            storage_writer=writer,
            planner=PartsSavePlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        if rank == 0:
            pending.discard()
        raise _plain(error, path) from error
    except BaseException:
        pending.discard()
        raise
    return _told(published[0] if published else None, group)


def _meet(path: str, rank: int, group: dist.ProcessGroup | None) -> PendingFolder:
    """Let the first rank make the folder and tell the others."""
    pending, answer = None, ""
    if rank == 0:
        try:
            pending = PendingFolder.create(path)
            answer = f"token {pending.token}"
        except Exception as error:
            answer = f"error {error}"
            if group is None:
                raise
    kind, _, text = _told(answer, group).partition(" ")
    if kind == "error":
        raise CheckpointError(text)
    return pending if pending is not None else PendingFolder.join(path, text)


def _told(value: T | None, group: dist.ProcessGroup | None) -> T:
    """What the first rank of the group says."""
    if group is None:
        assert value is not None
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    assert values[0] is not None
    return values[0]


def _publish(
    pending: PendingFolder, content: Content, records: list[FileRecord], stored: Mapping[str, StoredMetadata]
) -> Manifest:
    state = json.dumps(content.tree, allow_nan=False, separators=(",", ":")).encode()
    files = [*records, pending.write_file(STATE, state, rank=0), pending.write_file(TENSORS, to_json(stored), rank=0)]
    about = {
        **content.about,
        "bytes": sum(record.size for record in files),
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    manifest = Manifest(files={record.name: record for record in files}, about=about)
    pending.publish(manifest)
    return manifest


def _refuse_full(path: str, needed: int) -> None:
    free = free_bytes(path)
    if free is not None and free < needed:
        raise CheckpointError(
            f"{path}: a checkpoint of {size_text(needed)} does not fit into the {size_text(free)} that are free there. "
            "Nothing was written. Free space, or choose a folder on another disk (checkpoint.*.dirpath=...)."
        )


def _plain(error: CheckpointException, path: str) -> CheckpointError:
    """DCP's error, which is no ``Exception``, in the words of the ranks that failed."""
    texts = {rank: str(cause) or type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    if len(set(texts.values())) == 1 and all(isinstance(c, CheckpointError) for c, _ in error.failures.values()):
        ranks = ", ".join(map(str, texts))
        return CheckpointError(f"{next(iter(texts.values()))} (rank {ranks})")
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return CheckpointError(f"The checkpoint {path} was not written; what was there before is untouched. {causes}")
