"""Blocks stay compiled after passes that watch every operation: FLOP counting, the certificate."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from tests.zoo.cells import LAYOUTS
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.strategies.plan.blocks import compile_blocks

STEPS = 3


class Counted:
    """Compiler that counts the calls of what it compiled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def compiled_calls(layout: str, **more: Any) -> list[int]:
    """Return the calls of compiled code in each step, with the monitors that a command has."""
    compiler, calls = Counted(), []

    class Steps(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            calls.append(compiler.calls)
            compiler.calls = 0

    strategy, options, _ = LAYOUTS[layout]
    trainer = make_trainer(
        strategy,
        {**options, **more, "compile": {"backend": compiler}},
        max_steps=STEPS,
        callbacks=[Throughput(every_n_steps=1), Steps()],
    )
    module = make_module("mixtral" if layout == "expert" else "gpt-untied")
    trainer.fit(module, DataLoader(Texts(32), batch_size=4))
    return calls


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "tensor", "pipeline", "context", "expert"])
def test_blocks_stay_compiled(ranks: Any, layout: str) -> None:
    world_size = LAYOUTS[layout][2]
    for calls in ranks(compiled_calls, world_size, layout, timeout=120):
        assert len(calls) == STEPS
        # Layouts that split the sequence watch the first step.
        assert min(calls[1:] if "context" in LAYOUTS[layout][1] else calls) >= 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["zero3", "sequence", "pipeline"])
def test_recomputed_blocks_stay_compiled(ranks: Any, layout: str) -> None:
    for calls in ranks(compiled_calls, 2, layout, activation_checkpointing="full", timeout=120):
        assert min(calls) >= 2


def test_a_model_that_dynamo_cannot_compile_gets_a_warning() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.compiler.disable(torch.sin)(x)

    torch._dynamo.utils.counters.clear()
    compile_blocks(block := Block(), [], {"backend": "eager"})
    for _ in range(31):
        block(torch.ones(2))
    with pytest.warns(UserWarning, match=r"compiled nothing.*TORCH_LOGS=graph_breaks"):
        block(torch.ones(2))
