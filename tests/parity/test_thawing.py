"""Layers frozen at first and trained from a later epoch on, as with finetuning callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.harness import make_trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Thawing(pl.LightningModule):
    """The first layers are frozen in the first epoch; ``adds``: and then added to the optimizer."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(8, 1)
        self.scale = Scale()
        self.adds = adds
        for parameter in self.frozen():
            parameter.requires_grad_(False)

    def frozen(self) -> list[nn.Parameter]:
        return [p for part in (self.enter, *self.layers[:2], self.scale) for p in part.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.enter(batch)
        for layer in self.layers:
            x = layer(x)
        return self.scale(self.leave(x)).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            thawed = self.frozen()
            for parameter in thawed:
                parameter.requires_grad_(True)
            if self.adds:
                self.trainer.optimizers[0].add_param_group({"params": thawed})

    def configure_optimizers(self) -> Any:
        known = [p for p in self.parameters() if p.requires_grad] if self.adds else self.parameters()
        return torch.optim.SGD(known, lr=0.1, momentum=0.5)

    def train_dataloader(self) -> Any:
        samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(samples, batch_size=8 // self.trainer.strategy.ranks.num_data_ranks)


def trained(strategy: str, options: dict[str, Any], adds: bool = False) -> dict[str, Tensor]:
    """Train three epochs; return all parameters, after a check that ranks agree."""
    module = Thawing(adds)
    trainer = make_trainer(strategy, options, max_epochs=3, gradient_clip_val=1.0)
    trainer.fit(module)
    for name, parameter in module.named_parameters():
        if trainer.strategy.layout.replicate == dist.get_world_size() and type(parameter.data) is Tensor:
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter), f"{name} differs between ranks"
    return dict(trainer.strategy.whole_parameters())


def check(ranks: Any, reference: Any, strategy: str, options: dict[str, Any], adds: bool) -> None:
    expected = reference(trained, "single", {}, adds)
    found = ranks(trained, 4 if "shard" in options else 2, strategy, options, adds)[0]
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp in parts": ("ddp", {"average_by": "reduce_scatter"}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero2 offloaded": ("zero2", {"offload": "optimizer"}),
    "zero3": ("zero3", {}),
    "pipeline": ("pipeline", {"micro_batches": 2}),
    "pipeline x shard": ("pipeline", {"micro_batches": 2, "shard": 2, "stage": 2}),
    "parameter_server": ("parameter_server", {}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", list(CASES))
def test_thawed_layers_are_trained_as_on_one_process(ranks: Any, reference: Any, case: str) -> None:
    check(ranks, reference, *CASES[case], adds=False)


@pytest.mark.parametrize("case", ["ddp", "zero1", "zero2", "zero3"])
def test_thawed_layers_may_be_added_to_the_optimizer(ranks: Any, reference: Any, case: str) -> None:
    check(ranks, reference, *CASES[case], adds=True)
