"""Safetensors files of others, read in parts and checked before anything of them is believed."""

import json

import fsspec
import pytest
import safetensors.torch
import torch

from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.core.errors import CheckpointError

FIRST = {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4).bfloat16()}
SECOND = {"b.weight": torch.arange(10), "empty": torch.zeros(0, 2)}


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index."""
    place = tmp_path / "model"
    place.mkdir()
    weight_map = {}
    for number, tensors in enumerate((FIRST, SECOND), start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        safetensors.torch.save_file(tensors, place / name)
        weight_map |= dict.fromkeys(tensors, name)
    write_index(place, weight_map)
    return place


def write_index(place, weight_map):
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(place):
    return json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]


def assert_holds(source, tensors):
    assert set(source.keys()) == set(tensors)
    for key, tensor in tensors.items():
        assert source.shape(key) == tuple(tensor.shape)
        assert source.dtype(key) == tensor.dtype
        assert torch.equal(source.read(key), tensor)
    source.close()


def test_a_folder_with_an_index(folder):
    assert_holds(SafetensorsFolder(str(folder)), FIRST | SECOND)


def test_the_index_itself(folder):
    assert_holds(SafetensorsFolder(str(folder / "model.safetensors.index.json")), FIRST | SECOND)


def test_one_file(folder):
    assert_holds(SafetensorsFolder(str(folder / "model-00001-of-00002.safetensors")), FIRST)


def test_several_files_without_an_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    assert_holds(SafetensorsFolder(str(folder)), FIRST | SECOND)


def test_files_that_the_index_does_not_name_do_not_count(folder):
    """Some publish the same weights once more in one file, under other names."""
    safetensors.torch.save_file({"layers.0": torch.ones(3)}, folder / "consolidated.safetensors")
    assert_holds(SafetensorsFolder(str(folder)), FIRST | SECOND)


def test_in_a_store():
    store = fsspec.filesystem("memory")
    store.pipe("/models/tiny/model.safetensors", safetensors.torch.save(FIRST))
    assert_holds(SafetensorsFolder("memory://models/tiny"), FIRST)
    assert_holds(SafetensorsFolder("memory://models/tiny/model.safetensors"), FIRST)


def test_links_as_in_the_cache_of_hugging_face(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    safetensors.torch.save_file(FIRST, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert_holds(SafetensorsFolder(str(tmp_path / "snapshot")), FIRST)


def test_only_what_is_asked_for_is_read(folder):
    source = SafetensorsFolder(str(folder))
    assert torch.equal(source.read("a.weight", (1, 1), (2, 2)), FIRST["a.weight"][1:3, 1:3])
    assert torch.equal(source.read("b.weight", (7,), (3,)), SECOND["b.weight"][7:])
    source.close()


def test_a_shard_that_is_missing(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lists model-00002-of-00002\.safetensors, which is missing"):
        SafetensorsFolder(str(folder))


def test_a_tensor_that_is_not_where_the_index_says(folder):
    write_index(folder, read_index(folder) | {"c.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="c.weight should be in model-00001-of-00002.safetensors and is in none"):
        SafetensorsFolder(str(folder))
    write_index(folder, read_index(folder) | {"a.bias": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"disagree"):
        SafetensorsFolder(str(folder))


def test_a_tensor_that_the_index_does_not_list(folder):
    weight_map = read_index(folder)
    del weight_map["a.bias"]
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="a.bias of model-00001-of-00002.safetensors is not listed"):
        SafetensorsFolder(str(folder))


@pytest.mark.parametrize("file", [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "sub/x.safetensors",
    "..\\x.safetensors",
    ".hidden.safetensors",
    "s3://bucket/x.safetensors",
    "model.bin",
    "",
])  # fmt: skip
def test_an_index_cannot_lead_out_of_its_folder(folder, file):
    safetensors.torch.save_file({"secret": torch.ones(1)}, folder.parent / "secret.safetensors")
    write_index(folder, read_index(folder) | {"secret": file})
    with pytest.raises(CheckpointError, match="only .safetensors files beside the index are read"):
        SafetensorsFolder(str(folder))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index"):
        SafetensorsFolder(str(folder))


def test_two_indexes(folder):
    (folder / "model.fp16.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"several indexes: model\.fp16.*Give the path of the one to use"):
        SafetensorsFolder(str(folder))


def test_a_tensor_in_two_files(folder):
    (folder / "model.safetensors.index.json").unlink()
    safetensors.torch.save_file({"a.bias": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.bias is in model-00001-of-00002.safetensors and in other"):
        SafetensorsFolder(str(folder))


def test_a_cut_file(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is not a complete safetensors file"):
        SafetensorsFolder(str(folder))


@pytest.mark.parametrize(("path", "message"), [
    ("nothing", "does not exist. Give a .safetensors file"),
    ("nothing.safetensors", "does not exist"),
    ("empty", "has no .safetensors file, but nothing"),
    ("weights.bin", "is not a .safetensors file"),
    ("https://host/model.safetensors", "download it first"),
])  # fmt: skip
def test_what_is_no_safetensors(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(path)


def test_a_run_state_is_said_to_be_one(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a checkpoint of Trainwright"):
        SafetensorsFolder(str(tmp_path))
