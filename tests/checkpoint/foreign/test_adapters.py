"""Exported adapters, loaded by peft and transformers."""

import json
import os

import pytest
import safetensors.torch
import torch

from tests.checkpoint.adapted import KINDS, AdaptedModule, adapted, begin_adapted, changed, save_adapted
from tests.checkpoint.foreign.test_export import equal, run_state
from tests.checkpoint.saved import logits, model
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.hugging_face import hugging_face_facts, peft_facts
from trainwright.core.errors import CheckpointError
from trainwright.tools.checkpoints.command import run_checkpoint_command


def loaded_by_peft(folder, base):
    import peft

    return peft.PeftModel.from_pretrained(base, folder)


def loaded_merged(folder):
    import transformers

    found, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return found


def saved(path, network, **about):
    """A checkpoint of a module with ``network`` as its ``model``."""
    module = torch.nn.ModuleDict({"model": network})
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    run_state(path, weights, **{"hugging_face": hugging_face_facts(module), "peft": peft_facts(module), **about})
    return str(path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("adapter", "strategy", "options"), [
    ("lora", "zero3", None), ("dora", "zero3", None), ("ia3", "zero3", None),
    ("lora", "hybrid", {"pipeline": 2, "shard": 1, "plan": {"last": ["temperature"]}}),
    ("dora", "hybrid", {"tensor": 2, "shard": 1}),
], ids=["lora", "dora", "ia3", "pipeline", "tensor"])  # fmt: skip
def test_trained_adapters_are_exported(ranks, tmp_path, adapter, strategy, options):
    path = str(tmp_path / "run.ckpt")
    weights = ranks(save_adapted, 2, path, adapter, strategy, options)[0]
    module = AdaptedModule(adapter)
    before = {name: value.clone() for name, value in module.named_parameters() if value.requires_grad}
    module.load_state_dict(weights, strict=options is None)
    assert all(not torch.equal(value, weights[name]) for name, value in before.items())
    again = loaded_by_peft(export(path, tmp_path / "peft", "peft"), model("llama", tied=False))
    assert torch.equal(logits(again), logits(module.model))
    # The names of its files are those that peft itself writes.
    module.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / of / "adapter_model.safetensors") for of in ("peft", "theirs")
    )
    assert equal(ours, theirs)
    config, expected = (json.loads((tmp_path / of / "adapter_config.json").read_text()) for of in ("peft", "theirs"))
    assert {n: sorted(v) if isinstance(v, list) else v for n, v in config.items()} == {
        n: sorted(v) if isinstance(v, list) else v for n, v in expected.items()
    }
    merged = loaded_merged(export(path, tmp_path / "hf", "hf", merge=True))
    torch.testing.assert_close(merged.state_dict(), again.merge_and_unload().state_dict(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(logits(merged), logits(module.model), atol=1e-5)


@pytest.mark.parametrize(("strategy", "options"), [
    ("zero3", {}), ("hybrid", {"pipeline": 2, "shard": 1, "plan": {"last": ["temperature"]}}),
], ids=["zero3", "pipeline"])  # fmt: skip
def test_adapted_run_starts_from_hugging_face(ranks, tmp_path, strategy, options):
    """Base weights from a folder without adapters, whose head is tied; the adapter keeps its initial values."""
    base = model("llama", tied=True)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.5)
    base.save_pretrained(tmp_path / "hf")
    found = ranks(begin_adapted, 2, str(tmp_path / "hf"), "lora", strategy, options, False)[0]
    module = AdaptedModule("lora", tied=True)
    adapter = {name: value for name, value in module.named_parameters() if "lora_" in name}
    assert len(adapter) == 28
    for name, value in adapter.items():
        assert torch.equal(found.pop(name), value), name
    head = base.get_input_embeddings().weight
    assert torch.equal(found.pop("model.base_model.model.lm_head.modules_to_save.default.weight"), head)
    del found["temperature"]
    plain = {name.replace(".base_layer.", ".").replace(".original_module.", "."): v for name, v in found.items()}
    assert plain.keys() <= {f"model.base_model.model.{name}" for name in base.state_dict()}
    assert len(plain) == len(list(base.parameters()))
    assert all(torch.equal(v, base.state_dict()[n.removeprefix("model.base_model.model.")]) for n, v in plain.items())


def test_adapters_of_other_base_weights(tmp_path):
    model("llama", tied=True).save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"missing \(2\): temperature; steps\n"):
        begin_adapted(str(tmp_path / "hf"), "lora", "single", {}, True)
    with pytest.raises(CheckpointError, match=r"use_dora=True.*from_pretrained"):
        begin_adapted(str(tmp_path / "hf"), "dora", "single", {}, False)
    weights = save_adapted(str(tmp_path / "run.ckpt"), "dora", "single")
    found = begin_adapted(str(tmp_path / "run.ckpt"), "dora", "single", {}, True, tied=False)
    assert all(torch.equal(value, weights[name]) for name, value in found.items())


OTHERS = {
    "conv1d": ("gpt2", True, "LoraConfig", {"r": 4, "bias": "lora_only", "rank_pattern": {"c_attn": 2}}),
    "conv1d, ia3": ("gpt2", True, "IA3Config", {}),
    "lora's own bias": ("gpt2", True, "LoraConfig", {"r": 2, "lora_bias": True}),
    "embeddings": ("llama", False, "LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "embeddings, dora": ("gpt2", False, "LoraConfig", {"r": 2, "use_dora": True, "target_modules": ["wte", "c_attn"]}),
}


@pytest.mark.parametrize(("kind", "tied", "config", "options"), OTHERS.values(), ids=OTHERS)
def test_other_layers(tmp_path, kind, tied, config, options):
    network = changed(adapted(model(kind, tied), config, options))
    path = saved(tmp_path / "run.ckpt", network)
    again = loaded_by_peft(export(path, tmp_path / "peft", "peft"), model(kind, tied))
    assert torch.equal(logits(again), logits(network))
    merged = loaded_merged(export(path, tmp_path / "hf", "hf", merge=True))
    torch.testing.assert_close(merged.state_dict(), again.merge_and_unload().state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}])
def test_merging_unties_weights(tmp_path, options):
    network = changed(adapted(model("llama", True), "LoraConfig", {"init_lora_weights": False, **options}))
    merged = loaded_merged(export(saved(tmp_path / "run.ckpt", network), tmp_path / "hf", "hf", merge=True))
    assert torch.allclose(logits(merged), logits(network), atol=1e-5)
    assert not merged.config.tie_word_embeddings


@pytest.mark.parametrize(("config", "options"), [
    ("LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}), ("VeraConfig", {"r": 2}),
    ("LoraConfig", {"trainable_token_indices": [1, 2]}),
])  # fmt: skip
def test_unmergeable_adapters_are_exported_separately(tmp_path, config, options):
    network = changed(adapted(model("llama", False), config, options))
    path = saved(tmp_path / "run.ckpt", network)
    again = loaded_by_peft(export(path, tmp_path / "peft", "peft"), model("llama", False))
    assert torch.equal(logits(again), logits(network))
    with pytest.raises(CheckpointError, match="has layers of the kind .*cannot be merged here.*merge_and_unload"):
        export(path, tmp_path / "hf", "hf", merge=True)
    assert not (tmp_path / "hf").exists()


def test_trained_base_weights_are_exported(tmp_path):
    """Also those that its configuration does not name, which peft alone would forget."""
    network = adapted(model("llama", False), *KINDS["ia3"])
    network.get_input_embeddings().requires_grad_(True)
    trained = [f"model.{name}" for name, value in changed(network).named_parameters() if value.requires_grad]
    path = saved(tmp_path / "run.ckpt", network, more={"trainwright": {"trained": trained}})
    again = loaded_by_peft(export(path, tmp_path / "peft", "peft"), model("llama", False))
    assert torch.equal(logits(again), logits(network))


def test_path_of_the_base_is_absolute(tmp_path, monkeypatch):
    import transformers

    model("llama", False).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    path = saved("run.ckpt", adapted(transformers.AutoModelForCausalLM.from_pretrained("base"), *KINDS["ia3"]))
    config = json.loads((export(path, tmp_path / "peft", "peft") / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_grown_vocabulary_is_exported(tmp_path):
    base = model("llama", False)
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(44)
    network = changed(adapted(base, *KINDS["dora"]))
    path = saved(tmp_path / "run.ckpt", network, init_from=str(tmp_path / "base"))
    folder = export(path, tmp_path / "peft", "peft")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    fresh = model("llama", False)
    fresh.resize_token_embeddings(44)
    again = loaded_by_peft(folder, fresh)
    assert torch.equal(logits(again), logits(network))
    assert torch.equal(again.get_input_embeddings().weight, network.get_input_embeddings().weight)


def test_merged_weights_are_converted(tmp_path):
    network = changed(adapted(model("llama", False), *KINDS["lora"]))
    path = saved(tmp_path / "run.ckpt", network)
    merged = loaded_merged(export(path, tmp_path / "hf", "hf", merge=True, dtype="bfloat16", max_shard_bytes=5000))
    assert merged.dtype == torch.bfloat16
    expected = {name: value.bfloat16() for name, value in network.merge_and_unload().state_dict().items()}
    assert equal(dict(merged.state_dict()), expected)


def test_one_active_adapter_is_exported(tmp_path):
    import peft

    network = adapted(model("llama", False), *KINDS["dora"])
    network.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    network.set_adapter("other")
    changed(network)
    with pytest.warns(UserWarning, match="active adapter 'other' is exported; 'default' are skipped"):
        folder = export(saved(tmp_path / "run.ckpt", network), tmp_path / "peft", "peft")
    assert torch.equal(logits(loaded_by_peft(folder, model("llama", False))), logits(network))
    network.base_model.set_adapter(["default", "other"])
    with pytest.raises(CheckpointError, match="'default', 'other' of model are active.*set_adapter"):
        export(saved(tmp_path / "both.ckpt", network), tmp_path / "both", "peft")


@pytest.mark.parametrize(("adapter", "about", "message"), [
    ("lora", {"peft": []}, "without a PeftModel"),
    ("lora", {"hugging_face": []}, "not one of those in layers of a Hugging Face model"),
    ("lora", {"class": "Path"}, "Path is not a transformers model"),
    ("lora", {"config": {"num_hidden_layers": 1}}, r"other tensors than the checkpoint \(.*layers\.1"),
    ("prompt", {}, r"\(PROMPT_TUNING\) is not one of those in layers"),
    ("lora", {"peft_type": "XLORA", "adapters": {"a": "https://host/a"}}, r"\(XLORA\) is not one of those in layers"),
])  # fmt: skip
def test_unknown_adapters_are_refused(tmp_path, monkeypatch, adapter, about, message):
    monkeypatch.setitem(KINDS, "prompt", ("PromptTuningConfig", {"num_virtual_tokens": 3}))
    network = adapted(model("llama", False), *KINDS[adapter])
    (facts,) = hugging_face_facts(torch.nn.ModuleDict({"model": network}))
    if "class" in about or "config" in about:
        merged = {**facts, **about, "config": {**facts["config"], **about.get("config", {})}}
        about = {"hugging_face": [merged]}
    if "peft_type" in about:
        about = {"peft": [{"prefix": "model", "adapters": {"default": about}, "active": ["default"]}]}
    path = saved(tmp_path / "run.ckpt", network, **about)
    with pytest.raises(CheckpointError, match=message):
        export(path, tmp_path / "peft", "peft")
    assert not (tmp_path / "peft").exists()


def test_configuration_imports_no_package_and_fetches_no_kernel(tmp_path, monkeypatch):
    network = changed(adapted(model("llama", False), *KINDS["dora"]))
    module = torch.nn.ModuleDict({"model": network})
    (base,), (adapter,) = hugging_face_facts(module), peft_facts(module)
    base["config"]["attn_implementation"] = "kernels-community/any"
    adapter["adapters"]["default"] |= {"megatron_config": {"a": 1}, "megatron_core": "imported_by_name"}
    (tmp_path / "imported_by_name.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = saved(tmp_path / "run.ckpt", network, hugging_face=[base], peft=[adapter])
    found = safetensors.torch.load_file(export(path, tmp_path / "hf", "hf", merge=True) / "model.safetensors")
    assert equal(found, dict(network.merge_and_unload().state_dict()))


def test_the_command_copies_the_tokenizer_of_the_run(tmp_path, capsys):
    network = changed(adapted(model("llama", False), *KINDS["dora"]))
    path = saved(tmp_path / "run" / "checkpoints" / "step=3", network)
    told = export_by_command(capsys, path, "--format", "peft", "--to", str(tmp_path / "bare"))
    assert "without a tokenizer" in told
    assert sorted(os.listdir(tmp_path / "bare")) == [
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json",
    ]  # fmt: skip
    (tmp_path / "run" / "tokenizer").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", ".netrc", "train.py"):
        (tmp_path / "run" / "tokenizer" / name).write_text(name)
    for to, options in (("bare", ["--format", "peft", "--overwrite"]), ("hf", ["--format", "hf", "--merge"])):
        for overwrite in ([], ["--overwrite"]):  # with these files in it, too
            told = export_by_command(capsys, path, "--to", str(tmp_path / to), *options, *overwrite)
            assert "tokenizer" not in told
        names = set(os.listdir(tmp_path / to))
        assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} < names
        assert not names & {".netrc", "train.py"}
        assert (tmp_path / to / "tokenizer.json").read_text() == "tokenizer.json"


def export_by_command(capsys, *words):
    assert run_checkpoint_command(["checkpoint", "export", *words]) == 0
    return capsys.readouterr().err


def test_links_among_tokenizer_files_are_refused(tmp_path):
    path = saved(tmp_path / "run.ckpt", model("llama", False))
    (tmp_path / "secret").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read .*links are not followed"):
        export(path, tmp_path / "hf", "hf", tokenizer=tmp_path / "mine")
    assert not (tmp_path / "hf").exists()
