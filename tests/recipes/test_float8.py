"""Recipes with linear layers in float8, emulated on the CPU."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchao.float8.float8_linear import Float8Linear

from tests.parity.harness import Recorder, make_trainer, world_size
from tests.recipes.conftest import write_text
from trainwright.command.schema.compose import compose
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.extras import check_float8
from trainwright.recipes.float8 import to_float8
from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.strategies.contract.communication.calls import listen

SIZES = GPTConfig(layers=4, dim=64, heads=4, seq_len=32)
# Of a loss: float8 numbers have 3 bits besides the leading one.
BOUND = 0.01


def losses(
    folder: str, options: dict[str, Any] | None, float8: str | None = "rowwise", meta: bool = False
) -> list[float]:
    torch.manual_seed(0)
    module = GPTModule(SIZES, partial(SGD, lr=0.1), warmup_steps=0, meta=meta, float8=float8)
    recorder = Recorder()
    ranks = {"tensor", "pipeline", "context"} & (options or {}).keys()
    data = TextCorpus(Path(folder) / "text.txt", seq_len=32, batch_size=8 if ranks else 8 // world_size())
    trainer = make_trainer(
        *(("single", {}) if options is None else ("hybrid", {**options, "certificate": "refuse"})),
        precision="bf16-mixed",
        max_steps=3,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[recorder],
    )
    trainer.fit(module, data)
    return recorder.record.losses


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_text(tmp_path).parent)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 3}, {"tensor": 2, "shard": 1}, {"pipeline": 2, "shard": 1}, {"context": 2, "shard": 1}],
    ids=str,
)
def test_layouts_stay_near_one_process(
    ranks: Any, reference: Any, folder: str, options: dict[str, Any], recipe: str
) -> None:
    plain, expected = (reference(losses, folder, None, float8) for float8 in (None, recipe))
    assert expected != plain
    assert expected == pytest.approx(plain, rel=BOUND)
    for found in ranks(losses, 2, folder, options, recipe):
        assert found == pytest.approx(expected, rel=BOUND)


def gathered(folder: str) -> dict[str, tuple[list[float], int]]:
    found = {}
    for name, options, recipe in (
        ("ddp", {"replicate": 3, "shard": 1}, "tensorwise"),
        ("float8", {"stage": 3}, "tensorwise"),
        ("offloaded", {"stage": 3, "prefetch": 1, "offload": "parameters"}, "tensorwise"),
        ("fp32", {"stage": 3}, "rowwise"),
    ):
        calls: list[Any] = []
        end = listen(calls.append)
        seen = losses(folder, options, recipe)
        end()
        found[name] = seen, sum(call.size for call in calls if call.kind == "all_gather")
    return found


def test_zero3_gathers_weights_in_float8(ranks: Any, folder: str) -> None:
    weights = [p for p in GPT(SIZES).blocks.parameters() if p.dim() > 1]
    padded = sum(math.ceil(len(p) / 3) * 3 * p.shape[1] for p in weights)
    for found in ranks(gathered, 3, folder):
        expected, _ = found["ddp"]
        assert found["float8"][0] == found["offloaded"][0] == expected
        assert found["fp32"][0] != expected
        # Forward and backward of three steps and of the certificate gather one byte instead of four.
        assert found["fp32"][1] - found["float8"][1] == 8 * 3 * padded


class OnlyLinear(pl.LightningModule):
    """Has nothing but float8 weights in its blocks, and changes weights and its way of training between gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        to_float8(self, "tensorwise")
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            loss = self.layers[1](self.layers[0](batch)).square().mean()
            self.manual_backward(loss)
            self.optimizers().step()
            self.seen.append(float(loss))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(1.5)
        self.seen.append(float(self.layers[0](batch).sum()))

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.5)


def manual(strategy: str) -> list[float]:
    torch.manual_seed(0)
    module = OnlyLinear()
    trainer = make_trainer(strategy, precision="bf16-mixed", max_steps=4, max_epochs=-1)
    trainer.fit(module, DataLoader(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)), batch_size=2))
    return module.seen


def test_float8_gathers_follow_changed_weights(ranks: Any) -> None:
    for found, expected in zip(ranks(manual, 2, "zero3"), ranks(manual, 2, "ddp"), strict=True):
        assert len(found) == 6
        assert found == expected


def test_tensorwise_scales_of_parts_are_refused_as_inexact(ranks: Any, folder: str) -> None:
    with pytest.raises(AssertionError, match=r"context=2: .* does not compute the same on a part of the sequence"):
        ranks(losses, 2, folder, {"context": 2, "shard": 1}, "tensorwise")


@pytest.mark.thorough
def test_deferred_builds_begin_with_the_same_weights(ranks: Any, folder: str) -> None:
    first, deferred = (ranks(losses, 2, folder, {"stage": 3}, "rowwise", meta)[0][0] for meta in (False, True))
    assert first == pytest.approx(deferred, rel=0.05)  # other draws of the same distribution


def test_only_layers_of_blocks_are_converted() -> None:
    model = GPT(SIZES)
    parameters = list(model.named_parameters())
    calls = []
    model.blocks[0].attention.out.register_forward_hook(lambda *call: calls.append(1))
    found = to_float8(model, "tensorwise")
    assert len(found) == 7 * SIZES.layers
    assert all(isinstance(model.get_submodule(name), Float8Linear) for name in found)
    assert sum(isinstance(part, Float8Linear) for part in model.modules()) == len(found)
    assert all(one is other for (_, one), (_, other) in zip(parameters, model.named_parameters(), strict=True))
    model(torch.zeros(1, 8, dtype=torch.long))
    assert calls == [1]
    std = float(model.blocks[0].attention.out.weight.std())
    model.blocks[0].attention.out.reset_parameters()
    assert float(model.blocks[0].attention.out.weight.std()) == pytest.approx(std, rel=0.2)  # not nn.Linear's


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="float8=row .allowed: rowwise, tensorwise"):
        to_float8(GPT(SIZES), "row")
    with pytest.raises(ValueError, match="no nn.Linear in an nn.ModuleList whose sizes are multiples of 16"):
        to_float8(nn.ModuleList([nn.Linear(8, 8)]), "rowwise")
    with pytest.raises(ValueError, match="multiples of 32"):
        to_float8(nn.ModuleList([nn.Linear(48, 32)]), "mxfp8")
    model = nn.Sequential(nn.ModuleList([nn.Linear(32, 64)]))
    to_float8(model, "mxfp8")
    layer = model[0][0]
    layer.weight = nn.Parameter(layer.weight[:48])  # of one rank
    with pytest.raises(ValueError, match="mxfp8: 48 outputs of a layer on one rank"):
        layer(torch.randn(4, 32))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match="capability 10.0 or more .B200.; this one has 9.0"):
        to_float8(GPT(SIZES), "mxfp8")


@pytest.mark.parametrize("recipe", ["gpt", "hf_causal_lm"])
def test_configurations(recipe: str) -> None:
    cfg = compose(recipe, ["module.float8=row"])
    assert "trainwright.recipes.extras:check_float8" in cfg.checks
    wrong, precision = check_float8(cfg, 1)
    assert "module.float8=row (allowed: null, rowwise" in wrong
    assert "precision=bf16-mixed (or bf16-true)" in precision
    assert check_float8(compose(recipe, ["module.float8=rowwise", "precision=bf16-mixed"]), 1) == []
    assert check_float8(compose(recipe), 1) == []
