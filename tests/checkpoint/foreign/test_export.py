"""Checkpoints of real runs, exported and read by other tools."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.checkpoint.saved import (
    LanguageModule,
    logits,
    model,
    one_at_a_time,
    resumed_by_lightning,
    save,
    save_cut,
    saved_by_lightning,
)
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import encode
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError, DamagedCheckpoint


@pytest.fixture(scope="module")
def llama(ranks_of_module, tmp_path_factory):
    """A run state written by two ranks with ZeRO-3, and the weights at that time."""
    path = str(tmp_path_factory.mktemp("llama") / "run.ckpt")
    return path, ranks_of_module(save, 2, path, "zero3", {"one_file": False})[0]


@pytest.fixture(scope="module")
def ranks_of_module(pool):
    return pool.run


def equal(one, other):
    return (
        one.keys() == other.keys()
        and all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)
    )  # fmt: skip


def left_over(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


def test_safetensors_in_one_file(llama, tmp_path):
    path, weights = llama
    written = export(path, tmp_path / "model.safetensors", "safetensors")
    found = safetensors.torch.load_file(written)
    assert equal(found, {name: value for name, value in weights.items() if name != "model.lm_head.weight"})
    assert left_over(tmp_path) == []
    module = LanguageModule()
    safetensors.torch.load_model(module, written)
    assert equal(module.state_dict(), weights)


def test_safetensors_in_shards(llama, tmp_path):
    path, weights = llama
    folder = export(path, tmp_path / "out", "safetensors", max_shard_bytes=5000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(os.listdir(folder)) == [*files, "model.safetensors.index.json"]
    found = {}
    for file in files:
        shard = safetensors.torch.load_file(folder / file)
        assert sum(t.nbytes for t in shard.values()) <= 5000
        assert {name for name, place in index["weight_map"].items() if place == file} == set(shard)
        found |= shard
    assert equal(found, {name: value for name, value in weights.items() if name != "model.lm_head.weight"})
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_large_tensors_have_their_own_shard(llama, tmp_path):
    folder = export(llama[0], tmp_path / "out", "safetensors", max_shard_bytes=1)
    assert len(list(folder.glob("*.safetensors"))) == len(llama[1]) - 1


def test_conversion(llama, tmp_path):
    import transformers

    path, weights = llama
    found = safetensors.torch.load_file(export(path, tmp_path / "m.safetensors", "safetensors", dtype="bfloat16"))
    assert found["temperature"].dtype == torch.bfloat16
    assert found["steps"].dtype == torch.int64  # integers are not converted
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], weights[name].bfloat16())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(export(path, tmp_path / "hf", "hf", dtype="bf16"))
    assert loaded.dtype == torch.bfloat16
    run_state(tmp_path / "run.ckpt", {"w": torch.tensor([1.0, 1e6])})
    with pytest.raises(CheckpointError, match=r"w has values that torch\.float16 cannot hold.*bfloat16"):
        export(str(tmp_path / "run.ckpt"), tmp_path / "m.pt", "torch", dtype="float16")
    assert not (tmp_path / "m.pt").exists()


def test_from_pretrained_gives_the_same_logits(llama, tmp_path):
    import transformers

    path, weights = llama
    folder = export(path, tmp_path / "hf", "hf")
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert "lm_head.weight" not in safetensors.torch.load_file(folder / "model.safetensors")
    module = LanguageModule()
    module.load_state_dict(weights)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(module.model))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False), ("t5", True)])
def test_other_models(tmp_path, kind, tied):
    import transformers

    path = str(tmp_path / "run.ckpt")
    if kind == "t5":  # needs no training to be exported
        from trainwright.checkpoint.foreign.hugging_face import hugging_face_facts

        network = model(kind)
        weights = {f"model.{name}": value for name, value in network.state_dict().items()}
        module = torch.nn.ModuleDict({"model": network})
        run_state(Path(path), weights, hugging_face=hugging_face_facts(module))
    else:
        weights = save(path, kind=kind, tied=tied)
    network = model(kind, tied)
    network.load_state_dict({n.removeprefix("model."): v for n, v in weights.items() if n.startswith("model.")})
    folder = export(path, tmp_path / "hf", "hf", max_shard_bytes=4000)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    loaded, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(network))


@pytest.mark.parametrize("options", [
    {"pipeline": 2, "shard": 1, "plan": {"last": ["temperature"]}}, {"tensor": 2, "shard": 1},
], ids=["pipeline", "tensor"])  # fmt: skip
def test_layouts_that_split_the_module(ranks, tmp_path, options):
    import transformers

    weights = ranks(save_cut, 2, str(tmp_path / "run.ckpt"), options)[0]
    folder = export(str(tmp_path / "run.ckpt"), tmp_path / "hf", "hf")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(value, weights[f"model.{name}"]) for name, value in loaded.named_parameters())
    assert "lm_head.weight" not in safetensors.torch.load_file(folder / "model.safetensors")
    ckpt = export(str(tmp_path / "run.ckpt"), tmp_path / "l.ckpt", "lightning")
    assert equal(dict(LanguageModule.load_from_checkpoint(ckpt).named_parameters()), weights)


def test_hugging_face_facts_are_needed(tmp_path):
    path, fact = str(tmp_path / "run.ckpt"), {"class": "X", "config": {}, "generation_config": None, "tied": []}
    run_state(path, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="made from a module without a Hugging Face model.*format=safetensors"):
        export(path, tmp_path / "hf", "hf")
    fact |= {"dtype": "float32", "prefix": "m"}
    run_state(path, {"m.q.lora_A.default.weight": torch.ones(2)}, hugging_face=[fact])
    with pytest.raises(CheckpointError, match=r"X has adapters .*--merge.*format=peft"):
        export(path, tmp_path / "hf", "hf")
    facts = [{**fact, "prefix": "student"}, {**fact, "prefix": "teacher"}]
    run_state(path, {"student.w": torch.ones(2), "teacher.w": torch.zeros(2)}, hugging_face=facts)
    with pytest.raises(CheckpointError, match="models at 'student', 'teacher', and none was selected"):
        export(path, tmp_path / "hf", "hf")
    folder = export(path, tmp_path / "hf", "hf", model="teacher")
    assert equal(safetensors.torch.load_file(folder / "model.safetensors"), {"w": torch.zeros(2)})


def test_load_from_checkpoint(llama, tmp_path):
    path, weights = llama
    file = export(path, tmp_path / "l.ckpt", "lightning")
    module = LanguageModule.load_from_checkpoint(file, weights_only=True)
    assert equal(module.state_dict(), weights)
    assert dict(module.hparams) == {"kind": "llama", "tied": True, "learning_rate": 0.01}
    # Tied weights are one tensor in the file as well.
    state = torch.load(file, weights_only=True)["state_dict"]
    assert state["model.lm_head.weight"].data_ptr() == state["model.model.embed_tokens.weight"].data_ptr()


def test_lightning_resumes_as_from_its_own_file(tmp_path):
    save(str(tmp_path / "run.ckpt"))
    theirs = saved_by_lightning(tmp_path / "theirs.ckpt")
    ours = export(str(tmp_path / "run.ckpt"), tmp_path / "ours.ckpt", "lightning")
    losses = [resumed_by_lightning(file) for file in (ours, theirs)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    one, other = (torch.load(file, weights_only=True) for file in (ours, theirs))
    assert one.keys() - {"trainwright"} == other.keys()
    (our_state,), (their_state,) = one["optimizer_states"], other["optimizer_states"]
    assert our_state["param_groups"] == their_state["param_groups"]
    assert our_state["state"].keys() == their_state["state"].keys()
    for position, values in their_state["state"].items():
        assert equal(our_state["state"][position], values)
    assert one["lr_schedulers"] == other["lr_schedulers"]


def test_other_classes_become_plain(tmp_path):
    callbacks = {"Mine": {"path": Path("a/b"), "best": np.float32(0.5), "table": np.arange(3), "kept": {1, 2}}}
    tensors = {}

    def put(key, tensor):
        tensors[key] = TensorParts.whole(tensor)
        return key

    tree = {"state_dict": {}, "callbacks": encode(callbacks, put, "callbacks")}
    write(Content(tree, tensors), str(tmp_path / "run.ckpt"))
    with pytest.warns(UserWarning, match="callbacks/Mine/path, .* became plain values"):
        file = export(str(tmp_path / "run.ckpt"), tmp_path / "l.ckpt", "lightning")
    found = torch.load(file, weights_only=True)["callbacks"]["Mine"]
    assert found["path"] == "a/b"
    assert found["best"] == 0.5
    assert type(found["best"]) is float
    assert torch.equal(torch.as_tensor(found["table"]), torch.arange(3))
    assert found["kept"] == {1, 2}


@pytest.mark.parametrize(("format", "to"), [
    ("safetensors", "m.safetensors"), ("safetensors", "folder"), ("lightning", "l.ckpt"), ("torch", "w.pt"),
])  # fmt: skip
def test_tensors_are_exported_one_at_a_time(tmp_path, format, to):
    run_state(tmp_path / "run.ckpt", {f"layers.{i}.weight": torch.randn(64, 64) for i in range(30)})
    with one_at_a_time(RunState):
        export(str(tmp_path / "run.ckpt"), tmp_path / to, format)


def test_overwriting(llama, tmp_path):
    for format, to in (("torch", "w.pt"), ("hf", "hf")):
        export(llama[0], tmp_path / to, format)
        with pytest.raises(CheckpointError, match="already exists.*--overwrite"):
            export(llama[0], tmp_path / to, format)
        export(llama[0], tmp_path / to, format, overwrite=True)
    assert left_over(tmp_path) == []
    (tmp_path / "hf" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"has other files \(thesis.tex\)"):
        export(llama[0], tmp_path / "hf", "hf", overwrite=True)
    assert (tmp_path / "hf" / "thesis.tex").exists()


def test_errors_leave_the_old_export(llama, tmp_path, monkeypatch):
    written = export(llama[0], tmp_path / "hf", "hf")
    before = {file.name: file.read_bytes() for file in written.iterdir()}
    calls = iter(range(100))
    original = RunState.read

    def read(self, *arguments):
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        return original(self, *arguments)

    monkeypatch.setattr(RunState, "read", read)
    with pytest.raises(CheckpointError, match="could not be written.*No space left"):
        export(llama[0], tmp_path / "hf", "hf", overwrite=True)
    assert {file.name: file.read_bytes() for file in written.iterdir()} == before
    assert os.listdir(tmp_path) == ["hf"]


def test_a_damaged_checkpoint_is_not_exported(llama, tmp_path):
    path = tmp_path / "run.ckpt"
    shutil.copytree(llama[0], path)
    file = path / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"rank_00001\.safetensors"):
        export(str(path), tmp_path / "w.pt", "torch")
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_plain_torch_and_stores(llama, tmp_path):
    path, weights = llama
    assert equal(torch.load(export(path, tmp_path / "w.pt", "torch"), weights_only=True, mmap=True), weights)
    run_state("memory://export/run.ckpt", {"w": torch.arange(5.0)})
    written = export("memory://export/run.ckpt", tmp_path / "stored.pt", "torch")
    assert torch.equal(torch.load(written)["w"], torch.arange(5.0))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"format": "onnx"}, "give one of safetensors, hf, peft, lightning, torch"),
    ({"format": "torch", "max_shard_bytes": 5}, "one file"),
    ({"format": "safetensors", "max_shard_bytes": 0}, "at least 1"),
    ({"format": "lightning", "dtype": "bfloat16"}, "optimizer states belong"),
    ({"format": "torch", "dtype": "int8"}, "give float32, bfloat16"),
    ({"format": "torch", "model": "x"}, "format=hf and format=peft only"),
    ({"format": "torch", "tokenizer": "x"}, "format=hf and format=peft only"),
    ({"format": "peft", "merge": True}, "format=hf only"),
    ({"format": "hf", "merge": True}, "LlamaForCausalLM of .* is not in a PeftModel"),
    ({"format": "peft"}, "without a PeftModel.*resume it"),
    ({"format": "hf", "tokenizer": "."}, "not a tokenizer's folder: it has none of tokenizer.json"),
    ({"format": "torch", "to": "s3://bucket/x"}, "written to local paths"),
    ({"format": "safetensors", "to": "m.safetensors", "max_shard_bytes": 10}, "Give a folder instead"),
])  # fmt: skip
def test_malformed_files_are_refused(llama, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        export(llama[0], **{"to": "out", **arguments})
    assert os.listdir(".") == []


def run_state(path, weights, more=None, **about):
    tree = {"state_dict": {name: {"~": "tensor", "key": f"weights/{name}"} for name in weights}, **(more or {})}
    tensors = {f"weights/{name}": TensorParts.whole(value) for name, value in weights.items()}
    write(Content(tree, tensors, about), str(path))
