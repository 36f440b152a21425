"""16-bit all-gathers of ZeRO-3: half the bytes, bit-identical to autocast."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.parity.harness import Case, Record, make_loader, make_trainer, train, world_size
from tests.parity.modules import LanguageModel, make_module
from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.data.options import ZeroOptions
from trainwright.strategies.data.sharding.rounded import exchanged_rounded

CASE = Case(accumulation=2, clipping="norm")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"no_sync_accumulation": True, "prefetch": 1},
    {"activation_checkpointing": "full"},
    {"offload": "parameters"},
    {"compile": {"backend": "aot_eager"}, "replicate": 1},
]


def equal(ours: Record, theirs: Record) -> bool:
    return ours.losses == theirs.losses and all(
        torch.equal(value, getattr(theirs, kind)[name])
        for kind in ("gradients", "parameters")
        for name, value in getattr(ours, kind).items()
    )


def differing(precision: str) -> list[dict[str, Any]]:
    found = []
    for options in VARIANTS if precision == "bf16-mixed" else VARIANTS[:2]:
        gc.collect()  # hooks of earlier modules would affect torch.compile
        plain = train(CASE, "zero3", {**options, "param_dtype": "fp32"}, precision=precision)
        gc.collect()
        if not equal(train(CASE, "zero3", options, precision=precision), plain):
            found.append(options)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_16_bit_gathers_are_bit_exact(ranks, precision):
    assert ranks(differing, 2, precision, timeout=120) == [[], []]


class Gathers(pl.Callback):
    """Counts gathered and reduced bytes, and checks the dtypes of optimized tensors."""

    def __init__(self) -> None:
        self.bytes = {"all_gather": 0, "reduce_scatter": 0}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.end = listen(self._count)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.end()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in held} == {p.grad.dtype for p in held} == {torch.float32}

    def _count(self, call: Any) -> None:
        if call.kind in self.bytes:
            self.bytes[call.kind] += call.size


def sent(module: pl.LightningModule, options: dict[str, Any], precision: str) -> dict[str, int]:
    counting = Gathers()
    trainer = make_trainer("zero3", options, precision=precision, max_steps=1, max_epochs=-1, callbacks=[counting])
    trainer.fit(module, make_loader(4 * world_size(), 4))
    return counting.bytes


def bytes_of_options() -> list[dict[str, int]]:
    return [
        sent(make_module("decoder-adamw"), options, precision)
        for options, precision in (
            ({}, "32"),
            ({}, "bf16-mixed"),
            ({"param_dtype": "fp32"}, "bf16-mixed"),
            ({"param_dtype": "fp16", "reduce_dtype": "fp16"}, "16-mixed"),
            ({"reduce_dtype": "bf16"}, "32"),
        )
    ]


def test_16_bit_gathers_halve_the_bytes(ranks):
    full, rounded, asked, everything, reduced = ranks(bytes_of_options, 2)[0]
    module = make_module("decoder-adamw")

    def padded(parameter: Tensor) -> int:  # to rows of two ranks
        return 4 * (parameter.numel() + (parameter.shape[0] % 2) * parameter[0].numel())

    matrices = sum(padded(p) for p in module.decoder.blocks.parameters() if p.dim() > 1)
    assert full["all_gather"] - rounded["all_gather"] == 2 * matrices // 2
    assert rounded["reduce_scatter"] == full["reduce_scatter"]
    assert asked == full
    assert everything["all_gather"] == rounded["all_gather"]  # these blocks have no other matrices
    assert everything["reduce_scatter"] == reduced["reduce_scatter"] == full["reduce_scatter"] // 2
    assert reduced["all_gather"] == full["all_gather"]


def without_autocast(function: Any, *args: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return function(*args)


class Unusual(LanguageModel):
    """Uses parameters without autocast, outside of the blocks, and between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.temperature.requires_grad_(False)
        self.decoder.blocks[0].mlp[0].weight.register_hook(lambda gradient: gradient * (1 + 2**-12))
        self.outputs: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        decoder = self.decoder
        x = decoder.blocks[1](without_autocast(decoder.blocks[0], decoder.embedding(tokens)))
        return decoder.head(decoder.norm(x)) * decoder.temperature

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.decoder.head.weight.mul_(1 + 2**-12)  # gathered in full precision
        loss = self.loss(batch)
        with torch.no_grad():
            exact = without_autocast(self.loss, batch)
        return (1 + exact) * loss + self.decoder.head.weight.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], index: int) -> None:
        self.outputs.append(self(batch["tokens"][:, :-1]))


def unusual(options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    module = Unusual()
    trainer = make_trainer("zero3", options, precision="bf16-mixed", max_steps=3, max_epochs=-1)
    trainer.fit(module, make_loader(12, 2))
    return dict(trainer.strategy.whole_parameters()), module.outputs


def unusual_twice() -> bool:
    rounded, plain = unusual({}), unusual({"param_dtype": "fp32"})
    assert {output.dtype for output in rounded[1]} == {torch.float32}
    return all(torch.equal(value, plain[0][name]) for name, value in rounded[0].items()) and all(
        map(torch.equal, rounded[1], plain[1])
    )


def test_full_precision_where_autocast_is_off(ranks):
    assert ranks(unusual_twice, 2) == [True, True]


class Twice(LanguageModel):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + without_autocast(self.loss, batch)


class Within(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        attention = self.decoder.blocks[0].attention
        attention.forward = partial(without_autocast, attention.forward)


def errors() -> list[str]:
    train = partial(make_trainer, "zero3", precision="bf16-mixed", max_steps=1, max_epochs=-1)
    found = []
    for module, text in ((Twice, "with and without autocast before one backward"), (Within, "same dtype")):
        train({"param_dtype": "fp32"}).fit(module(), make_loader(4, 2))
        with pytest.raises(RuntimeError, match=text) as error:
            train({}).fit(module(), make_loader(4, 2))
        found.append("; ".join([str(error.value), *getattr(error.value, "__notes__", [])]))
    return found


def test_errors_name_param_dtype(ranks):
    for found in ranks(errors, 2):
        assert all("strategy.param_dtype=fp32" in text for text in found)


class Kinds(nn.Module):
    """A weight of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.convolution, self.norm = nn.Linear(4, 4), nn.Conv1d(4, 4, 3), nn.LayerNorm(4)
        self.embedding, self.tied = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.embedding.weight
        self.table = nn.Parameter(torch.zeros(4, 4))
        self.half, self.layer = nn.Linear(4, 4).bfloat16(), nn.TransformerEncoderLayer(4, 1, 4)
        self.own = Doubling(4, 4)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def test_rounded_weights():
    module = Kinds()
    assert set(exchanged_rounded(module, None)) == {"linear.weight", "convolution.weight"}
    assert exchanged_rounded(module, "fp32") == {}
    everything = set(exchanged_rounded(module, "bf16"))
    assert everything == {n for n, p in module.named_parameters() if p.dim() > 1 and p.dtype is torch.float32}
    module.linear.weight.register_hook(lambda gradient: gradient)
    assert "linear.weight" not in exchanged_rounded(module, None)


def test_refusals():
    found = list(ZeroOptions(stage=1, param_dtype="bf16", reduce_dtype="half").problems())
    assert "strategy.param_dtype=bf16 with stage 1" in found[1]
    assert "strategy.reduce_dtype=half: unknown" in found[0]
    assert list(ZeroOptions(param_dtype="bf16").precision_problems("bf16-mixed")) == []
    assert list(ZeroOptions(param_dtype="fp32").precision_problems("32")) == []
    assert "precision=16-mixed" in next(ZeroOptions(param_dtype="fp16").precision_problems("bf16-mixed"))
    assert "Allowed: fp32;" in next(ZeroOptions(param_dtype="bf16").precision_problems("32"))
    whole = Layout(replicate=2)
    assert "param_dtype=bf16 with shard=1" in next(ZeroOptions(param_dtype="bf16").layout_problems(whole))
    assert "compression=bf16" in next(ZeroOptions(stage=2, reduce_dtype="bf16").layout_problems(whole))


def setup_refuses() -> str:
    trainer = make_trainer("zero3", {"param_dtype": "bf16"}, max_steps=1)
    with pytest.raises(ValueError, match="param_dtype=bf16 with precision=32") as refused:
        trainer.fit(make_module("decoder-sgd"), make_loader(4, 2))
    return str(refused.value)


def test_precision_is_checked_at_setup(ranks):
    assert all("type precision=bf16-mixed" in text for text in ranks(setup_refuses, 2))
