"""Compressed Adam steps under DDP match reference algorithms in one process."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.parity.harness import QUIET, Recorder
from tests.parity.modules import LanguageModel, Tokens
from trainwright.strategies.averaging.compression.adam import FARTHEST, adam_problems
from trainwright.strategies.data.ddp import DDPStrategy

RANKS, MICRO, STEPS, WARMUP, BLOCK = 2, 4, 6, 2, 64
RATIO = 0.1
LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.999, 1e-8
SAMPLES = RANKS * MICRO * STEPS


def rows_of(rank: int, step: int) -> list[int]:
    first = (step * RANKS + rank) * MICRO
    return list(range(first, first + MICRO))


class Decayed(LanguageModel):
    """AdamW, or Adam with coupled weight decay."""

    decoupled = True

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        optimizer = kind(self.parameters(), lr=LR, weight_decay=DECAY)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def rate_of(step: int) -> float:
    """Return the learning rate of a step, from 1."""
    return LR * 0.1 ** ((step - 1) // 3)


def module_of(decoupled: bool) -> Decayed:
    torch.manual_seed(11)
    module = Decayed()
    module.decoupled = decoupled
    return module


# PowerSGD without factors: their error is tested elsewhere.
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit": {"block": BLOCK},
    "topk": {"ratio": RATIO},
    "powersgd": {"least_gain": 1e6, "values": "fp32"},
}


def trained(name: str, decoupled: bool) -> dict[str, Any]:
    """Train with Lightning's own Trainer, whose hook order differs."""
    recorder = Recorder()
    strategy = DDPStrategy(compression={"name": name, "warmup_steps": WARMUP, **OPTIONS[name]})
    options: dict[str, Any] = {**QUIET, "use_distributed_sampler": False, "max_steps": STEPS, "max_epochs": 1}
    trainer = pl.Trainer(strategy=strategy, devices=RANKS, callbacks=[recorder], **options)
    batches = [rows_of(dist.get_rank(), step) for step in range(STEPS)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module_of(decoupled), DataLoader(Tokens(SAMPLES), batch_sampler=batches))
    # The first rank warns of a short warm-up.
    is_warned = any("Type compression.warmup_steps=100" in str(each.message) for each in said)
    assert is_warned == (name != "powersgd" and dist.get_rank() == 0)
    return {"losses": recorder.record.losses, "parameters": recorder.record.parameters}


def signs(row: Tensor, residual: Tensor) -> Tensor:
    """Return a row as signs times mean magnitudes of blocks, updating its residual."""
    corrected = row + residual
    sent = torch.cat([torch.where(block >= 0, 1.0, -1.0) * block.abs().mean() for block in corrected.split(BLOCK)])
    residual.copy_(corrected - sent)
    return sent


def one_bit(momentum: Tensor, gradients: list[Tensor], own: list[Tensor], of_chunks: list[Tensor]) -> Tensor:
    """Return the next momentum of 1-bit Adam, updating the residuals of ranks and chunks."""
    numel, chunk = len(momentum), len(own[0]) // RANKS
    received: list[list[Tensor]] = [[] for _ in range(RANKS)]
    for rank, gradient in enumerate(gradients):
        wanted = torch.zeros(RANKS * chunk)
        wanted[:numel] = BETA1 * momentum + (1 - BETA1) * gradient
        for target, (row, residual) in enumerate(zip(wanted.split(chunk), own[rank].split(chunk), strict=True)):
            received[target].append(signs(row, residual))
        own[rank][numel:] = 0.0
    chunks = []
    for rank in range(RANKS):
        mean = torch.stack(received[rank]).mean(0)[: len(of_chunks[rank])]
        filled, residual = torch.zeros(chunk), torch.zeros(chunk)
        filled[: len(mean)] = mean
        residual[: len(mean)] = of_chunks[rank]
        chunks.append(signs(filled, residual)[: len(mean)])
        of_chunks[rank] = residual[: len(mean)].clone()
    return torch.cat(chunks)


def largest_steps(frozen: Tensor, gradients: list[Tensor], lr: float, kept: list[Tensor]) -> Tensor:
    """Return the mean of the largest pending steps of ranks, in units of ``lr``, updating ``kept``."""
    total = torch.zeros_like(frozen)
    most = (1 - BETA2) ** -0.5
    for rank, gradient in enumerate(gradients):
        kept[rank][: len(frozen)] += lr * (gradient / (frozen.sqrt() + EPS)).clamp(-most, most) * (frozen > 0)
        places = kept[rank].abs().topk(round(RATIO * len(frozen))).indices
        total[places] += kept[rank][places]
        kept[rank][places] = 0.0
    return (total / RANKS / lr).clamp(-FARTHEST, FARTHEST)


def reference(name: str, decoupled: bool) -> dict[str, Any]:
    module, data = module_of(decoupled), Tokens(SAMPLES)
    parameters = list(module.parameters())
    sizes = [p.numel() for p in parameters]
    numel = sum(sizes)
    chunk = -(-numel // RANKS)
    momentum, variance = torch.zeros(numel), torch.zeros(numel)
    own = [torch.zeros(numel if name == "topk" else RANKS * chunk) for _ in range(RANKS)]
    of_chunks = [torch.zeros(min(chunk, numel - rank * chunk)) for rank in range(RANKS)]
    losses, frozen = [], torch.zeros(numel)
    for step in range(1, STEPS + 1):
        gradients, loss_sum = [], 0.0
        for rank in range(RANKS):
            module.zero_grad()
            loss = module.training_step(default_collate([data[i] for i in rows_of(rank, step - 1)]), 0)
            loss.backward()
            loss_sum += loss.item() / RANKS
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        losses.append(loss_sum)
        values = torch.cat([p.detach().flatten() for p in parameters])
        if not decoupled:
            gradients = [gradient + DECAY * values for gradient in gradients]
        if step <= WARMUP:
            gradient = torch.stack(gradients).mean(0)
            momentum = BETA1 * momentum + (1 - BETA1) * gradient
            variance = BETA2 * variance + (1 - BETA2) * gradient.square()
            frozen = variance / (1 - BETA2**step)
        else:
            if name == "onebit":
                momentum = one_bit(momentum, gradients, own, of_chunks)
            elif name == "topk":
                size = frozen.sqrt() + EPS
                momentum = largest_steps(frozen, gradients, rate_of(step), own) * size * (1 - BETA1**step)
            else:
                gradient = torch.stack(gradients).mean(0)
                momentum = BETA1 * momentum + (1 - BETA1) * gradient
                variance = BETA2 * variance + (1 - BETA2) * gradient.square()
                frozen = variance / (1 - BETA2**step)
            momentum = momentum * (frozen > 0)
        if decoupled:
            values = values * (1 - rate_of(step) * DECAY)
        values = values - rate_of(step) * momentum / (1 - BETA1**step) / (frozen.sqrt() + EPS)
        with torch.no_grad():
            for parameter, value in zip(parameters, values.split(sizes), strict=True):
                parameter.copy_(value.view(parameter.shape))
    return {"losses": losses, "parameters": {n: p.detach().clone() for n, p in module.named_parameters()}}


CASES = [("onebit", True), ("onebit", False), ("topk", False), ("powersgd", True)]


@pytest.mark.parametrize(("name", "decoupled"), CASES)
def test_steps_match_the_algorithm(ranks: Any, name: str, decoupled: bool) -> None:
    expected = reference(name, decoupled)
    for found in ranks(trained, RANKS, name, decoupled):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["parameters"].items():
            assert (found["parameters"][name] - value).norm() <= 1e-4 * value.norm(), name


def test_unsupported_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert list(adam_problems([torch.optim.AdamW([parameter])], "compression=onebit", "type compression=topk")) == []
    for optimizer, words in (
        (torch.optim.SGD([parameter]), "optimizer SGD.*type compression=topk, or compression=powersgd"),
        (torch.optim.AdamW([parameter], amsgrad=True), "leave amsgrad out"),
        (torch.optim.Adam([parameter], maximize=True), "leave maximize out"),
        (torch.optim.Adam([parameter], betas=(0.0, 0.9)), "there is no momentum"),
    ):
        with pytest.raises(ValueError, match=words):
            raise ValueError("; ".join(adam_problems([optimizer], "compression=onebit", "type compression=topk")))
