"""Different models on ranks, and running statistics that may differ."""

import logging
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from trainwright.strategies.contract.same_model import are_equal
from trainwright.strategies.plan.module_state import ModuleState

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {}),
    ("zero3", {}),
    ("hybrid", {"pipeline": 2}),
    ("local_sgd", {}),
    ("diloco", {"compression": "int8"}),
    ("parameter_server", {}),
    ("parameter_server", {"consistency": "async"}),
]
# Difference of the second rank -> its description.
OTHERS = {
    "width": "first.weight (8, 4) (float32, trained), where another has first.weight (6, 4)",
    "depth": "last.weight (1, 8) (float32, trained), where another has more.1.weight (8, 8)",
    "frozen": "last.bias (1,) (float32, trained), where another has last.bias (1,) (float32, not trained)",
    "statistics": "6 tensors, where another has 9",
}


class Net(pl.LightningModule):
    """Linear layers, with running statistics that the loss does not depend on."""

    def __init__(self, width: int = 8, depth: int = 1, statistics: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.more = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.last = nn.Linear(width, 1)
        self.seen = nn.BatchNorm1d(4, affine=False) if statistics else nn.Identity()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.more(self.first(self.seen(batch)))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(strategy: str, options: dict[str, Any], module: Net) -> None:
    trainer = make_trainer(strategy, options, max_steps=1, limit_val_batches=0)
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))


def refusals() -> list[tuple[str, str]]:
    """Return the refusal of one kind of difference per strategy."""
    texts = []
    for index, (strategy, options) in enumerate(STRATEGIES):
        kind = list(OTHERS)[index % len(OTHERS)]
        module = Net()
        if dist.get_rank() == 1:
            sizes: dict[str, Any] = {"width": {"width": 6}, "depth": {"depth": 2}, "statistics": {"statistics": True}}
            module = Net(**sizes.get(kind, {}))
            module.last.bias.requires_grad_(kind != "frozen")
        with pytest.raises(ValueError, match="a different model") as refused:
            train(strategy, options, module)
        texts.append((kind, str(refused.value)))
        dist.barrier()
    return texts


def test_refuses_different_models_on_every_rank(ranks: Any) -> None:
    for texts in ranks(refusals, 2):
        for kind, text in texts:
            assert text.startswith("Rank(s) 1 have a different model than rank 0"), text
            assert OTHERS[kind] in text
            assert "Build the same module on every rank" in text


def logged(strategy: str, options: dict[str, Any], statistics: bool) -> list[str]:
    with patch.object(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "info") as info:
        train(strategy, options, Net(statistics=statistics))
    lines = [str(call.args[0]) for call in info.call_args_list]
    return [line for line in lines if line.startswith("Statistics such as seen.running_mean differ")]


@pytest.mark.parametrize(("strategy", "words"), [
    ("local_sgd", "at synchronizations, validations"), ("parameter_server", "when all ranks meet"),
])  # fmt: skip
def test_warns_about_running_statistics(ranks: Any, strategy: str, words: str) -> None:
    (line,), others = ranks(logged, 2, strategy, {}, True)
    assert words in line
    assert others == []
    assert ranks(logged, 2, strategy, {}, False) == [[], []]


def test_a_value_that_is_not_a_number_has_not_changed():
    module = nn.Linear(2, 2)
    module.register_buffer("bound", torch.tensor([torch.nan, 1.0]))
    state = ModuleState(module)
    assert list(state.changes()) == []
    module.bound[1] = 2
    assert [change.name for change in state.changes()] == ["bound"]
    assert not are_equal(torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan]))
