"""Safetensors files of other tools, read in parts and validated first."""

import json

import fsspec
import pytest
import safetensors.torch
import torch

from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.core.errors import CheckpointError

FIRST = {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4).bfloat16()}
SECOND = {"b.weight": torch.arange(10), "empty": torch.zeros(0, 2)}
FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"
WEIGHT_MAP = {**dict.fromkeys(FIRST, FILES[0]), **dict.fromkeys(SECOND, FILES[1])}


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index."""
    place = tmp_path / "model"
    place.mkdir()
    for name, tensors in zip(FILES, (FIRST, SECOND), strict=True):
        safetensors.torch.save_file(tensors, place / name)
    write_index(place, WEIGHT_MAP)
    return place


def write_index(place, weight_map):
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_holds(source, tensors):
    assert set(source.keys()) == set(tensors)
    for key, tensor in tensors.items():
        assert source.shape(key) == tuple(tensor.shape)
        assert source.dtype(key) == tensor.dtype
        assert torch.equal(source.read(key), tensor)
    source.close()


@pytest.mark.parametrize(("path", "tensors"), [("", FIRST | SECOND), (INDEX, FIRST | SECOND), (FILES[0], FIRST)])
def test_sources(folder, path, tensors):
    # Some publish the same weights once more in one file outside of the index.
    safetensors.torch.save_file({"layers.0": torch.ones(3)}, folder / "consolidated.safetensors")
    assert_holds(SafetensorsFolder(str(folder / path)), tensors)


def test_several_files_without_an_index(folder):
    (folder / INDEX).unlink()
    assert_holds(SafetensorsFolder(str(folder)), FIRST | SECOND)
    safetensors.torch.save_file({"a.bias": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.bias is in model-00001-of-00002.safetensors and in other"):
        SafetensorsFolder(str(folder))


def test_in_a_store():
    fsspec.filesystem("memory").pipe("/models/tiny/model.safetensors", safetensors.torch.save(FIRST))
    assert_holds(SafetensorsFolder("memory://models/tiny"), FIRST)
    assert_holds(SafetensorsFolder("memory://models/tiny/model.safetensors"), FIRST)


def test_links_as_in_the_cache_of_hugging_face(tmp_path):
    for name in ("blobs", "snapshot"):
        (tmp_path / name).mkdir()
    safetensors.torch.save_file(FIRST, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert_holds(SafetensorsFolder(str(tmp_path / "snapshot")), FIRST)


def test_partial_reads(folder):
    source = SafetensorsFolder(str(folder))
    assert torch.equal(source.read("a.weight", (1, 1), (2, 2)), FIRST["a.weight"][1:3, 1:3])
    assert torch.equal(source.read("b.weight", (7,), (3,)), SECOND["b.weight"][7:])
    source.close()


OUTSIDE = ["../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "..\\x.safetensors"]
OUTSIDE += [".hidden.safetensors", "s3://bucket/x.safetensors", "model.bin", ""]


@pytest.mark.parametrize(("weight_map", "message"), [
    (WEIGHT_MAP | {"c.weight": FILES[0]}, f"c.weight should be in {FILES[0]} and is in none"),
    (WEIGHT_MAP | {"a.bias": FILES[1]}, "disagree"),
    ({key: file for key, file in WEIGHT_MAP.items() if key != "a.bias"}, f"a.bias of {FILES[0]} is not listed"),
    *((WEIGHT_MAP | {"secret": file}, "only .safetensors files beside the index are read") for file in OUTSIDE),
    *((weight_map, "index") for weight_map in (3, {}, {"a": 1})),
])  # fmt: skip
def test_wrong_index(folder, weight_map, message):
    safetensors.torch.save_file({"secret": torch.ones(1)}, folder.parent / "secret.safetensors")
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(str(folder))


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_malformed_index(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        SafetensorsFolder(str(folder))


def test_several_indexes(folder):
    (folder / "model.fp16.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"several indexes: model\.fp16.*Give the path of the one to use"):
        SafetensorsFolder(str(folder))


def test_truncated_and_missing_shards(folder):
    whole = (folder / FILES[0]).read_bytes()
    (folder / FILES[0]).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{FILES[0]} is not a complete safetensors file"):
        SafetensorsFolder(str(folder))
    (folder / FILES[0]).write_bytes(whole)
    (folder / FILES[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"lists {FILES[1]}, which is missing"):
        SafetensorsFolder(str(folder))


@pytest.mark.parametrize(("path", "message"), [
    ("nothing", "does not exist. Give a .safetensors file"),
    ("nothing.safetensors", "does not exist"),
    ("empty", "has no .safetensors file, but nothing"),
    ("weights.bin", "is not a .safetensors file"),
    ("https://host/model.safetensors", "download it first"),
    ("run.ckpt", "is a checkpoint of Trainwright"),
])  # fmt: skip
def test_sources_without_safetensors(tmp_path, path, message):
    for name in ("empty", "run.ckpt"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.ckpt" / "manifest.json").write_text("{}")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(path)
