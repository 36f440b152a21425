"""A run state in one file of ``torch.save``.

``torch.load(path)`` returns Lightning's checkpoint dict: ``state_dict``, ``optimizer_states``, ``callbacks``, ... The
same file is a run state: further zip records hold its manifest and the JSON of ``tree``, and each tensor is stored once
for both. Readers of run states use only these records, never the pickle, and verify their hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import broadcast_value, equal_ranks, gather_distinct
from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.foreign.lightning_file import as_lightning
from trainwright.checkpoint.foreign.torch_file import LazyTensor, TorchFileWriter
from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata, extent_of, to_json
from trainwright.checkpoint.format.records import MANIFEST, STATE, TENSORS, Manifest
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.read.run_state import holds_run_state
from trainwright.checkpoint.store.atomic import atomic_path
from trainwright.checkpoint.store.paths import file_system, is_remote, local_path, normal_path
from trainwright.checkpoint.store.remote_files import RemoteOutput
from trainwright.checkpoint.store.write_errors import refuse_full, write_error
from trainwright.checkpoint.write.save import Content, described, fail_together
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import json_bytes


def write_file(content: Content, path: str, group: dist.ProcessGroup | None = None) -> Manifest | None:
    """Write a run state into one file and publish it; blocks until it is readable. A collective.

    The first rank writes the file. It holds everything but rank-local tensors, which the others send.

    Args:
        content: of this rank.
        path: of the file, local or any fsspec path. An existing one is replaced once the new one is complete.
        group: a gloo group of all ranks for exclusive use; ``None``: this process alone.

    Returns:
        The published manifest on the first rank; ``None`` on the others.

    Raises:
        CheckpointError: on every rank, if it could not be written; an existing one is untouched.
    """
    source = _gathered(content, group)
    with fail_together(path, group):
        return None if source is None else _write(source, content, normal_path(path))


def _gathered(content: Content, group: dist.ProcessGroup | None) -> SnapshotReader | None:
    """Return a reader of the tensors of all ranks on the first; ``None`` on the others."""
    source = SnapshotReader(Snapshot(0, content))
    if group is None:
        return source
    is_first = dist.get_rank(group) == 0
    known = broadcast_value(set(content.tensors) if is_first else None, 0, group)
    own = pack({key: parts for key, parts in content.tensors.items() if key not in known})
    equal = equal_ranks(own, group)
    of_ranks = gather_distinct(own, equal, group)
    return source.joined([unpack(of_ranks[number]) for number in equal.of_rank]) if is_first else None


def _write(source: SnapshotReader, content: Content, path: str) -> Manifest:
    lazy = {
        key: LazyTensor(key, source.shape(key), source.dtype(key), partial(source.read, key))
        for key in source.keys()  # noqa: SIM118
    }
    tree, _ = as_lightning(source.tree)
    with _new_file(path, sum(each.nbytes for each in lazy.values())) as file, TorchFileWriter(file) as writer:
        names = writer.write(tree, tuple(lazy.values()))
        stored = {key: _stored(each, names[key]) for key, each in lazy.items()}
        writer.add(STATE, json_bytes(content.tree, f"The state of {path}"))
        writer.add(TENSORS, to_json(stored))
        manifest = described(Manifest(dict(writer.records), content.about))
        writer.add(MANIFEST, manifest.to_bytes())
    return manifest


def _stored(tensor: LazyTensor, record: str) -> StoredMetadata:
    box = StoredBox(*extent_of(tensor.shape), record, tensor.key)
    return StoredMetadata(tensor.shape, str(tensor.dtype).removeprefix("torch."), (box,))


@contextmanager
def _new_file(path: str, needed: int) -> Iterator[BinaryIO]:
    """Yield a file that is published atomically at the end."""
    if not is_remote(path):
        target = Path(local_path(path))
        refuse_full(str(target), needed)
        replaces = holds_run_state(path)  # may be a folder
        with atomic_path(target, overwrite=True, may_replace=lambda _: replaces) as pending, pending.open("wb") as file:
            yield file
        return
    store, name = file_system(path)
    try:
        store.makedirs(store._parent(name), exist_ok=True)
        output = RemoteOutput(store, name)
        try:
            yield cast(BinaryIO, output)
            output.seal()
        finally:
            output.abort()
    except CheckpointError:
        raise
    except Exception as error:
        raise write_error(error, path, needed) from error
