"""Small checkpoints whose values depend on their step, written by threads instead of ranks."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from trainwright.checkpoint.format.manifest import FileRecord, Manifest, read_manifest, verify
from trainwright.checkpoint.format.records import SPLIT, Listed, list_to_bytes
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileReader, TensorFileWriter
from trainwright.checkpoint.store.storage import Folder, PendingFolder
from trainwright.core.errors import DamagedCheckpoint

RANKS = 2
LIST = "files_00000.json"


def tensors_of(step: int, rank: int, size: int = 100) -> dict[str, Tensor]:
    base = torch.arange(size, dtype=torch.float32) + 1000 * rank + step
    return {"a": base, "b": (base * 2).bfloat16().reshape(-1, 10), "c": torch.tensor(step)}


def write_tensors(pending: PendingFolder, step: int, rank: int, size: int = 100) -> FileRecord:
    tensors = tensors_of(step, rank, size)
    with pending.create_file(f"rank_{rank:05d}.safetensors", rank) as file:
        writer = TensorFileWriter(file, [TensorEntry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()])
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
        return file.close()


def write(
    target: str | Path, step: int, size: int = 100, metrics: dict[str, float] | None = None, divided: bool = False
) -> Manifest:
    """Write the checkpoint of a step: four files and the manifest; where it is divided, a list of two of the files."""
    with PendingFolder.create(target) as pending:
        members = [PendingFolder.join(target, pending.token) for _ in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            records = list(pool.map(lambda rank: write_tensors(members[rank], step, rank, size), range(RANKS)))
        records.append(pending.write_file("state.json", json.dumps({"step": step, "loops": [step] * 20}).encode(), 0))
        records.append(pending.write_file("tensors.json", json.dumps({"a": [size], "step": step}).encode(), 1))
        about = {"step": step, "created": datetime.now(UTC).isoformat(), "kind": "run state", "metrics": metrics or {}}
        if divided:
            shards, records = records[:RANKS], records[RANKS:]
            records.append(pending.write_file(LIST, list_to_bytes(shards), 0))
            lists = {LIST: Listed(RANKS, sum(each.size for each in shards))}
            files = {record.name: record for record in records}
            manifest = Manifest(files, about, SPLIT, lists, pending.token_in_names)
        else:
            manifest = Manifest({record.name: record for record in records}, about)
        pending.publish(manifest)
    return manifest


def read(path: str | Path) -> int:
    """Return the step of a checkpoint after checking every value."""
    manifest = read_manifest(path)
    problems = verify(path, manifest)
    if problems:
        raise DamagedCheckpoint(str(path), problems)
    folder = Folder(path, manifest)
    step = json.loads(folder.read("state.json"))["step"]
    size = json.loads(folder.read("tensors.json"))["a"][0]
    for rank in range(RANKS):
        with TensorFileReader(lambda rank=rank: folder.open(f"rank_{rank:05d}.safetensors")) as reader:
            for name, tensor in tensors_of(step, rank, size).items():
                assert torch.equal(reader.read(name), tensor)
    assert manifest.step == step
    return int(step)


def hidden(folder: str | Path) -> list[str]:
    """Return unpublished entries of a folder."""
    return sorted(name for name in os.listdir(folder) if name.startswith("."))
