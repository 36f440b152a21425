"""Valid checkpoints of every kind, and copies with junk under valid hashes."""

import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.checkpoint.foreign.deepspeed_files import deepspeed_modules, make_trained, write_deepspeed
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.format import records
from trainwright.checkpoint.format.directory import BoxPlace, Directory, Entry
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import FileRecord, Listed, Manifest, file_of, list_to_bytes
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileWriter
from trainwright.checkpoint.format.tree import encode
from trainwright.checkpoint.write.box_index import name_of
from trainwright.checkpoint.write.save import Content, write

MANIFEST = "manifest.json"


def shared_pairs(depth: int = 60) -> Any:
    """A pair of pairs that share their halves: 2 kB that unfold to 2^depth values."""
    value: Any = (1, 2)
    for _ in range(depth):
        value = (value, value)
    return value


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Values of wrong kinds; lists and dicts are copied when they are taken.
NUMBERS = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, 1e308, -1e308, math.nan, math.inf]
TEXTS = ["", "x", "NaN", "-1", "1" * 5000, "../../../etc/passwd", "/dev/zero", "a\x00b", "\x1b[2J", "${oc.env:HOME}"]
LISTS = [[], {}, [[]], [-1], [2**62] * 5, [2**62] * 100, [1, "a", None], {"": None}, {"a": {"b": [1]}}, nested(150)]
NODES = [  # of trees
    {"~": []},
    *({"~": "tensor", **more} for more in ({}, {"key": 3}, {"key": "nowhere"})),
    *({"~": "scalar", "dtype": dtype, "v": value} for dtype, value in (("nn", 1), ("uint8", 10**30))),
    *({"~": "numpy", "dtype": dtype, "v": value} for dtype, value in (("V9999999999", 5), ("O", 1))),
    *({"~": "omegaconf", "v": value} for value in ("a: &a [x, x]\nb: *a", {"a": "${b}", "b": "${a}"})),
    *({"~": kind, "v": value} for kind, value in (("tuple", 3), ("device", "nowhere"), ("timedelta", [10**12, 0, 0]))),
    *({"~": kind, "v": value} for kind, value in (("set", [[1], {}]), ("complex", {"a": 1}), ("Size", [10**30]))),
    *({"~": kind, "v": value} for kind, value in (("dict", [[[], 1]]), ("bytes", "%%%"), ("class", []))),
]
JUNK: list[Any] = [*NUMBERS, *TEXTS, "y" * 9000, *LISTS, nested(220), *NODES]


def mutated(tree: Any, rng: random.Random, junk: list[Any]) -> Any:
    """A copy of nested dicts and lists with one to three values exchanged, removed or moved."""
    tree = _copied(tree)
    for _ in range(rng.randint(1, 3)):
        places = _places(tree)
        if not places:
            return _copied(rng.choice(junk))
        # Values near the root are few and decide most: half of all attempts are at them.
        places.sort(key=lambda place: place[0])
        _, parent, key = rng.choice(places[: max(1, len(places) // 8)] if rng.random() < 0.5 else places)
        action = rng.random()
        if action < 0.1:
            del parent[key]
        elif action < 0.2:
            other = rng.choice(places)
            parent[key] = _copied(other[1][other[2]])
        elif action < 0.25 and isinstance(parent, dict):
            parent[rng.choice(["x", "", "rank/99999999999999999999/a", "../x", "a" * 3000])] = parent.pop(key)
        else:
            parent[key] = _copied(rng.choice(junk))
    return tree


def _copied(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Other lists and dicts; what contains itself stays as it is."""
    if any(value is each for each in around):
        return value
    if type(value) is list:
        return [_copied(each, (*around, value)[-3:]) for each in value]
    if type(value) is dict:
        return {key: _copied(each, (*around, value)[-3:]) for key, each in value.items()}
    return value


def _places(tree: Any, depth: int = 0) -> list[tuple[int, Any, Any]]:
    found = []
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in pairs[:200]:
        found.append((depth, tree, key))
        if depth < 12:
            found += _places(value, depth + 1)
    return found


def _content() -> Content:
    """Return the content of a small Lightning checkpoint."""
    torch.manual_seed(0)
    tensors: dict[str, TensorParts] = {}

    def put(path: str, tensor: torch.Tensor) -> str:
        tensors[f"tree/{path}"] = TensorParts.whole(tensor)
        return f"tree/{path}"

    weight, bias = torch.randn(4, 3), torch.randn(4)
    run = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"layer.weight": weight, "layer.bias": bias},
        "loops": {"fit_loop": {"state_dict": {"combined_loader": []}, "epoch_progress": {"current": {"ready": 2}}}},
        "callbacks": {"Best": {"best": torch.tensor(0.5), "paths": (Path("a"), {1, 2}), "when": 1.5, "raw": b"abc"}},
        "optimizer_states": [
            {
                "by_name": True,
                "state": {"layer.weight": {"step": torch.tensor(4.0), "exp_avg": torch.zeros(4, 3)}},
                "param_groups": [{"lr": 0.1, "params": ["layer.weight", "layer.bias"]}],
            }
        ],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}],
        "hyper_parameters": {"width": 3, "betas": (0.9, 0.99)},
    }
    facts = {"prefix": "", "class": "Tiny", "config": {"a": 1}, "generation_config": None, "tied": [["a", "b"]]}
    about = {"kind": "run state", "step": 4, "epoch": 1, "world_size": 1, "data_ranks": 1, "layout": {"shard": 1}}
    about |= {"strategy": "single", "versions": {"torch": "2"}, "metrics": {"loss": 0.5}}
    about |= {"hugging_face": [{**facts, "dtype": "float32"}]}
    return Content(encode(run, put), tensors, about)


def write_folder(path: Path) -> None:
    write(_content(), str(path))


def write_state_file(path: Path) -> None:
    write_file(_content(), str(path))


def write_divided(path: Path) -> None:
    """A folder as many ranks write it: a directory of tensors, files of boxes, and lists of files."""
    path.mkdir()
    weight = torch.arange(24.0).reshape(4, 6)
    files, shards = {}, []
    for rank in range(2):
        own = {
            name_of("weights/a", (2 * rank, 0), (2, 6), (4, 6)): weight[2 * rank : 2 * rank + 2],
            f"rank/{rank}/seed": torch.arange(3),
        }
        entries = [TensorEntry(key, each.dtype, tuple(each.shape)) for key, each in own.items()]
        with (path / file_of(rank)).open("wb") as file:
            writer = TensorFileWriter(file, entries)
            for entry, tensor in zip(entries, own.values(), strict=True):
                writer.write(entry.name, tensor)
            writer.close()
        shards.append(_record(path, file_of(rank), rank))
    places = (BoxPlace(0, (0, 0), (4, 6)),)
    directory = Directory({"weights/a": Entry("float32", (4, 6), places)}, [{"seed": Entry("int64", (3,))}], [(2, 0)])
    (path / "tensors.json").write_bytes(directory.to_bytes())
    boxes = {"tensors": {"weights/a": [[[0, 0], [2, 6], 0], [[2, 0], [2, 6], 1]]}}
    (path / "boxes_00000.json").write_text(json.dumps(boxes))
    (path / "files_00000.json").write_bytes(list_to_bytes(shards))
    tree = {"state_dict": {"a": {"~": "tensor", "key": "weights/a"}}, "epoch": 0, "global_step": 4}
    (path / "state.json").write_text(json.dumps(tree))
    for name in ("tensors.json", "boxes_00000.json", "files_00000.json", "state.json"):
        files[name] = _record(path, name, 0)
    lists = {"files_00000.json": Listed(2, sum(each.size for each in shards))}
    (path / MANIFEST).write_bytes(Manifest(files, {"kind": "run state", "step": 4}, 2, lists).to_bytes())


def _record(path: Path, name: str, rank: int) -> FileRecord:
    data = (path / name).read_bytes()
    return FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data), rank)


def write_torch_zip(path: Path) -> None:
    torch.save(_lightning(), path)


def _lightning() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"weight": weight, "bias": torch.randn(4)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 2}}}},
        "callbacks": {"Best": {"best": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"step": 4, "avg": weight.clone()}}, "param_groups": [{"params": [0, 1]}]}],
        "lr_schedulers": [],
        "hyper_parameters": {"width": 3},
        "trainwright": {"combined_loader": [{"samples": 3, "history": []}]},
    }


def write_safetensors(path: Path) -> None:
    with path.open("wb") as file:
        writer = TensorFileWriter(file, [TensorEntry("a", torch.float32, (2, 3)), TensorEntry("b", torch.int64, (2,))])
        writer.write("a", torch.ones(2, 3))
        writer.write("b", torch.ones(2, dtype=torch.int64))
        writer.close()


def write_index(path: Path) -> None:
    """A folder of Hugging Face: two shards, an index and a configuration."""
    path.mkdir()
    for name in ("one", "two"):
        with (path / f"{name}.safetensors").open("wb") as file:
            writer = TensorFileWriter(file, [TensorEntry(name, torch.float32, (2,))])
            writer.write(name, torch.ones(2))
            writer.close()
    index = {"metadata": {}, "weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"architectures": ["A"], "dtype": "float32"}))


def write_stage_2(path: Path) -> None:
    write_deepspeed(path, make_trained(), stage=2, ranks=2)


def forge_folder(path: Path, rng: random.Random) -> None:
    """Exchange the contents of one JSON file of a folder, and make the manifest agree."""
    names = [MANIFEST, *sorted(each.name for each in path.glob("*.json") if each.name != MANIFEST)]
    forge_file(path, rng.choice(names), rng)


def forge_file(path: Path, name: str, rng: random.Random) -> None:
    """Exchange the contents of this JSON file of a folder, and make the manifest agree."""
    plain = mutated(json.loads((path / name).read_bytes()), rng, JUNK)
    if name != MANIFEST:
        (path / name).write_bytes(_dumped(plain, rng))
        plain = json.loads((path / MANIFEST).read_bytes())
        record = _record(path, name, 0)
        plain["files"][name] = {"size": record.size, "xxh3_128": record.hash, "rank": 0}
    (path / MANIFEST).write_bytes(_sealed(plain))


def forge_state_file(path: Path, rng: random.Random) -> None:
    """The same of the records of a file."""
    with zipfile.ZipFile(path) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(contents)).partition("/")[0]
    name = rng.choice([MANIFEST, "state.json", "tensors.json"])
    plain = mutated(json.loads(contents[f"{root}/{name}"]), rng, JUNK)
    if name != MANIFEST:
        data = contents[f"{root}/{name}"] = _dumped(plain, rng)
        plain = json.loads(contents[f"{root}/{MANIFEST}"])
        plain["files"][name] |= {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    contents[f"{root}/{MANIFEST}"] = _sealed(plain)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for each, data in contents.items():
            archive.writestr(each, data)


def _dumped(plain: Any, rng: random.Random) -> bytes:
    data = json.dumps(plain).encode()
    return data.replace(b"{", b'{"a": 1, "a": 2, ', 1) if rng.random() < 0.03 else data


def _sealed(plain: Any) -> bytes:
    if not isinstance(plain, dict):
        return json.dumps(plain).encode()
    return records._sealed({key: value for key, value in plain.items() if key != "xxh3_128"})


def forge_safetensors(path: Path, rng: random.Random) -> None:
    """Exchange the header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = _dumped(mutated(json.loads(data[8 : 8 + length]), rng, JUNK), rng)
    size = rng.choice([len(header)] * 8 + [0, 2**63, len(header) + 7])
    path.write_bytes(size.to_bytes(8, "little") + header + data[8 + length :])


def forge_index(path: Path, rng: random.Random) -> None:
    """Exchange the index or the configuration of a folder."""
    file = path / rng.choice(["model.safetensors.index.json", "config.json"])
    file.write_bytes(_dumped(mutated(json.loads(file.read_bytes()), rng, JUNK), rng))


def _python_junk() -> list[Any]:
    return [
        *JUNK,
        shared_pairs(),
        {shared_pairs(14): 1},
        {shared_pairs(3): 1},
        torch.ones(1).expand(2**40),
        *(torch.empty(0, 5), torch.empty(3, device="meta"), torch.tensor(1j), torch.ones(2, dtype=torch.float8_e4m3fn)),
        torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (3,)),
        *(b"x" * 50, {1: 2}, {(1, 2): 3}, (1, [2]), {3, 4}, _cycle()),
    ]


def _cycle() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def forge_torch_zip(path: Path, rng: random.Random) -> None:
    """Save another tree in the place of the one that was."""
    torch.save(mutated(_lightning(), rng, _python_junk()), path)


def forge_stage_2(path: Path, rng: random.Random) -> None:
    """Exchange the contents of one file of DeepSpeed's."""
    file = rng.choice(sorted(path.rglob("*_states.pt")))
    with deepspeed_modules():
        torch.save(mutated(torch.load(file, weights_only=False), rng, _python_junk()), file)


KINDS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path, random.Random], None]]] = {
    "folder": ("step_4", write_folder, forge_folder),
    "divided folder": ("step_4", write_divided, forge_folder),
    "state file": ("step_4.ckpt", write_state_file, forge_state_file),
    "torch file": ("run.ckpt", write_torch_zip, forge_torch_zip),
    "safetensors": ("a.safetensors", write_safetensors, forge_safetensors),
    "hugging face": ("model", write_index, forge_index),
    "deepspeed": ("stage_2", write_stage_2, forge_stage_2),
}
"""Name, what writes a valid one, and what exchanges something in it."""


def copied(source: Path, target: Path) -> None:
    """Put a fresh copy of a file or folder in the place of an earlier one."""
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
