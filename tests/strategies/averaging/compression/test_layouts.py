"""Compression with model-parallel replicas, sent bytes, loss scales, and errors at setup."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parity.harness import differences, make_loader, make_trainer
from tests.parity.layouts import LayoutCase, run
from tests.parity.modules import LanguageModel
from tests.strategies.averaging.compression.test_strategies import ALL, Replicas, trained
from tests.strategies.contract.communication.kernel import written_bytes
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.compression.options import choose_compression, compressor_names
from trainwright.strategies.averaging.compression.replica_average import ReplicaAverage
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.zero import ZeroStrategy

# (network, options of hybrid).
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor, sequence": ("llama", {"replicate": 2, "tensor": 2, "shard": 1, "stage": 1, "sequence_parallel": True}),
    "pipeline, stage 3": ("gpt2", {"replicate": 2, "pipeline": 2, "shard": 1, "stage": 3}),
}


def cut(network: str, options: dict[str, Any]) -> list[Any]:
    def case(compression: Any) -> LayoutCase:
        return LayoutCase(network, {**options, "compression": compression}, clip=1.0, accumulation=2, steps=2, length=8)

    return [run(case(None)), run(case(ALL)), run(case({**ALL, "ratio": 0.05}))]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", CUT)
def test_model_parallel_replicas(ranks: Any, layout: str) -> None:
    """With ratio 1 equal to dense averages; otherwise equal on all ranks."""
    results = ranks(cut, 4, *CUT[layout], timeout=120)
    for dense, everything, some in results:
        assert differences(everything, dense, 1e-6) == []
        assert differences(some, results[0][2], 0.0) == []
        assert differences(some, dense, 1e-7) != []


def sent_bytes(averages: int) -> dict[str, tuple[float, int]]:
    """Return bytes of one average, by the kernel and by the formula."""
    found = {}
    part = ReplicaPart("w", nn.Parameter(torch.zeros(1200, 1000)))
    for name in compressor_names():
        # Large enough for gloo's headers to be negligible.
        choice = choose_compression({"name": name, **({"rank": 32} if name == "powersgd" else {})})
        assert choice is not None
        if choice.warmup_steps and name != "onebit":
            choice = replace(choice, options={**choice.options, "warmup_steps": 0})
        average = ReplicaAverage(choice, torch.device("cpu"))
        average.take([part])
        part.parameter.grad = torch.randn(1200, 1000)
        average.average()  # one-time messages
        dist.barrier()
        before = written_bytes()
        for _ in range(averages):
            average.average()
        found[name] = (written_bytes() - before) / averages, average.sent_bytes
        dist.barrier()
    return found


@pytest.mark.sample(1)
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count here")
@pytest.mark.parametrize("count", [2, 3])
def test_sent_bytes_match_the_kernel(ranks: Any, count: int) -> None:
    for found in ranks(sent_bytes, count, 2):
        for name, (by_kernel, by_formula) in found.items():
            assert by_kernel == pytest.approx(by_formula, rel=0.02), name


class Manual(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def refusals() -> list[str]:
    said = []
    for module, compression, options in (
        (Manual(), "topk", {}),
        (LanguageModel("sgd"), "onebit", {}),
        (LanguageModel("adamw"), "onebit", {"precision": "16-mixed"}),
    ):
        trainer = make_trainer("ddp", {"compression": compression}, max_steps=1, **options)
        with pytest.raises(ValueError, match="compression") as caught:
            trainer.fit(module, make_loader(8, 4))
        said.append(str(caught.value))
    with pytest.raises(ValueError, match="replicate=1") as caught:
        make_trainer("zero2", {"compression": "bf16"}, max_steps=1).fit(LanguageModel(), make_loader(8, 4))
    # Manual optimization without a residual.
    trainer = make_trainer("ddp", {"compression": "bf16"}, max_steps=2, max_epochs=1, callbacks=[Replicas()])
    trainer.fit(Manual(), make_loader(16, 4))
    return [*said, str(caught.value)]


def test_setup_errors(ranks: Any) -> None:
    manual, sgd, scaled, alone = ranks(refusals, 2)[0]
    assert "type compression=bf16 (or fp16, int8)" in manual
    assert "optimizer SGD" in sgd
    assert "type precision=bf16-mixed" in scaled
    assert "type strategy.replicate=2" in alone


def test_constructor_errors() -> None:
    with pytest.raises(ValueError, match="compression.rank=0"):
        ZeroStrategy(2, replicate=2, compression={"name": "powersgd", "rank": 0})
    with pytest.raises(ValueError, match="ddp_comm_hook both decide"):
        DDPStrategy(compression="bf16", ddp_comm_hook=lambda state, bucket: None)


def scaled() -> Any:
    return [trained("ddp", {}, choice, 3, 1, precision="16-mixed") for choice in (None, ALL)]


def test_loss_scale(ranks: Any) -> None:
    for dense, everything in ranks(scaled, 2):
        assert differences(everything, dense, 1e-5) == []
