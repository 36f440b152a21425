"""Consistency of a checkpoint's metadata files, which hashes do not show. Imports neither torch nor Lightning, and
reads no tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata, plain_from_json, problem_of_boxes
from trainwright.checkpoint.format.directory import Directory, box_of_rank, boxes_from_json
from trainwright.checkpoint.format.manifest import Manifest, read_whole, records_of
from trainwright.checkpoint.format.records import STATE, TENSORS, WHOLE, file_of
from trainwright.checkpoint.store.paths import join_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import ContentError, interpreting, parse_json

_BOXES = re.compile(r"boxes_\d+\.json")


def problems_of_contents(path: str, manifest: Manifest) -> list[str]:
    """Check the metadata files of a checkpoint against each other.

    Args:
        path: of the checkpoint, whose files match the manifest.
        manifest: of it.

    Returns:
        One text per problem: boxes that overlap, are missing or have no file; a state that refers to a missing tensor;
        or a malformed file.
    """
    folder = Folder(path, manifest)
    try:
        tensors = plain_tensors(folder, manifest)
        files = {record.name for record in records_of(path, manifest)}
        problems = []
        with interpreting(join_path(folder.path, TENSORS)):
            for key, tensor in tensors.items():
                problem = problem_of_boxes(tensor.shape, tensor.boxes, files)
                problems += [f"{TENSORS}: {key} of shape {tensor.shape} {problem}"] if problem else []
        with interpreting(join_path(folder.path, STATE)):
            state = parse_json(read_whole(folder, manifest.files[STATE]))
            if not isinstance(state, dict):
                raise ContentError("it is not a mapping")
            unknown = sorted({key for key in references(state) if key not in tensors})
        return problems + [f"{STATE}: refers to the tensor {key!r}, which {TENSORS} does not list" for key in unknown]
    except CheckpointError as error:
        return [str(error)]


def plain_tensors(folder: Folder, manifest: Manifest) -> dict[str, StoredMetadata]:
    """Return shape, dtype and boxes of every tensor, by key.

    Raises:
        CheckpointError: if a metadata file is malformed.
    """
    if TENSORS not in manifest.files:
        raise CheckpointError(f"{folder.path} has no {TENSORS}, which lists its tensors.")
    data = read_whole(folder, manifest.files[TENSORS])
    with interpreting(join_path(folder.path, TENSORS)):
        if manifest.version == WHOLE:
            return plain_from_json(data)
        directory = Directory.from_bytes(data, len(records_of(folder.path, manifest)))
    boxes = _all_boxes(folder, manifest, directory.keys())
    return {key: _metadata(directory, key, boxes.get(key, ())) for key in directory.keys()}  # noqa: SIM118 - no mapping


def _metadata(directory: Directory, key: str, boxes: Collection[StoredBox]) -> StoredMetadata:
    entry = directory.find(key)
    assert entry is not None
    own = box_of_rank(key, entry.shape)
    return StoredMetadata(entry.shape, entry.dtype, tuple(boxes) if own is None else (own,))


def _all_boxes(folder: Folder, manifest: Manifest, keys: Collection[str]) -> dict[str, set[StoredBox]]:
    """Return the boxes of every tensor; boxes that many ranks hold occur in many files."""
    found: dict[str, set[StoredBox]] = {}
    for name in sorted(filter(_BOXES.fullmatch, manifest.files)):
        data = read_whole(folder, manifest.files[name])
        with interpreting(join_path(folder.path, name)):
            for key, boxes in boxes_from_json(data).items():
                if key not in keys:
                    raise ContentError(f"it lists {key!r}, which {TENSORS} does not")
                found.setdefault(key, set()).update(StoredBox(o, s, file_of(rank), "") for o, s, rank in boxes)
    return found


def references(state: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of tensors that a state refers to."""
    values: list[Any] = [state]
    while values:
        value = values.pop()
        if isinstance(value, dict) and value.get("~") == "tensor":
            yield str(value.get("key"))
        elif isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)
