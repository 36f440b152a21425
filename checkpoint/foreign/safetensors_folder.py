"""Partial reads of safetensors files: one file, several in a folder, or shards with an index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.records import MANIFEST
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileReader
from trainwright.checkpoint.store.paths import join_path, split_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import parse_json
from trainwright.core.text.printable import shortened

_FILE = ".safetensors"
_INDEX = ".safetensors.index.json"
_EXAMPLE = "a .safetensors file, or a folder with such files (and their .safetensors.index.json)"


class SafetensorsFolder:
    """A :class:`~trainwright.checkpoint.format.source.TensorSource` over safetensors files, opened lazily.

    Args:
        path: a ``.safetensors`` file, an index file (``*.safetensors.index.json``), or a folder; local or any fsspec
            path. In a folder with an index, only its files count; without one all ``.safetensors`` files do.

    Attributes:
        path: as given.
        folder: of the files.
        files: names of the files.

    Raises:
        CheckpointError: if there is no such path, no file to read, more than one index, a missing file of the index, a
            file name that leads out of the folder, a tensor that index and file disagree about, or one in two files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.folder, name = _locate(path)
        names = set(self.folder.names())
        chosen = names if name is None else {name}
        index = _index_of(chosen, path)
        weight_map = _read_index(self.folder, index) if index is not None else None
        self.files = tuple(sorted({*weight_map.values()} if weight_map is not None else _tensor_files(chosen, path)))
        self._readers = {file: self._open(file, index, names) for file in self.files}
        self._file_of = self._places(weight_map, index)

    def keys(self) -> Collection[str]:
        """Return the names of all tensors, those of the first file first."""
        return self._file_of.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor; :class:`KeyError` if there is none of that name."""
        return tuple(self._entry(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return its dtype; :class:`KeyError` if there is none of that name."""
        return self._entry(key).dtype

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Read a box of a tensor, see :meth:`~trainwright.checkpoint.format.source.TensorSource.read`."""
        return self._readers[self._file_of[key]].read(key, offsets, sizes)

    def _entry(self, key: str) -> TensorEntry:
        return self._readers[self._file_of[key]].entries[key]

    def _open(self, file: str, index: str | None, names: Collection[str]) -> TensorFileReader:
        if file not in names:
            raise CheckpointError(
                f"{self.path}: {index} lists {file}, which is missing. Fetch it, or give another folder."
            )
        reader = TensorFileReader(partial(self.folder.open, file))
        reader.close()  # a model may have hundreds of files; reading reopens
        return reader

    def close(self) -> None:
        """Close the files; reading reopens them."""
        for reader in self._readers.values():
            reader.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for reader in self._readers.values() for entry in reader.entries.values())

    def _places(self, weight_map: Mapping[str, str] | None, index: str | None) -> dict[str, str]:
        """Return name of each tensor -> its file."""
        places: dict[str, str] = {}
        for file, reader in self._readers.items():
            for key in reader.entries:
                if key in places:
                    raise CheckpointError(
                        f"{self.path}: the tensor {key} is in {places[key]} and in {file}. Give one of the files, or "
                        f"an index ({_INDEX})."
                    )
                places[key] = file
        if weight_map is not None and places != weight_map:
            raise CheckpointError(f"{self.path}: {index} and the files disagree: {_difference(weight_map, places)}")
        return places


def _locate(path: str) -> tuple[Folder, str | None]:
    """Return the folder, and the name of the file in it if ``path`` is a file."""
    if path.startswith(("http://", "https://")):
        raise CheckpointError(f"{path} is on a web server: download it first, then give the local path.")
    folder = Folder(path)
    if folder.is_file():
        parent, name = split_path(path)
        if not name.endswith((_FILE, _INDEX)):
            raise CheckpointError(f"{path} is not a {_FILE} file. Give {_EXAMPLE}.")
        return Folder(parent), name
    if not folder.exists():
        raise CheckpointError(f"{path} does not exist. Give {_EXAMPLE}.")
    if MANIFEST in folder.names():
        raise CheckpointError(f"{path} is a checkpoint of Trainwright, not a folder of safetensors: open it as one.")
    return folder, None


def _index_of(names: Collection[str], path: str) -> str | None:
    found = sorted(name for name in names if name.endswith(_INDEX))
    if len(found) > 1:
        raise CheckpointError(f"{path} has several indexes: {', '.join(found)}. Give the path of the one to use.")
    return found[0] if found else None


def _tensor_files(names: Collection[str], path: str) -> list[str]:
    found = [name for name in names if name.endswith(_FILE)]
    if not found:
        others = ", ".join(sorted(names)[:5]) or "nothing"
        raise CheckpointError(f"{path} has no {_FILE} file, but {others}. Give {_EXAMPLE}.")
    return found


def _read_index(folder: Folder, index: str) -> dict[str, str]:
    where = join_path(folder.path, index)
    try:
        weight_map: Any = parse_json(folder.read(index))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = shortened(repr(error))
        raise CheckpointError(f'{where} is not a safetensors index (JSON with "weight_map"): {what}.') from error
    if not pairs or not all(isinstance(key, str) and isinstance(file, str) for key, file in pairs):
        raise CheckpointError(f"{where}: weight_map must map tensor names to file names.")
    for key, file in pairs:
        if not (file.endswith(_FILE) and not set(file) & set("/\\:\0") and not file.startswith(".")):
            raise CheckpointError(
                f"{where} maps {key} to {file!r}; only {_FILE} files beside the index are read, named without a folder."
            )
    return dict(pairs)


def _difference(weight_map: Mapping[str, str], places: Mapping[str, str]) -> str:
    key = next(key for key in [*weight_map, *places] if weight_map.get(key) != places.get(key))
    listed, found = weight_map.get(key), places.get(key)
    if found is None:
        return f"{key} should be in {listed} and is in none."
    return (
        f"{key} is in {found}, but should be in {listed}." if listed is not None else f"{key} of {found} is not listed."
    )
