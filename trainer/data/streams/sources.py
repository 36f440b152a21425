"""Data of other packages as shards read sequentially. Imports none of these packages."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Iterable, Iterator
from os import PathLike, fspath
from typing import Any, Protocol

import fsspec

from trainwright.trainer.data.streams.pieces import UNKNOWN

# Rows of a `datasets.Dataset` read together: the batch size of its Arrow files.
_ROWS = 1000
# File types that WebDataset decodes by running code from the file.
_PICKLES = frozenset({"pickle", "pkl", "pth", "pyd"})


class Shards(Protocol):
    """Shards of samples, equal on every rank, with the same samples in the same order each time.

    Attributes:
        sizes: samples of each shard; ``pieces.UNKNOWN`` if known only after reading.
    """

    sizes: list[int]

    def read(self, shard: int, start: int) -> Iterable[Any]:
        """Return the samples of a shard, except for the first ``start``."""


class IndexedShards:
    """Shards of a data set with samples by index: ``data[0]`` is the first of the first shard.

    Args:
        data: the data set.
        sizes: samples of each shard.
    """

    def __init__(self, data: Any, sizes: Iterable[int]) -> None:
        self.data = data
        self.sizes = [int(size) for size in sizes]
        self._first = [0, *itertools.accumulate(self.sizes)]

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """See :class:`Shards`."""
        return (self.data[index] for index in range(self._first[shard] + start, self._first[shard + 1]))


class IterableShards:
    """Shards of a ``datasets.IterableDataset``.

    Args:
        data: not shuffled and not split by node.
    """

    def __init__(self, data: Any) -> None:
        if "BufferShuffledExamplesIterable" in _steps(data._ex_iterable) or data._distributed is not None:
            raise ValueError(
                "ShardedStream was given a datasets.IterableDataset that is shuffled or split by node. Remove "
                ".shuffle(...) and split_dataset_by_node: ShardedStream(data, shuffle=True) shuffles and splits."
            )
        self.data = data
        self.sizes = [UNKNOWN] * data.num_shards

    def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        """See :class:`Shards`."""
        part = self.data.shard(len(self.sizes), shard)
        # Iterating over single samples would split them by worker.
        for batch in (part.skip(start) if start else part).iter(batch_size=1):
            yield {name: values[0] for name, values in batch.items()}


class TarShards:
    """Tar files as of WebDataset: consecutive files with the same name up to the first dot make up a sample.

    A sample is a dictionary of contents (bytes) by the rest of the name, with the common part as ``__key__`` and the
    tar file as ``__url__``.

    Args:
        paths: paths or patterns.
    """

    def __init__(self, paths: Iterable[str | PathLike[str]]) -> None:
        self.files = fsspec.open_files([fspath(path) for path in paths])
        self.sizes = [UNKNOWN] * len(self.files)

    def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        """See :class:`Shards`."""
        return itertools.islice(self._samples(self.files[shard]), start, None)

    def _samples(self, file: Any) -> Iterator[dict[str, Any]]:
        with file as opened, tarfile.open(fileobj=opened, mode="r|*") as tar:
            sample: dict[str, Any] = {}
            for member in tar:
                if not member.isreg():
                    continue
                folder, slash, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                if _PICKLES & set(kind.split(".")):
                    raise ValueError(
                        f"{file.path} holds {member.name}, a pickle, and reading one can run code from the file. Write "
                        "the samples as JSON, text, images or safetensors."
                    )
                key = folder + slash + stem
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                content = tar.extractfile(member)
                assert content is not None
                sample |= {"__key__": key, "__url__": file.path, kind: content.read()}
            if sample:
                yield sample


def shards_of(data: Any) -> Shards:
    """Return the shards of the data of a :class:`~trainwright.ShardedStream`."""
    shards = _known(data)
    if not len(shards.sizes):
        raise ValueError(f"ShardedStream found no shard in {data!r}. Use data with at least one.")
    return shards


def _known(data: Any) -> Shards:
    packages = {cls.__module__.partition(".")[0] for cls in type(data).__mro__}
    if isinstance(data, str | PathLike):
        return TarShards([data])
    if isinstance(data, list | tuple) and all(isinstance(path, str | PathLike) for path in data):
        return TarShards(data)
    if "datasets" in packages and hasattr(data, "num_rows"):
        return IndexedShards(data, [min(_ROWS, len(data) - first) for first in range(0, len(data), _ROWS)])
    if "datasets" in packages and hasattr(data, "num_shards"):
        return IterableShards(data)
    if "streaming" in packages and hasattr(data, "shards"):
        _refuse_pickles(data, (name for shard in data.shards for name in getattr(shard, "column_encodings", ())))
        return IndexedShards(data, [shard.samples for shard in data.shards])
    if "litdata" in packages:
        len(data)  # finds the shards
        cache = data.shuffler.cache
        _refuse_pickles(data, cache._reader.config.data_format)
        return IndexedShards(data, [stop - start for _, start, stop, _ in cache.get_chunk_intervals()])
    if hasattr(data, "sizes") and hasattr(data, "read"):
        found: Shards = data
        return found
    raise TypeError(
        f"ShardedStream was given {type(data).__name__}, whose shards are unknown. Use a Dataset or IterableDataset "
        "of datasets, a StreamingDataset of MosaicML Streaming or LitData, paths of tar files, or an object with "
        "sizes and read(shard, start). For any other iterable use trainwright.DealtStream."
    )


def _steps(iterable: Any) -> set[str]:
    """Return the names of the classes that an iterable of ``datasets`` consists of."""
    inner = [*getattr(iterable, "ex_iterables", ()), *filter(None, [getattr(iterable, "ex_iterable", None)])]
    return {type(iterable).__name__}.union(*map(_steps, inner))


def _refuse_pickles(data: Any, formats: Iterable[str]) -> None:
    found = sorted({name for name in formats if name.partition(":")[0] in ("pkl", "pickle", "graph")})
    if found:
        raise ValueError(
            f"The shards of {type(data).__name__} hold {', '.join(found)}, which is a pickle, and reading one can run "
            "code from the file. Write them again with strings, numbers, arrays, bytes or JSON."
        )
