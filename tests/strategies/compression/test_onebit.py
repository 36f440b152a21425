"""1-bit Adam under DDP against the paper's algorithm, written down for one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.parity.harness import QUIET, Recorder
from tests.parity.modules import LanguageModel, Tokens
from trainwright.strategies.compression.onebit import onebit_problems
from trainwright.strategies.ddp import DDPStrategy

RANKS, MICRO, STEPS, WARMUP, BLOCK = 2, 4, 6, 2, 64
LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.999, 1e-8
SAMPLES = RANKS * MICRO * STEPS


def rows_of(rank: int, step: int) -> list[int]:
    first = (step * RANKS + rank) * MICRO
    return list(range(first, first + MICRO))


class Decayed(LanguageModel):
    """AdamW, or Adam whose decay is a part of the gradient."""

    decoupled = True

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(self.parameters(), lr=LR, weight_decay=DECAY)


def module_of(decoupled: bool) -> Decayed:
    torch.manual_seed(11)
    module = Decayed()
    module.decoupled = decoupled
    return module


def trained(decoupled: bool) -> dict[str, Any]:
    """By Lightning's own Trainer, whose hooks are called in another way than those of ours."""
    recorder = Recorder()
    strategy = DDPStrategy(compression={"name": "onebit", "warmup_steps": WARMUP, "block": BLOCK})
    options: dict[str, Any] = {**QUIET, "use_distributed_sampler": False, "max_steps": STEPS, "max_epochs": 1}
    trainer = pl.Trainer(strategy=strategy, devices=RANKS, callbacks=[recorder], **options)
    batches = [rows_of(dist.get_rank(), step) for step in range(STEPS)]
    trainer.fit(module_of(decoupled), DataLoader(Tokens(SAMPLES), batch_sampler=batches))
    return {"losses": recorder.record.losses, "parameters": recorder.record.parameters}


def signs(row: Tensor, residual: Tensor) -> Tensor:
    """What is sent of a row, each block as its signs times its mean magnitude; what is lacking stays behind."""
    corrected = row + residual
    sent = torch.cat([torch.where(block >= 0, 1.0, -1.0) * block.abs().mean() for block in corrected.split(BLOCK)])
    residual.copy_(corrected - sent)
    return sent


def reference(decoupled: bool) -> dict[str, Any]:
    module, data = module_of(decoupled), Tokens(SAMPLES)
    parameters = list(module.parameters())
    sizes = [p.numel() for p in parameters]
    numel = sum(sizes)
    chunk = -(-numel // RANKS)
    momentum, variance = torch.zeros(numel), torch.zeros(numel)
    own = [torch.zeros(RANKS * chunk) for _ in range(RANKS)]
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
            received = [[] for _ in range(RANKS)]
            for rank, gradient in enumerate(gradients):
                wanted = torch.zeros(RANKS * chunk)
                wanted[:numel] = BETA1 * momentum + (1 - BETA1) * gradient
                for target, (row, residual) in enumerate(zip(wanted.split(chunk), own[rank].split(chunk), strict=True)):
                    received[target].append(signs(row, residual))
                own[rank][numel:] = 0.0
            chunks = []
            for rank in range(RANKS):
                mean = torch.stack(received[rank]).mean(0)[: len(of_chunks[rank])]
                filled = torch.zeros(chunk)
                filled[: len(mean)] = mean
                residual = torch.zeros(chunk)
                residual[: len(mean)] = of_chunks[rank]
                chunks.append(signs(filled, residual)[: len(mean)])
                of_chunks[rank] = residual[: len(mean)].clone()
            momentum = torch.cat(chunks) * (frozen > 0)
        if decoupled:
            values = values * (1 - LR * DECAY)
        values = values - LR * momentum / (1 - BETA1**step) / (frozen.sqrt() + EPS)
        with torch.no_grad():
            for parameter, value in zip(parameters, values.split(sizes), strict=True):
                parameter.copy_(value.view(parameter.shape))
    return {"losses": losses, "parameters": {n: p.detach().clone() for n, p in module.named_parameters()}}


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_it_is_the_algorithm_of_the_paper(ranks: Any, decoupled: bool) -> None:
    expected = reference(decoupled)
    for found in ranks(trained, RANKS, decoupled):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["parameters"].items():
            assert (found["parameters"][name] - value).norm() <= 1e-4 * value.norm(), name


def test_other_optimizers_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert list(onebit_problems([torch.optim.AdamW([parameter])])) == []
    for optimizer, words in (
        (torch.optim.SGD([parameter]), "optimizer SGD.*type compression=topk or compression=powersgd"),
        (torch.optim.AdamW([parameter], amsgrad=True), "leave amsgrad out"),
        (torch.optim.Adam([parameter], maximize=True), "leave maximize out"),
        (torch.optim.Adam([parameter], betas=(0.0, 0.9)), "there is no momentum"),
    ):
        with pytest.raises(ValueError, match=words):
            raise ValueError("; ".join(onebit_problems([optimizer])))
