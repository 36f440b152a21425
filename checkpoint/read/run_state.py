"""A published checkpoint, opened for reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata, common, extent_of
from trainwright.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, verify
from trainwright.checkpoint.format.parts import TensorParts, copy_common
from trainwright.checkpoint.format.records import STATE, TENSOR_FILE, TENSORS
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileReader
from trainwright.checkpoint.format.tensor_index import TensorIndex, tensor_index
from trainwright.checkpoint.format.tree import check_sections, decode
from trainwright.checkpoint.store.paths import join_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.text.bounded import interpreting, parse_json


def holds_run_state(path: str) -> bool:
    """Return whether a checkpoint of this package is published at ``path``."""
    if path.startswith(("http://", "https://")):
        return False  # HTTP servers do not list folders
    folder = Folder(path)
    return folder.exists() and folder.has(MANIFEST)


class StoredTensor:
    """A tensor that is read on demand.

    Args:
        source: that holds it.
        key: its name there.
    """

    def __init__(self, source: TensorSource, key: str) -> None:
        self.source = source
        self.key = key

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.source.shape(self.key))

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.source.dtype(self.key)

    def whole(self) -> Tensor:
        """Read the tensor to the CPU."""
        return self.source.read(self.key)

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def materialised(tree: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every :class:`StoredTensor` read."""
    return map_tree(tree, StoredTensor, StoredTensor.whole)


def map_tree(tree: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with ``change`` applied to every value of a kind, in order."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        copy = tree.copy()  # the same class
        copy.update((key, map_tree(value, kind, change)) for key, value in tree.items())
        return copy
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(value, kind, change) for value in tree)
    return tree


class RunState:
    """A checkpoint with a valid manifest; a :class:`~trainwright.checkpoint.format.source.TensorSource`.

    Args:
        path: its folder, or its file.
        manifest: of it.
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._folder = Folder(path, manifest)
        self._readers: dict[tuple[int, str], TensorFileReader] = {}

    @classmethod
    def open(cls, path: str) -> RunState:
        """Open the checkpoint at ``path`` after verifying the contents of all its files.

        Args:
            path: its folder or file, local or any fsspec path.

        Raises:
            CheckpointError: if it is missing, incomplete, or written by a newer version.
            DamagedCheckpoint: if a file does not match the manifest.
        """
        manifest = read_manifest(path)
        problems = verify(path, manifest)
        if problems:
            raise DamagedCheckpoint(path, problems)
        return cls(path, manifest)

    @property
    def about(self) -> Mapping[str, Any]:
        """Description in the manifest: step, epoch, layout, versions, metrics, ..."""
        return self.manifest.about

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Everything that is not a tensor; tensors are :class:`StoredTensor`."""
        with interpreting(self._place(STATE)):
            tree: dict[str, Any] = decode(self.plain_tree, self._tensor)
            check_sections(tree)
        return tree

    @property
    def plain_tree(self) -> Any:
        """The tree as JSON, with keys instead of tensors."""
        with interpreting(self._place(STATE)):
            return parse_json(self._folder.read(STATE))

    def _tensor(self, key: str) -> StoredTensor:
        if key not in self.keys():
            raise CheckpointError(f"{self._place(STATE)} refers to the tensor {key!r}, which {TENSORS} does not list.")
        return StoredTensor(self, key)

    def _place(self, name: str) -> str:
        return join_path(self.path, name)

    @property
    def stored(self) -> dict[str, StoredMetadata]:
        """Locations of the boxes of every tensor; reads all metadata."""
        return {key: self._tensors.boxes(key) for key in self.keys()}

    @cached_property
    def _tensors(self) -> TensorIndex:
        return tensor_index(self._folder, self.manifest)

    # ---- tensors --------------------------------------------------------------------------------------------------

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def keys_under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``."""
        return self._tensors.keys_under(prefix)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self._tensors.shape(key)

    def dtype(self, key: str) -> torch.dtype:
        """Return its dtype."""
        return self._tensors.dtype(key)

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Read a box of a tensor, see :class:`~trainwright.checkpoint.format.source.TensorSource`."""
        offsets, sizes = extent_of(self.shape(key), offsets, sizes)
        stored = self._tensors.boxes(key, [(offsets, sizes)])
        if len(stored.boxes) == 1 and stored.boxes[0].sizes == stored.shape:  # one box: no second copy
            return self._read_box(stored.boxes[0], self.dtype(key), offsets, sizes)
        target = torch.empty(sizes, dtype=self.dtype(key))
        self.fill({key: TensorParts(stored.shape, target.dtype, [(offsets, target)])})
        return target

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, TensorParts]) -> None:
        """Read into the boxes that this rank holds, whatever layout wrote them. No collective.

        Args:
            tensors: boxes by key; their tensors are written in place, converted to their dtype and device.

        Raises:
            CheckpointError: if a tensor is missing or has another shape.
        """
        keys = self.keys()
        wanted = []
        for key, parts in tensors.items():
            found = self.shape(key) if key in keys else "nothing"
            if found != parts.shape:
                raise CheckpointError(f"{self.path}: {key} of shape {parts.shape} was requested, but it holds {found}.")
            regions = [(offsets, target.shape) for offsets, target in parts.parts]
            for box, part in product(self._tensors.boxes(key, regions).boxes, parts.parts):
                begin, sizes = common((part[0], part[1].shape), box.extent)
                if 0 not in sizes:
                    wanted.append((box, self.dtype(key), begin, sizes, part))
        with interpreting(self.path, problem="cannot be read"):
            for box, dtype, begin, sizes, part in sorted(wanted, key=lambda each: (each[0].file, each[0].name)):
                inside = [first - offset for first, offset in zip(begin, box.offsets, strict=True)]
                copy_common(part, (begin, self._read_box(box, dtype, inside, sizes)))

    def _read_box(self, box: StoredBox, dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        expected = TensorEntry(box.name, dtype, box.sizes)
        if not box.file.endswith(TENSOR_FILE):  # one tensor per file: closed, since there may be too many to keep open
            with TensorFileReader(partial(self._folder.open, box.file), expected) as reader:
                return reader.read(box.name, offsets, sizes)
        # One reader per thread: a file has one position.
        place = (threading.get_ident(), box.file)
        if place not in self._readers:
            self._readers[place] = TensorFileReader(partial(self._folder.open, box.file))
        found = self._readers[place].entries.get(box.name)
        if found != expected:
            raise CheckpointError(
                f"{self._place(box.file)} should hold {expected}, as {TENSORS} says, and holds {found or 'none'}. Use "
                "another checkpoint."
            )
        return self._readers[place].read(box.name, offsets, sizes)


class SavedWeights:
    """A ``TensorSource`` of a run state's weights; tied ones have all their names.

    Args:
        state: the checkpoint.

    Raises:
        CheckpointError: if it holds no weights.
    """

    def __init__(self, state: RunState) -> None:
        saved = state.tree.get("state_dict")
        if not isinstance(saved, dict):
            raise CheckpointError(f"{state.path} holds no weights (no state_dict); give another checkpoint.")
        self._values = {name: value for name, value in saved.items() if isinstance(value, StoredTensor | Tensor)}

    def keys(self) -> Collection[str]:
        """Return the names in the module."""
        return self._values.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor; :class:`KeyError` if there is none of that name."""
        return tuple(self._values[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return its dtype; :class:`KeyError` if there is none of that name."""
        return self._values[key].dtype

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Read a box of a tensor, see :meth:`~trainwright.checkpoint.format.source.TensorSource.read`."""
        value = self._values[key]
        if isinstance(value, Tensor):
            return value.clone()  # scalars are part of the tree
        return value.source.read(value.key, offsets, sizes)
