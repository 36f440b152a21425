"""Checkpoints of real runs as files of other tools, read by these tools."""

import json
import os
import shutil
import weakref
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.checkpoint.saved import LanguageModule, Losses, loader, logits, model, save, save_cut
from tests.parity.harness import QUIET
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
    return path, ranks_of_module(save, 2, path, "zero3")[0]


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


def test_safetensors_as_one_file(llama, tmp_path):
    path, weights = llama
    written = export(path, tmp_path / "model.safetensors", "safetensors")
    found = safetensors.torch.load_file(written)
    assert "model.lm_head.weight" not in found  # tied, so written once
    weights = {name: value for name, value in weights.items() if name != "model.lm_head.weight"}
    assert equal(found, weights)
    assert left_over(tmp_path) == []


def test_the_safetensors_package_loads_it_into_the_module(llama, tmp_path):
    path, weights = llama
    module = LanguageModule()
    safetensors.torch.load_model(module, export(path, tmp_path / "model.safetensors", "safetensors"))
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


def test_a_tensor_above_the_limit_is_a_shard_of_its_own(llama, tmp_path):
    folder = export(llama[0], tmp_path / "out", "safetensors", max_shard_bytes=1)
    assert len(list(folder.glob("*.safetensors"))) == len(llama[1]) - 1


def test_converted_weights(llama, tmp_path):
    path, weights = llama
    found = safetensors.torch.load_file(export(path, tmp_path / "m.safetensors", "safetensors", dtype="bfloat16"))
    assert found["temperature"].dtype == torch.bfloat16
    assert found["steps"].dtype == torch.int64  # counts are no weights
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], weights[name].bfloat16())


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path):
    run_state(tmp_path / "run.ckpt", {"w": torch.tensor([1.0, 1e6])})
    with pytest.raises(CheckpointError, match=r"w has values that torch\.float16 cannot hold.*bfloat16"):
        export(str(tmp_path / "run.ckpt"), tmp_path / "m.pt", "torch", dtype="float16")
    assert os.listdir(tmp_path) == ["run.ckpt"]


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
def test_from_a_layout_that_cuts_the_module(ranks, tmp_path, options):
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


def test_converted_model_says_its_dtype(llama, tmp_path):
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(export(llama[0], tmp_path / "hf", "hf", dtype="bf16"))
    assert loaded.dtype == torch.bfloat16


def test_a_checkpoint_without_facts_is_refused(tmp_path):
    run_state(tmp_path / "run.ckpt", {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="made from a module without a Hugging Face model.*format=safetensors"):
        export(str(tmp_path / "run.ckpt"), tmp_path / "hf", "hf")


def test_of_several_models_one_is_chosen(tmp_path):
    fact = {"class": "X", "config": {}, "generation_config": None, "tied": [], "dtype": "float32"}
    weights = {"student.w": torch.ones(2), "teacher.w": torch.zeros(2)}
    facts = [{**fact, "prefix": "student"}, {**fact, "prefix": "teacher"}]
    run_state(tmp_path / "run.ckpt", weights, hugging_face=facts)
    with pytest.raises(CheckpointError, match="models at 'student', 'teacher', and none was selected"):
        export(str(tmp_path / "run.ckpt"), tmp_path / "hf", "hf")
    folder = export(str(tmp_path / "run.ckpt"), tmp_path / "hf", "hf", model="teacher")
    assert equal(safetensors.torch.load_file(folder / "model.safetensors"), {"w": torch.zeros(2)})


def test_adapters_are_refused(tmp_path):
    fact = {"prefix": "m", "class": "X", "config": {}, "generation_config": None, "tied": [], "dtype": "float32"}
    run_state(tmp_path / "run.ckpt", {"m.q.lora_A.default.weight": torch.ones(2)}, hugging_face=[fact])
    with pytest.raises(CheckpointError, match=r"X has adapters .*--merge.*format=peft"):
        export(str(tmp_path / "run.ckpt"), tmp_path / "hf", "hf")


def test_load_from_checkpoint(llama, tmp_path):
    path, weights = llama
    file = export(path, tmp_path / "l.ckpt", "lightning")
    module = LanguageModule.load_from_checkpoint(file, weights_only=True)
    assert equal(module.state_dict(), weights)
    assert dict(module.hparams) == {"kind": "llama", "tied": True, "learning_rate": 0.01}
    # Tied weights are one tensor in the file as well.
    state = torch.load(file, weights_only=True)["state_dict"]
    assert state["model.lm_head.weight"].data_ptr() == state["model.model.embed_tokens.weight"].data_ptr()


def test_lightning_goes_on_as_from_its_own_file(tmp_path):
    """Lightning's own Trainer and strategy, from the exported file."""
    save(str(tmp_path / "run.ckpt"))
    ours = export(str(tmp_path / "run.ckpt"), tmp_path / "ours.ckpt", "lightning")
    theirs = tmp_path / "theirs.ckpt"
    trainer = pl.Trainer(**QUIET, max_steps=3, max_epochs=-1)
    trainer.fit(LanguageModule(), loader())
    trainer.save_checkpoint(theirs)
    losses = [resumed_by_lightning(file) for file in (ours, theirs)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def resumed_by_lightning(file):
    losses = Losses()
    trainer = pl.Trainer(**{**QUIET, "callbacks": [losses]}, max_steps=6, max_epochs=-1)
    trainer.fit(LanguageModule(), loader(), ckpt_path=str(file), weights_only=True)
    return losses.values


def test_optimizer_states_have_lightnings_form(tmp_path):
    save(str(tmp_path / "run.ckpt"))
    trainer = pl.Trainer(**QUIET, max_steps=3, max_epochs=-1)
    trainer.fit(LanguageModule(), loader())
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    theirs = torch.load(tmp_path / "theirs.ckpt", weights_only=True)
    ours = torch.load(export(str(tmp_path / "run.ckpt"), tmp_path / "ours.ckpt", "lightning"), weights_only=True)
    assert ours.keys() - {"trainwright"} == theirs.keys()
    (our_state,), (their_state,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert our_state["param_groups"] == their_state["param_groups"]
    assert our_state["state"].keys() == their_state["state"].keys()
    for position, values in their_state["state"].items():
        assert equal(our_state["state"][position], values)
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]


def test_plain_torch(llama, tmp_path):
    path, weights = llama
    assert equal(torch.load(export(path, tmp_path / "w.pt", "torch"), weights_only=True, mmap=True), weights)


def test_values_that_need_other_classes_become_plain_ones(tmp_path):
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
def test_no_more_than_one_tensor_is_held(tmp_path, monkeypatch, format, to):
    weights = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(30)}
    run_state(tmp_path / "run.ckpt", weights)
    held, most, original = 0, 0, RunState.read

    def freed():
        nonlocal held
        held -= 1

    def read(self, *arguments):
        nonlocal held, most
        tensor = original(self, *arguments)
        held += 1
        most = max(most, held)
        weakref.finalize(tensor, freed)
        return tensor

    monkeypatch.setattr(RunState, "read", read)
    export(str(tmp_path / "run.ckpt"), tmp_path / to, format)
    assert most <= 2  # one is being written while the next one is read
    assert held == 0


def test_what_is_there_is_kept_unless_told(llama, tmp_path):
    for format, to in (("torch", "w.pt"), ("hf", "hf")):
        export(llama[0], tmp_path / to, format)
        with pytest.raises(CheckpointError, match="already exists.*--overwrite"):
            export(llama[0], tmp_path / to, format)
        export(llama[0], tmp_path / to, format, overwrite=True)
    assert left_over(tmp_path) == []


def test_a_folder_with_other_things_in_it_is_never_replaced(llama, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"has other files \(thesis.tex\)"):
        export(llama[0], tmp_path / "home", "hf", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_an_error_leaves_what_was_there(llama, tmp_path, monkeypatch):
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


def test_from_a_store(tmp_path):
    run_state("memory://export/run.ckpt", {"w": torch.arange(5.0)})
    written = export("memory://export/run.ckpt", tmp_path / "w.pt", "torch")
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
    ({"format": "torch", "to": "s3://bucket/x"}, "written to this machine"),
    ({"format": "safetensors", "to": "m.safetensors", "max_shard_bytes": 10}, "Give a folder instead"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(llama, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        export(llama[0], **{"to": "out", **arguments})
    assert os.listdir(".") == []


def run_state(path, weights, more=None, **about):
    tree = {"state_dict": {name: {"~": "tensor", "key": f"weights/{name}"} for name in weights}, **(more or {})}
    tensors = {f"weights/{name}": TensorParts.whole(value) for name, value in weights.items()}
    write(Content(tree, tensors, about), str(path))
