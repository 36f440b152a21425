"""Shards of the numbers from 0 on, in each format that a ``ShardedStream`` reads."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import itertools
import json
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

SIZES = [5, 11, 3, 13, 7, 8]
SAMPLES = sum(SIZES)


def shards() -> Iterator[range]:
    ends = list(itertools.accumulate(SIZES))
    return map(range, [0, *ends], ends)


def mosaic() -> Any:
    """Import MosaicML Streaming without torchvision, which it needs for vision data sets only."""
    names = [f"torchvision{rest}" for rest in ("", ".datasets", ".transforms", ".transforms.functional")]
    missing = [] if importlib.util.find_spec("torchvision") else names
    for name in missing:
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(__path__=[], VisionDataset=object, to_tensor=None)
    try:
        import streaming
    finally:
        for name in missing:
            del sys.modules[name]
    return streaming


def write_map(folder: Path) -> None:
    datasets.Dataset.from_dict({"index": list(range(SAMPLES))}).save_to_disk(folder)


def read_map(folder: Path) -> Any:
    return datasets.load_from_disk(folder)


def write_iterable(folder: Path) -> None:
    for number, shard in enumerate(shards()):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"index": index}) + "\n" for index in shard))


def read_iterable(folder: Path) -> Any:
    files = sorted(map(str, folder.glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))


def write_mosaic(folder: Path, encoding: str = "int") -> None:
    with mosaic().MDSWriter(out=str(folder), columns={"index": encoding}, size_limit=150) as writer:
        for index in range(SAMPLES):
            writer.write({"index": index})


def read_mosaic(folder: Path, **options: Any) -> Any:
    return mosaic().StreamingDataset(local=str(folder), batch_size=1, **options)


def write_lit(folder: Path, value: Any = None) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=8)
    for index in range(SAMPLES):
        cache[index] = {"index": index if value is None else value}
    cache.done()
    cache.merge()


def read_lit(folder: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder))


def write_tar(folder: Path, kind: str = "txt") -> None:
    for number, shard in enumerate(shards()):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for index in shard:
                for name, text in ((f"all/{index:04}.{kind}", str(index)), (f"all/{index:04}.note.json", "{}")):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(text)
                    tar.addfile(entry, io.BytesIO(text.encode()))


def read_tar(folder: Path) -> Any:
    return str(folder / "*.tar")


WRITE: dict[str, Callable[[Path], None]] = {
    "map": write_map,
    "iterable": write_iterable,
    "mosaic": write_mosaic,
    "lit": write_lit,
    "tar": write_tar,
}
READ: dict[str, Callable[[Path], Any]] = {
    "map": read_map,
    "iterable": read_iterable,
    "mosaic": read_mosaic,
    "lit": read_lit,
    "tar": read_tar,
}


def indices(samples: list[Any]) -> torch.Tensor:
    """Return the numbers of a batch, ``(samples,)``."""
    return torch.tensor([int(np.asarray(sample.get("index", sample.get("txt")))) for sample in samples])
