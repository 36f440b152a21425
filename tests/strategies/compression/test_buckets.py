"""Compressed gradients under torch's DDP: what is kept back belongs to its parameter, and begins once buckets stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.strategies.compression.buckets import CompressedBuckets, CompressedReduction, reduce_compressed
from trainwright.strategies.compression.codecs import Cast, TopK
from trainwright.strategies.compression.compressor import Gathered, GradientCompressor, TwoPhase


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(compressor: GradientCompressor | None, steps: int) -> dict[str, Any]:
    model = network()
    names = {parameter: name for name, parameter in model.named_parameters()}
    replica = DistributedDataParallel(model, bucket_cap_mb=0.002)
    kept: list[dict[str, Tensor]] = []
    gradients: list[dict[str, Tensor]] = []
    buckets = None
    if compressor is not None:
        buckets = CompressedBuckets(compressor, names)
        replica.register_comm_hook(CompressedReduction(buckets), reduce_compressed)
    for step in range(steps):
        replica.zero_grad()
        replica(inputs(step, dist.get_rank())).square().mean().backward()
        gradients.append({name: parameter.grad.clone() for parameter, name in names.items()})
        if buckets is not None:
            kept.append({name: residual.clone() for name, residual in buckets.residuals().items()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return {"gradients": gradients, "kept": kept}


@pytest.mark.parametrize("compressor", [TwoPhase(Cast(torch.float32)), Gathered(TopK(1.0))])
def test_with_nothing_left_out_it_is_ddp(ranks: Any, compressor: GradientCompressor) -> None:
    expected, found = ranks(trained, 2, None, 5), ranks(trained, 2, compressor, 5)
    for dense, sparse in zip(expected, found, strict=True):
        for step in range(5):
            for name, gradient in dense["gradients"][step].items():
                torch.testing.assert_close(sparse["gradients"][step][name], gradient, rtol=1e-5, atol=1e-7)


def test_what_is_kept_back_belongs_to_its_parameter(ranks: Any) -> None:
    """While weights stay, what was averaged and what is kept back add up to the dense gradients, name by name."""
    results = ranks(frozen, 2, Gathered(TopK(0.2)), 6)
    for name, dense in results[0]["dense"].items():
        kept = torch.stack([result["kept"][name].view_as(dense) for result in results]).mean(0)
        torch.testing.assert_close(results[0]["sent"][name] + kept, dense, rtol=1e-4, atol=1e-5)
    assert any(kept.any() for kept in results[0]["kept"].values())


def frozen(compressor: GradientCompressor, steps: int) -> dict[str, Any]:
    model, other = network(), network()
    names = {parameter: name for name, parameter in model.named_parameters()}
    replica = DistributedDataParallel(model, bucket_cap_mb=0.002)
    buckets = CompressedBuckets(compressor, names)
    replica.register_comm_hook(CompressedReduction(buckets), reduce_compressed)
    sent = {name: torch.zeros_like(parameter) for parameter, name in names.items()}
    dense = {name: torch.zeros_like(parameter) for parameter, name in names.items()}
    for step in range(steps):
        replica.zero_grad()
        replica(inputs(step, dist.get_rank())).square().mean().backward()
        for parameter, name in names.items():
            sent[name] += parameter.grad
        other.zero_grad()
        sum(other(inputs(step, rank)).square().mean() for rank in range(2)).backward()
        for name, parameter in other.named_parameters():
            dense[name] += parameter.grad / 2
    kept = {name: residual.clone() for name, residual in buckets.residuals().items()}
    return {"sent": sent, "dense": dense, "kept": kept}
