"""Prefetched blocks: depth, and results that match one process."""

from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.parity.harness import Case, bare_loop, differences, make_trainer, train
from tests.parity.layouts import LayoutCase, reference, run
from trainwright.core.layout import Layout
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.data.options import ZeroOptions
from trainwright.strategies.data.sharding.split import move_whole
from trainwright.strategies.data.zero import ZeroStrategy

BLOCKS = 4
CASE = Case(accumulation=2, clipping="norm", steps=2)
VARIANTS: list[dict[str, Any]] = [
    {"prefetch": 2, "activation_checkpointing": "full"},
    {"prefetch": 1, "compile": {"backend": "aot_eager"}},
    {"prefetch": 9, "offload": "parameters", "no_sync_accumulation": True},
]


def trained(variants: list[dict[str, Any]]) -> list[Any]:
    return [train(CASE, "zero3", options) for options in variants]


def test_prefetch_matches_one_process(ranks):
    expected = bare_loop(CASE)
    for records in ranks(trained, 2, VARIANTS, timeout=120):
        for options, record in zip(VARIANTS, records, strict=True):
            assert differences(record, expected) == [], options


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "options", "world"), [
    ("gpt2", {"pipeline": 2, "shard": 2, "schedule": "interleaved_1f1b", "micro_batches": 4}, 4),
    ("mixtral", {"expert": 2}, 2),
])  # fmt: skip
def test_prefetch_with_other_axes(ranks, name, options, world):
    case = LayoutCase(name, {**options, "prefetch": 2})
    records = ranks(run, world, case, timeout=120)
    assert differences(records[0], reference(case)) == []


class Skipping(pl.LightningModule):
    """Equal blocks, the last of which is skipped if ``short`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(BLOCKS))
        self.short = False

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks[: BLOCKS - 1] if self.short else self.blocks:
            batch = block(batch)
        return batch

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watching(pl.Callback):
    """Counts the all-gathers started when a block computes, in both directions."""

    def __init__(self) -> None:
        self.begun = 0
        self.forward: list[int] = []
        self.backward: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.end = listen(self._count)
            self.hooks = [block[0].register_forward_pre_hook(partial(self._in_forward)) for block in module.blocks]
            self.hooks += [block[0].register_full_backward_pre_hook(self._in_backward) for block in module.blocks]

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 1:
            self.end()
            for hook in self.hooks:
                hook.remove()

    def _count(self, call: Any) -> None:
        self.begun += call.kind == "all_gather"

    def _in_forward(self, *args: Any) -> None:
        self.forward.append(self.begun)

    def _in_backward(self, *args: Any) -> None:
        self.backward.append(self.begun)


def gathers(depths: list[int | None]) -> list[tuple[list[int], list[int]]]:
    found = []
    for depth in depths:
        torch.manual_seed(0)
        watching = Watching()
        loader = DataLoader(torch.randn(8, 4), batch_size=2)
        trainer = make_trainer("zero3", {"prefetch": depth}, max_steps=2, max_epochs=-1, callbacks=[watching])
        trainer.fit(Skipping(), loader)
        found.append((watching.forward, watching.backward))
    return found


def test_prefetch_depth(ranks):
    for found in ranks(gathers, 2, [0, 1, 2]):
        for depth, (forward, backward) in enumerate(found):
            expected = [min(index + 1 + depth, BLOCKS) for index in range(BLOCKS)]
            assert forward == expected
            assert backward == [BLOCKS + each for each in expected]


def after_a_block_was_left_out() -> tuple[Tensor, Tensor]:
    """Return input and output with new weights, after the last block was prefetched and skipped."""
    torch.manual_seed(0)
    trainer = make_trainer("zero3", {"prefetch": 2}, max_steps=1, max_epochs=-1)
    module, seen = Skipping(), []
    loader = DataLoader(torch.randn(4, 4), batch_size=2)
    trainer.fit(module, loader)
    module.validation_step = lambda batch, index=0: seen.append((batch, module(batch)))
    module.short = True
    trainer.validate(module, loader, verbose=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.25)
    module.short = False
    trainer.validate(module, loader, verbose=False)
    return seen[-1]


def test_unused_prefetched_weights_are_dropped(ranks):
    for rows, output in ranks(after_a_block_was_left_out, 2):
        for _ in range(BLOCKS):
            rows = torch.tanh(rows.sum(1, keepdim=True) / 4 + 0.25).expand(-1, 4)
        torch.testing.assert_close(output, rows)


def test_metrics_move_with_the_module():
    module, device = nn.Sequential(nn.BatchNorm1d(2, affine=False)), torch.device("meta")
    module.metric = MeanMetric()
    move_whole(module, device)
    assert {each.device for each in (*module.state_dict().values(), module.metric.mean_value)} == {device}


class Recurrent(Skipping):
    """A recurrent layer, which moves its weights on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(batch)[0]


def _move(self: nn.RNNBase) -> None:
    for weight in self._flat_weights:
        weight.data = weight.data.clone()


def recurrent(strategy: str) -> list[Tensor]:
    """Return the weights of a trained recurrent layer; those that are new to it are moved, as on a GPU."""
    torch.manual_seed(0)
    module, loader = Recurrent(), DataLoader(torch.randn(12, 4), batch_size=2)
    with patch.object(nn.RNNBase, "flatten_parameters", _move):
        make_trainer(strategy, {}, max_steps=3, max_epochs=-1).fit(module, loader)
    trained = dict(module.state_dict())
    return [trained[name] for name in sorted(trained)]


def test_recurrent_weights_stay_where_they_are_gathered(ranks):
    for split, whole in zip(*(ranks(recurrent, 2, strategy)[0] for strategy in ("zero3", "ddp")), strict=True):
        torch.testing.assert_close(split, whole)


class Failing(Skipping):
    """Raises an error in the second step, where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.blocks[1].register_forward_pre_hook(self._raise_in_forward)

    def _raise(self, where: str) -> None:
        if self.where == where and self.trainer.global_step:
            raise KeyError(where)

    def _raise_in_forward(self, _: Any, given: Any) -> None:
        self._raise("forward")
        if given[0].requires_grad:
            given[0].register_hook(lambda _: self._raise("backward"))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self._raise("step")
        return loss


def trained_after_an_error(where: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights that trained on after an error, and of a run that began with what the error had left."""
    torch.manual_seed(0)
    module, loader = Failing(where), DataLoader(torch.randn(12, 4), batch_size=2)
    with pytest.raises(KeyError, match=where):
        make_trainer("zero3", {"prefetch": 1}, max_steps=2, max_epochs=-1).fit(module, loader)
    left = {name: value.clone() for name, value in module.state_dict().items()}
    anew = Failing("")
    anew.load_state_dict(left)
    module.where = ""
    for each in (module, anew):
        make_trainer("zero3", {"prefetch": 1}, max_steps=3, max_epochs=-1).fit(each, loader)
    return dict(module.state_dict()), dict(anew.state_dict())


@pytest.mark.parametrize("where", ["forward", "step", "backward"])
def test_training_goes_on_after_an_error(ranks, where):
    for module, anew in ranks(trained_after_an_error, 2, where):
        for name, value in anew.items():
            torch.testing.assert_close(module[name], value, msg=name)


def test_refusals():
    assert list(ZeroOptions(prefetch=2).problems()) == [] == list(ZeroOptions(stage=1).problems())
    assert "stage 2 has no effect" in next(ZeroOptions(stage=2, prefetch=1).problems())
    assert "0 for none" in next(ZeroOptions(prefetch=-1).problems())
    assert list(ZeroOptions(prefetch=1).layout_problems(Layout(shard=-1))) == []
    assert "shard=1 has no effect" in next(ZeroOptions(prefetch=1).layout_problems(Layout(replicate=2)))
    with pytest.raises(ValueError, match="stage 1 has no effect"):
        ZeroStrategy(1, prefetch=1)
    with pytest.raises(ValueError, match="shard=1 has no effect"):
        HybridStrategy(tensor=2, shard=1, prefetch=1)
    with pytest.raises(ValueError, match="no_sync_accumulation=true with stage 1 has no effect"):
        ZeroStrategy(1, no_sync_accumulation=True)
    with pytest.raises(ValueError, match=r"bucket_mib=0: must be a finite number above 0 \(MiB\)"):
        ZeroStrategy(2, bucket_mib=0)


def with_a_new_head() -> str:
    module = Skipping()
    make_trainer("zero3", {}, max_steps=1).fit(module, DataLoader(torch.randn(8, 4), batch_size=2))
    module.head = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="new since") as error:
        make_trainer("zero3", {}, max_steps=1).fit(module, DataLoader(torch.randn(8, 4), batch_size=2))
    return str(error.value)


def test_layers_added_between_runs_are_refused(ranks):
    for found in ranks(with_a_new_head, 2):
        assert found.startswith("head.weight, head.bias: new since an earlier run split this module")


class Mixed(pl.LightningModule):
    """Trained parameters of several dtypes, in blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.linspace(0.1, 0.5, 8, dtype=torch.float64))
        self.factor = nn.Parameter(torch.tensor(0.7))
        for parameter in (self.shift, self.factor):
            parameter.register_hook(lambda gradient: 3 * gradient)
        self.number = nn.Parameter(torch.arange(8), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        for block in self.blocks:
            block.scale = nn.Parameter(torch.linspace(0.5, 1, 8, dtype=torch.float64))
            block.register_forward_hook(lambda block, args, output: args[0] + output * block.scale.float())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch * self.factor + self.shift.float() + self.number
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.001)


def mixed(strategy: str, options: dict[str, Any], batch_size: int) -> dict[str, Tensor]:
    module, rows = Mixed(), list(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))
    trainer = make_trainer(strategy, options, max_steps=3, global_batch_size=8)
    trainer.fit(module, DataLoader(rows, batch_size=batch_size))
    return {name: value.detach().clone() for name, value in trainer.strategy.whole_parameters()}


@pytest.mark.parametrize(("strategy", "options", "world"), [
    ("zero3", {}, 2), ("hybrid", {"pipeline": 2, "shard": 2, "micro_batches": 2}, 4),
])  # fmt: skip
def test_parameters_of_several_dtypes(ranks, strategy, options, world):
    (expected,) = ranks(mixed, 1, "single", {}, 8, init_group=False)
    for found in ranks(mixed, world, strategy, options, 4, timeout=60):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
