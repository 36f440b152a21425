"""Initial weights of models built on the meta device."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.parity.harness import QUIET, data_parallel_names, whole
from tests.parity.modules import Tokens
from trainwright import Trainer
from trainwright.strategies.contract.registry import make_strategy
from trainwright.strategies.plan.deferred import deferred_pieces, is_deferred


class Rotary(nn.Module):
    """Module with a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angles.copy_(torch.arange(4.0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.rotary.angles.mean()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.seen: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = self.make()

    def make(self) -> nn.Module:
        return Net()

    def on_fit_start(self) -> None:
        self.seen = {name: whole(tensor) for name, tensor in self.state_dict().items()}
        self.seen |= {name: buffer.clone() for name, buffer in self.named_buffers()}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        logits = self.net(tokens % 17)
        return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens % 17).flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def initial_weights(strategy: str, make: type[Module] = Module) -> dict[str, torch.Tensor]:
    """Return the initial weights of a run; seeds of ranks differ, and rank 0's is used."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    module = make()
    trainer = Trainer(
        strategy=make_strategy(strategy), devices=torch.distributed.get_world_size(), max_steps=1, **QUIET
    )
    trainer.fit(module, torch.utils.data.DataLoader(Tokens(8), batch_size=1))
    assert not is_deferred(module)
    return module.seen


def test_same_weights_under_every_strategy_and_world_size(ranks):
    (want,) = ranks(initial_weights, 1, "single")
    assert torch.equal(want["net.rotary.angles"], torch.arange(4.0))
    assert want["net.embed.weight"].std() > 0.5  # nn.Embedding draws from a standard normal
    assert torch.equal(want["net.embed.weight"], want["net.head.weight"])
    for strategy in data_parallel_names():
        for world_size in (1,) if strategy == "single" else (2, 4) if strategy == "zero3" else (2,):
            for got in ranks(initial_weights, world_size, strategy):
                assert got.keys() == want.keys()
                for name, value in want.items():
                    assert torch.equal(got[name], value), (strategy, world_size, name)


def test_one_piece_in_memory_at_a_time():
    with torch.device("meta"):
        model = Net()
    pieces = deferred_pieces(model)
    assert [piece.name for piece in pieces] == [
        "embed",
        "rotary",
        *(f"layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "linear1", "linear2", "norm1", "norm2")),
        "head",
    ]
    attention = {p.name: p for p in pieces}["layers.0.self_attn"]
    assert "out_proj.bias" in attention.meta  # MultiheadAttention sets its child's bias itself
    values = {name: value for _, name, value in attention.values(0)}
    assert values["in_proj_bias"].abs().sum() == 0


def test_names_uninitializable_modules():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = nn.Sequential(Own())
    with pytest.raises(ValueError, match=r"0 \(Own\) cannot be initialised: define reset_parameters"):
        deferred_pieces(model)
