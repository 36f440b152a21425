"""Adapters with frozen weights in four bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import AdamW

from tests.parity.harness import make_trainer
from tests.recipes.finetune.fixtures import write_base, write_chats
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.core.errors import CheckpointError
from trainwright.recipes.finetune.checks import _of_adapter
from trainwright.recipes.finetune.data import FineTuneData
from trainwright.recipes.finetune.module import FineTuneModule
from trainwright.recipes.finetune.quantized import LEVELS, NF4Linear, QuantizedSource, dequantize, quantize
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.plan.blocks import count_parameters

LORA = {"kind": "lora", "quantize": "nf4", "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SIZES = {"hidden_size": 48, "intermediate_size": 72}  # rows and blocks are not aligned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("quantized")
    write_base(made / "base", **SIZES)
    write_chats(made / "chats.jsonl")
    return made


def module_of(folder: Path, meta: bool | str = "auto", **adapter: Any) -> FineTuneModule:
    optimizer = partial(AdamW, lr=1e-2, eps=1e-4)
    given = {"optimizer": optimizer, "warmup_steps": 0, "schedule_steps": 4, "seq_len": 96}
    return FineTuneModule(str(folder / "base"), {**LORA, **adapter}, meta, **given)


class QuantizedBytes(Callback):
    """Record the storage bytes of weights in four bits after a step."""

    sees_parts = True  # parameters as sharded

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        parts = [local_tensor(value) for value in pl_module.parameters() if value.dtype == torch.uint8]
        self.bytes = sum(
            {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values()
        )


def train(
    folder: Path, strategy: str, steps: int = 4, resumed: str | None = None, saved: str | None = None
) -> dict[str, Any]:
    """Return losses of a run, all weights after it, and bytes of quantized weights on this rank."""
    options = {"global_batch_size": 4, "max_steps": steps, "max_epochs": -1, "loss_weighting": "tokens"}
    trainer = make_trainer(strategy, None, callbacks=[held := QuantizedBytes()], **options)
    batch_size = 4 // trainer.world_size
    data = FineTuneData(
        str(folder / "chats.jsonl"), folder / "base", "chat", 96, batch_size, held_out=0.25, cache_dir=folder / "cache"
    )
    module = module_of(folder)
    trainer.fit(module, data, ckpt_path=resumed)
    losses = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    if saved is not None:
        trainer.save_checkpoint(saved)
    trainer.validate(module, data, verbose=False)
    losses["after"] = float(trainer.callback_metrics["val_loss"])
    return {
        "losses": losses,
        "weights": {name: value.clone() for name, value in trainer.strategy.whole_parameters()},
        "bytes": held.bytes,
    }


def compare(found: dict[str, Any], wanted: dict[str, Any], **limits: float) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, **limits)


def test_quantized_values_are_the_nearest(folder: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 5, dtype=torch.float64).float()
    weight[:13] = 0  # a whole block
    packed = quantize(weight)
    assert packed.shape == (3, 36)
    assert packed.dtype == torch.uint8
    found = dequantize(packed, weight.shape)
    for part, got in zip(weight.flatten().split(64), found.flatten().split(64), strict=True):
        values = torch.tensor(LEVELS) * part.abs().max()
        nearest = values[(part[:, None] - values).abs().argmin(dim=1)]
        assert torch.equal(got, nearest)
        assert (got - part).abs().max() <= (LEVELS[1] - LEVELS[0]) / 2 * part.abs().max() * (1 + 1e-6)
    assert torch.equal(quantize(found), packed)
    # The error of normally distributed weights is a tenth of their norm.
    normal = torch.randn(512, 512)
    assert (dequantize(quantize(normal), normal.shape) - normal).norm() / normal.norm() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_equal_the_dequantized_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 40)
    layer = NF4Linear(linear)
    weight = dequantize(layer.weight, (40, 48), dtype)
    inputs = torch.randn(2, 3, 48, dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        found = layer(inputs)
    assert [kept.data_ptr() for kept in saved] == [layer.weight.data_ptr()]
    wanted = F.linear(inputs, weight) + linear.bias.to(dtype)
    assert torch.equal(found, wanted)
    gradient = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(each, inputs, gradient)[0] for each in (found, wanted)))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16


def test_parts_of_a_file_are_quantized_like_the_whole(folder: Path) -> None:
    source = SafetensorsFolder(str(folder / "base"))
    held = QuantizedSource(source, ["model.base_model.model.model.layers.0.mlp.down_proj.weight"])
    key = "model.layers.0.mlp.down_proj.weight"
    whole = quantize(source.read(key))
    assert held.shape(key) == tuple(whole.shape)
    assert held.dtype(key) == torch.uint8
    assert torch.equal(held.read(key), whole)
    for begin, rows in ((0, 1), (1, 2), (7, 5), (whole.shape[0] - 1, 1)):
        assert torch.equal(held.read(key, (begin, 0), (rows, 36)), whole[begin : begin + rows])
    assert torch.equal(held.read(key, (3, 30), (4, 6)), whole[3:7, 30:])
    other = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(held.read(other), source.read(other))


def test_quantized_layers(folder: Path) -> None:
    module = module_of(folder, meta=False)
    layers = {name for name, layer in module.named_modules() if isinstance(layer, NF4Linear)}
    assert len(layers) == 2 * 7
    files = safetensors.torch.load_file(folder / "base" / "model.safetensors")
    for name, value in module.state_dict().items():
        plain = name.replace("model.base_model.model.", "").replace(".base_layer.", ".")
        if "lora_" not in name:
            kept = files[plain]
            assert torch.equal(value, quantize(kept) if plain.rpartition(".")[0].endswith("_proj") else kept)
    adapters = sum(weight.numel() for name, weight in module.named_parameters() if "lora_" in name)
    assert count_parameters(module) == adapters + sum(kept.numel() for kept in files.values()), "not the packed bytes"


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_trains_as_one_process(ranks: Any, reference: Any, folder: Path, strategy: str) -> None:
    wanted = reference(train, folder, "single")
    found = ranks(train, 2, folder, strategy)
    compare(found[0], wanted, rtol=1e-4, atol=1e-5)
    assert wanted["weights"]["model.base_model.model.model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    held = {"ddp": wanted["bytes"], "zero3": wanted["bytes"] / 2}[strategy]
    # A shard of a layer may have a block more than another.
    assert [each["bytes"] for each in found] == pytest.approx([held] * 2, abs=14 * 36 if strategy == "zero3" else 0)


@pytest.mark.thorough
def test_resumes_under_another_strategy_and_exports(ranks: Any, reference: Any, folder: Path, tmp_path: Path) -> None:
    import peft
    import transformers

    wanted = reference(train, folder, "single")
    path = str(tmp_path / "run.ckpt")
    ranks(train, 2, folder, "zero3", 2, None, path)
    compare(ranks(train, 2, folder, "ddp", 4, path, str(tmp_path / "end.ckpt"))[0], wanted, rtol=1e-4, atol=1e-5)
    module = module_of(folder, meta=False)
    module.load_state_dict(wanted["weights"], strict=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    for name, parameter in base.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = dequantize(quantize(parameter), parameter.shape)
    exported = export(str(tmp_path / "end.ckpt"), tmp_path / "peft", "peft")
    found = peft.PeftModel.from_pretrained(base, exported)
    tokens = torch.arange(24)[None]
    torch.testing.assert_close(found(tokens).logits, module.model(tokens).logits, rtol=1e-3, atol=1e-3)
    with pytest.raises(CheckpointError, match="quantized base weights"):
        export(str(tmp_path / "end.ckpt"), tmp_path / "hf", "hf", merge=True)


@pytest.mark.parametrize(("adapter", "words"), [
    ({"kind": "dora", "quantize": "nf4"}, "norms of whole weights"),
    ({"kind": "lora", "quantize": "int3"}, "allowed: null, nf4"),
    ({"quantize": "nf4"}, "Type adapter=lora"),
])  # fmt: skip
def test_refused(adapter: dict[str, Any], words: str) -> None:
    (problem,) = _of_adapter(adapter)
    assert words in problem


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "gpt2")
    with pytest.raises(ValueError, match="no frozen nn.Linear"):
        module_of(tmp_path, meta=False, target_modules="all-linear")
