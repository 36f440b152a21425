"""The verb `layout`: its output, and bytes equal to those that ranks hold."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer, world_size
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from trainwright.command.cli import main
from trainwright.planning.layout_report import OptimizerStates, StateRules, bytes_of_ranks
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.strategies.compose.hybrid import HybridStrategy

_Held = tuple[int, int, int]
# Layouts of 4 ranks (one of 3, whose rows do not divide), network, strategy's options.
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (4, "gpt", {"pipeline": 2, "tensor": 2}),
    (4, "gpt-untied", {"pipeline": 2, "shard": 2}),
    (4, "gpt", {"tensor": 2, "shard": 2, "stage": 2}),
    (4, "gpt", {"tensor": 2, "shard": 2, "stage": 1, "sequence_parallel": True}),
    (4, "gpt", {"context": 2, "replicate": 2, "shard": 1}),
    (4, "gpt", {"pipeline": 2, "schedule": "zbv", "split": [1, 1, 1, 1], "shard": 2, "stage": 2}),
    (4, "mixtral", {"expert": 2, "shard": 4}),
    (4, "mixtral", {"expert": 2, "shard": 2, "tensor": 2, "stage": 2}),
    (3, "gpt", {"shard": 3}),
    (3, "gpt", {"shard": 3, "stage": 2}),
    (4, "gpt", {"tensor": 2, "shard": 2, "offload": "optimizer", "stage": 2}),
]


class HeldBytes(pl.Callback):
    """Record the bytes that the strategy reports at an optimizer step."""

    held: _Held = (0, 0, 0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            held = trainer.strategy.measures.held_bytes()
            self.held = held.parameters, held.gradients, held.optimizer


def measure(network: str, options: dict[str, Any]) -> tuple[_Held, list[_Held]]:
    """Return bytes measured on this rank, and computed for all."""
    recorder = HeldBytes()
    trainer = make_trainer("hybrid", options, max_steps=3, max_epochs=-1, callbacks=[recorder])
    with torch.device("meta"):
        planned = make_module(network, "adamw")
    strategy = trainer.strategy
    layout = strategy._open_layout.resolve(world_size())
    rules = StateRules(strategy.stage, strategy.options.offload)
    computed = bytes_of_ranks(planned, layout, strategy.options, rules)
    trainer.fit(make_module(network, "adamw"), DataLoader(Texts(48), batch_size=4))
    return recorder.held, [(each.parameters, each.gradients, each.optimizer or 0) for each in computed]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks_used", "network", "options"), CASES)
def test_computed_bytes_are_held_by_ranks(ranks, ranks_used, network, options):
    for rank, (held, computed) in enumerate(ranks(measure, ranks_used, network, options, timeout=90)):
        assert held == computed[rank], (rank, options)


def largest_held(options: dict[str, Any]) -> tuple[int, int]:
    """Return the peak of live weights while a meta-device model is initialized, and the whole model's weights."""
    module = GPTModule(GPTConfig(layers=4, dim=64, heads=4, seq_len=8), schedule_steps=4, meta=True)
    most, inner = [0], HybridStrategy._real

    def watched(self: Any, owner: nn.Module, name: str, meta: Any, value: Any) -> Any:
        real = inner(self, owner, name, meta, value)
        held = [p for p in self.lightning_module.parameters() if not p.is_meta]
        local = [getattr(p, "_local_tensor", p) for p in held]
        most[0] = max(most[0], sum(p.numel() for p in local) + value.numel() + real.numel())
        return real

    HybridStrategy._real = watched  # type: ignore[method-assign]
    try:
        trainer = make_trainer("hybrid", options, max_steps=1, max_epochs=-1)
        trainer.fit(module, DataLoader(torch.randint(256, (32, 9)), batch_size=4))
    finally:
        HybridStrategy._real = inner  # type: ignore[method-assign]
    with torch.device("meta"):
        whole = GPTModule(GPTConfig(layers=4, dim=64, heads=4, seq_len=8))
    return most[0], sum(p.numel() for p in whole.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"pipeline": 2, "shard": 2}, {"tensor": 2, "shard": 2}, CASES[0][2]])
def test_no_rank_holds_the_whole_model(ranks, options):
    for most, whole in ranks(largest_held, 4, options, timeout=60):
        assert 0 < most < 0.75 * whole, (most, whole)


def test_the_command(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "recipe=gpt", "devices=8", "strategy=hybrid", "strategy.pipeline=2", "strategy.tensor=2"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("pipeline 2 x shard 2 x tensor 2\n")
    for part in ("stage 1 of 2, tensor part 1 of 2, shard 1 of 2", "model.blocks.0..3", "colwise", "0-3 ", "4-7 "):
        assert part in out
    # A module that reads values is reported without bytes.
    module = conf.parent / "my_module.py"
    module.write_text(module.read_text().replace("self.save_hyperparameters()", "self.x = float(torch.ones(1))"))
    assert main(["layout", "--config-dir", str(conf), "recipe=mine", "strategy=zero3", "devices=2"]) == 0
    out, _ = capsys.readouterr()
    assert "shard 1 of 2" in out
    assert "cannot be built without memory" in out
    assert not Path("runs").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("words", "part"), [
    (["recipe=gpt", "strategy=tensor", "devices=5"], "cannot be split into 5"),
    (["recipe=gpt", "-m"], "--multirun with layout"),
    (["recipe=gpt", "--json"], "--json"),
])  # fmt: skip
def test_refused(words: list[str], part: str, conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", *words]) == 2
    assert part in capsys.readouterr().err


class Odd(pl.LightningModule):
    """Two optimizers, one of which needs the Trainer on request."""

    def __init__(self, needs_trainer: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.needs_trainer = needs_trainer

    def configure_optimizers(self) -> Any:
        assert not self.needs_trainer or self.trainer.max_steps
        groups = [{"params": self.b.parameters(), "amsgrad": True}]
        return [torch.optim.SGD(self.a.parameters(), 0.1, momentum=0.9), torch.optim.Adam(groups)], []


def test_optimizer_state_bytes() -> None:
    module = Odd()
    states = OptimizerStates(module)
    found = [states.bytes_of(part.weight, (2, 4), torch.float32) for part in (module.a, module.b, module.c)]
    assert found == [32, 3 * 32 + 4, 0]  # momentum; three averages and a count of steps; not optimized
    assert module.a.weight.grad is None
    assert not module.configure_optimizers()[0][0].state
    unknown = OptimizerStates(Odd(needs_trainer=True))
    assert unknown.bytes_of(module.a.weight, (2, 4), torch.float32) is None
    assert "configure_optimizers" in str(unknown.problem)
