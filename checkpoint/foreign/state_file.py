"""A run state in one file of ``torch.save``.

``torch.load(path)`` returns Lightning's checkpoint dict: ``state_dict``, ``optimizer_states``, ``callbacks``, ... The
same file is a run state: further zip records hold its manifest and the JSON of ``tree``, and each tensor is stored once
for both. Readers of run states use only these records and verify their hashes. Only the pickle holds objects that are
no plain values; the manifest names those that resuming needs, which are read if the user trusts the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import broadcast_value, equal_ranks, gather_distinct
from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.foreign.lightning_file import as_lightning
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.torch_file import Held, LazyTensor, TorchFileWriter, pickling_problem
from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata, extent_of, to_json
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import MANIFEST, OBJECTS, STATE, TENSORS, Manifest, objects_problem
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.read.run_state import RunState, holds_run_state
from trainwright.checkpoint.store.atomic import atomic_path
from trainwright.checkpoint.store.paths import file_system, is_remote, local_path, normal_path
from trainwright.checkpoint.store.remote_files import RemoteOutput
from trainwright.checkpoint.store.write_errors import refuse_full, write_error
from trainwright.checkpoint.write.assignment import WriteAssigner
from trainwright.checkpoint.write.objects import HYPER_PARAMETERS, SECTIONS, refuse_objects
from trainwright.checkpoint.write.save import Content, described, fail_together, sum_of, with_assignment, write
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import json_bytes


def write_file(
    content: Content, path: str, group: dist.ProcessGroup | None = None, most: float = math.inf
) -> Manifest | None:
    """Write a run state into one file and publish it; blocks until it is readable. A collective.

    The first rank writes the file. Each box that it lacks is sent by one other rank, so its host memory holds the
    tensors of all ranks, beside one rank's message.

    Args:
        content: of this rank.
        path: of the file, local or any fsspec path. An existing one is replaced once the new one is complete.
        group: a gloo group of all ranks for exclusive use; ``None``: this process alone.
        most: bytes of the tensors of all ranks, each counted once, above which a folder is written instead, see
            :func:`~trainwright.checkpoint.write.save.write`; infinite: never.

    Returns:
        The published manifest on the first rank; ``None`` on the others.

    Raises:
        CheckpointError: on every rank, if it could not be written; an existing one is untouched.
    """
    written = with_assignment(content, WriteAssigner(group))
    if math.isfinite(most) and sum_of(written, group) > most:
        return write(written, path, group)
    source = _gathered(content, written, path, group)
    with fail_together(path, group):
        return None if source is None else _write(source, content, normal_path(path))


def _gathered(content: Content, written: Content, path: str, group: dist.ProcessGroup | None) -> SnapshotReader | None:
    """Return a reader of the tensors of all ranks on the first; ``None`` on the others.

    Args:
        content: all that this rank holds.
        written: the part that no other rank sends.
        path: for messages.
        group: of all ranks.
    """
    source = SnapshotReader(Snapshot(0, content))
    if group is None:
        return source
    is_first = dist.get_rank(group) == 0
    known = {key: [offsets for offsets, _ in parts.parts] for key, parts in content.tensors.items()}
    known = broadcast_value(known if is_first else None, 0, group)
    own = b""
    with fail_together(path, group):  # the first rank would wait for one that runs out of memory
        own = pack(_lacking(written.tensors, known))
    of_ranks = gather_distinct(own, equal_ranks(own, group), group)
    # Messages are freed one by one.
    return source.joined([unpack(of_ranks.pop(number)) for number in list(of_ranks)]) if is_first else None


def _lacking(
    tensors: Mapping[str, TensorParts], known: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, TensorParts]:
    """Return the boxes that are not at ``known`` offsets."""
    parts = {
        key: [(offsets, box) for offsets, box in held.parts if offsets not in known.get(key, ())]
        for key, held in tensors.items()
    }
    return {key: TensorParts(tensors[key].shape, tensors[key].dtype, boxes) for key, boxes in parts.items() if boxes}


def _write(source: SnapshotReader, content: Content, path: str) -> Manifest:
    lazy = {
        key: LazyTensor(key, source.shape(key), source.dtype(key), partial(source.read, key))
        for key in source.keys()  # noqa: SIM118
    }
    tree, _ = as_lightning(source.tree)
    held = _held(content, lazy) if content.objects else {}
    objects = _picklable(content.objects, held)
    with _new_file(path, sum(each.nbytes for each in lazy.values())) as file, TorchFileWriter(file) as writer:
        names = writer.write(_merged(tree, objects), tuple(lazy.values()), held)
        stored = {key: _stored(each, names[key]) for key, each in lazy.items()}
        writer.add(STATE, json_bytes(content.tree, f"The state of {path}"))
        writer.add(TENSORS, to_json(stored))
        needed = sorted(objects.keys() - HYPER_PARAMETERS)
        manifest = described(Manifest(dict(writer.records), content.about | ({OBJECTS: needed} if needed else {})))
        writer.add(MANIFEST, manifest.to_bytes())
    return manifest


def _held(content: Content, lazy: Mapping[str, LazyTensor]) -> dict[int, LazyTensor | None]:
    """Return the tensors of this rank by address, so that objects share them."""
    boxes = [(key, box, parts.shape) for key, parts in content.tensors.items() for _, box in parts.parts if box.numel()]
    return {box.data_ptr(): lazy[key] if tuple(box.shape) == tuple(shape) else None for key, box, shape in boxes}


def _picklable(objects: Mapping[str, Any], held: Held) -> dict[str, Any]:
    """Return the objects that can be pickled; warn of other hyper-parameters, refuse other objects."""
    found = dict(objects)
    for key, value in objects.items():
        if key in HYPER_PARAMETERS:
            found[key] = {name: each for name, each in value.items() if not pickling_problem(each, held)}
            refuse_objects({key: {name: each for name, each in value.items() if name not in found[key]}})
        elif problem := pickling_problem(value, held):
            raise CheckpointError(
                f"{key} of the checkpoint cannot be pickled: {problem}. Let state_dict() or on_save_checkpoint() give "
                "plain values instead."
            )
    return found


def _merged(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with entries of another checkpoint dict that it lacks."""
    sections = {key: {**other[key], **tree.get(key, {})} for key in SECTIONS if key in other}
    return {**other, **tree, **sections}


def with_objects(state: RunState | SnapshotReader, trust: bool = False) -> dict[str, Any]:
    """Return the tree of a run state, with objects that hooks and callbacks have added from its pickle.

    Args:
        state: opened.
        trust: let the file run code to load objects. Off: refuse files with such objects.

    Raises:
        CheckpointError: if it holds such objects and ``trust`` is off, or they cannot be loaded.
    """
    if OBJECTS not in state.about:
        return dict(state.tree)
    if not trust:
        raise CheckpointError(f"{state.path} was not loaded: {objects_problem(state.about)}.")
    return _merged(state.tree, load_pickled(state.path, trust=True))


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
