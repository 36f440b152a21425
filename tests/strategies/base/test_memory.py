"""Memory per rank compared with the formulas of the ZeRO paper (arXiv:1910.02054), for fp32 with Adam."""

import gc
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.parity.harness import make_trainer, world_size
from trainwright.strategies.base.whole.tensors import WholeTensor
from trainwright.strategies.contract.gradients import local_tensor

BYTES = 4  # of a number in fp32
# Bytes per parameter as (on every rank, split over the ranks): parameters, gradients, optimizer state.
FORMULAS = {
    "ddp": ((1, 0), (1, 0), (2, 0)),
    "zero1": ((1, 0), (1, 0), (0, 2)),
    "zero2": ((1, 0), (0, 1), (0, 2)),
    "zero3": ((0, 1), (0, 1), (0, 2)),
}


class Wide(pl.LightningModule):
    """Eight equal blocks of about 25,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(80, 160), nn.Tanh(), nn.Linear(160, 80)) for _ in range(8))
        )
        self.out = nn.Linear(80, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.out(self.blocks(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Scale(pl.Callback):
    """Measures memory right before a later optimizer step, when everything is allocated."""

    sees_parts = True  # measure shards, not the whole parameters shown to hooks

    def __init__(self) -> None:
        self.held: Any = None
        self.known: dict[int, int] = {}
        self.found = 0
        self.whole_gradients = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def weigh(_: Tensor) -> None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            plain = [g for g in gradients if local_tensor(g) is g]
            self.whole_gradients = max(self.whole_gradients, storage_bytes(plain))

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(weigh)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.held = trainer.strategy.measures.held_bytes()
            gc.collect()
            self.found = sum(size for pointer, size in storages(all_tensors()).items() if pointer not in self.known)


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum(storages(tensors).values())


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each memory that the tensors use, by its address."""
    found = {}
    for tensor in tensors:
        with suppress(RuntimeError):  # fake tensors that the compiler left in an earlier case have none
            storage = local_tensor(tensor).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def all_tensors() -> list[Tensor]:
    found = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, WholeTensor)]
    return [tensor for tensor in found if tensor.device.type == "cpu"]


def weigh(strategy: str, options: dict[str, Any], accumulation: int) -> tuple[tuple[int, int, int], int, int]:
    """(parameters, gradients, optimizer state), all tensors alive, largest sum of whole gradients; in bytes."""
    torch.manual_seed(0)
    scale = Scale()
    data = torch.utils.data.DataLoader(torch.randn(16 * world_size() * accumulation, 80), batch_size=2)
    scale.known = storages(all_tensors())
    trainer = make_trainer(
        strategy, options, max_steps=4, max_epochs=-1, callbacks=[scale], accumulate_grad_batches=accumulation
    )
    trainer.fit(Wide(), data)
    held = scale.held
    return (held.parameters, held.gradients, held.optimizer), scale.found, scale.whole_gradients


def formula(strategy: str, ranks_used: int) -> list[float]:
    parameters = sum(p.numel() for p in Wide().parameters())
    return [BYTES * parameters * (whole + split / ranks_used) for whole, split in FORMULAS[strategy]]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks_used", "accumulation"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("strategy", list(FORMULAS))
def test_bytes_per_rank(ranks, strategy, ranks_used, accumulation):
    expected = formula(strategy, ranks_used)
    steps = 8 * len(list(Wide().parameters()))  # each optimizer state counts its steps
    for held, found, _ in ranks(weigh, ranks_used, strategy, {}, accumulation, timeout=120):
        for kind, measured, theory in zip(("parameters", "gradients", "optimizer"), held, expected, strict=True):
            assert measured <= 1.02 * theory + steps, (kind, measured / theory)
            # Stage 1 needs whole gradients only until they are averaged.
            least = 1 / ranks_used if (strategy, kind) == ("zero1", "gradients") else 0.98
            assert measured >= least * theory, (kind, measured / theory)
        # All live tensors: only batch and losses come in addition.
        assert found <= 1.02 * sum(expected) + 10_000, found / sum(expected)


def test_bytes_of_single(ranks):
    held, found, _ = ranks(weigh, 1, "single", {}, 1)[0]
    parameters = sum(p.numel() for p in Wide().parameters())
    assert sum(held) == pytest.approx(16 * parameters, rel=1e-3)
    assert found == pytest.approx(16 * parameters, rel=1e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_hybrid_shards_over_the_shard_axis(ranks, stage):
    for held, _, _ in ranks(weigh, 4, stage, {"replicate": 2, "shard": 2}, 1):
        assert sum(held) <= 1.02 * sum(formula(stage, 2)) + 400


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stage_two_never_holds_all_gradients(ranks, accumulation):
    """Whole gradients exist until their bucket is full: here of one block, an eighth of the model."""
    block = BYTES * sum(p.numel() for p in Wide().blocks[0].parameters())
    for _, _, whole in ranks(weigh, 2, "zero2", {"bucket_mib": block / 2**20}, accumulation):
        assert 0 < whole <= 2 * block
    for _, _, whole in ranks(weigh, 2, "zero1", {"bucket_mib": block / 2**20}, 2):
        assert whole > 6 * block, "stage 1 accumulates whole gradients"


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_offload_does_not_change_the_sum(ranks, stage):
    """On the CPU the offloaded rows are a copy: parameters count once more, a rank's part of them."""
    parameters, _, optimizer = formula(stage, 2)
    for held, _, _ in ranks(weigh, 2, stage, {"offload": "optimizer"}, 1):
        assert held[0] <= 1.02 * (parameters + BYTES * sum(p.numel() for p in Wide().parameters()) / 2)
        assert held[2] == pytest.approx(optimizer, rel=0.02)
