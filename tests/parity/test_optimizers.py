"""Optimizers under layouts: equal to one process, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import differences, make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import LayoutCase, Texts, WholeRecorder, assert_layouts, reference, run, run_all
from tests.strategies.contract.traffic import recorded

Ranks = Callable[..., list[Any]]

ELEMENTWISE = ("rprop", "asgd", "adagrad")
WHOLE = ("adafactor", "orthogonal", "lars", "lamb", "centralized")
REFUSED = {
    "norm of all": "uses values of several parameters at once",
    "noisy": "draws random numbers",
    "sam": "Sam called its closure 8 times in 4 trial steps",
    "lbfgs": "LBFGS called its closure",
    "keeps a list": "KeepsList keeps parameters outside of its param_groups",
    "sparse adam": "SparseAdam does not support dense gradients",
}
ZERO: Mapping[str, Mapping[str, Any]] = {"zero1": {}, "zero2": {"offload": "optimizer"}, "zero3": {}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", [*ZERO, "tensor"])
def test_equal_on_two_ranks(ranks: Ranks, strategy: str) -> None:
    """With accumulation under ZeRO, so that an owner steps with the gradient of all micro-batches."""
    case = LayoutCase("gpt-small", {"tensor": 2, "shard": 1} if strategy == "tensor" else ZERO[strategy], clip=0.2)
    case = replace(case, strategy=strategy, accumulation=1 if strategy == "tensor" else 2)
    elementwise = ELEMENTWISE if strategy == "tensor" else ELEMENTWISE[list(ZERO).index(strategy) :][:1]
    assert_layouts(ranks, 2, [replace(case, optimizer=name) for name in (*elementwise, *WHOLE)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "optimizers"),
    [
        ({"tensor": 2, "shard": 2}, ("adafactor", "orthogonal", "lamb")),
        ({"tensor": 2, "shard": 2, "stage": 1}, ("lamb",)),
        ({"pipeline": 2, "shard": 2, "stage": 2}, ("adafactor", "orthogonal")),
        ({"replicate": 2, "shard": 2}, ("orthogonal",)),
    ],
)
def test_equal_on_four_ranks(ranks: Ranks, options: dict[str, Any], optimizers: tuple[str, ...]) -> None:
    """Parameters split along two axes are gathered along both."""
    case = LayoutCase("gpt-small", options, clip=0.2)
    assert_layouts(ranks, 4, [replace(case, optimizer=name) for name in optimizers])


@pytest.mark.thorough
def test_experts(ranks: Ranks) -> None:
    """Experts are shared by other ranks than the rest."""
    cases = [LayoutCase("mixtral", {"expert": 2}, optimizer=name) for name in ("lars", "adafactor")]
    assert_layouts(ranks, 2, cases)


def test_muon_is_that_of_ddp(ranks: Ranks) -> None:
    """To the bit: it rounds to bfloat16, where a gradient that was summed in another order is another one."""
    cases = [LayoutCase("gpt-small", strategy=name, optimizer="muon") for name in ("ddp", *ZERO)]
    for ddp, *others in ranks(run_all, 2, cases, timeout=120):
        for record in others:
            assert record.losses == ddp.losses
            assert all(torch.equal(record.parameters[name], value) for name, value in ddp.parameters.items())


# ---- refused ---------------------------------------------------------------------------------------------------------


def _refusals(names: list[str], strategy: str, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return messages, and whether all weights of this rank are unchanged."""
    found = []
    for name in names:
        module = make_module("gpt-small", name)
        trainer = make_trainer(strategy, options, max_steps=2)
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        with pytest.raises(ValueError, match=r"Type strategy=ddp, or") as error:
            trainer.fit(module, DataLoader(Texts(8, 9), batch_size=4))
        same = all(p.shape != before[n].shape or torch.equal(p, before[n]) for n, p in module.named_parameters())
        found.append((str(error.value), same))
    return found


@pytest.mark.parametrize(("strategy", "options"), [("zero2", {}), ("pipeline", {"pipeline": 2})])
def test_refused(ranks: Ranks, strategy: str, options: dict[str, Any]) -> None:
    """The refusal comes before a weight changes, on every rank, in one paragraph with the remedy."""
    layout = "strategy=zero2" if strategy == "zero2" else "pipeline=2"
    for found in ranks(_refusals, 2, list(REFUSED), strategy, options, timeout=120):
        for (message, is_untouched), expected in zip(found, REFUSED.values(), strict=True):
            assert expected in message
            assert layout in message
            assert "\n" not in message
            assert is_untouched


class _Rows(pl.LightningModule):
    """A table whose gradient is sparse, by its class or by its forward, or whose values are complex."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(24, 4, sparse=kind == "sparse table")
        if kind == "complex":
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = F.embedding(batch["tokens"], self.table.weight, sparse=self.kind != "complex")
        return (rows * self.phase).abs().mean() if self.kind == "complex" else rows.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _tables(kind: str, strategy: str) -> tuple[str, bool]:
    """Return the refusal of a strategy, and whether weights are unchanged; train what it recommends."""
    module = _Rows(kind)
    before = module.table.weight.detach().clone()
    with pytest.raises(ValueError, match=r"Type (strategy=ddp, or|sparse=False)") as error:
        make_trainer(strategy, max_steps=1).fit(module, DataLoader(Texts(8, 9), batch_size=2))
    same = torch.equal(module.table.weight, before)
    for name in (name for name in ("ddp", "zero2") if f"strategy={name}" in str(error.value) and name != strategy):
        make_trainer(name, max_steps=1).fit(_Rows(kind), DataLoader(Texts(8, 9), batch_size=2))
    return str(error.value), same


@pytest.mark.parametrize(
    ("kind", "strategy", "expected"),
    [
        ("sparse table", "zero3", "table (Embedding) has sparse=True, and strategy=zero3 splits dense gradients"),
        ("sparse rows", "zero2", "shape (24, 4) got a sparse gradient"),
        ("complex", "zero3", "phase is complex (torch.complex64), and strategy=zero3"),
    ],
)
def test_gradients_that_cannot_be_split(ranks: Ranks, kind: str, strategy: str, expected: str) -> None:
    """They are refused before a weight changes, and the recommended options work."""
    for message, is_untouched in ranks(_tables, 1, kind, strategy):
        assert expected in message
        assert is_untouched


def test_one_rank_may_take_all(ranks: Ranks) -> None:
    """An optimizer that needs all parameters at once works where each rank has them all."""
    assert_layouts(ranks, 1, [LayoutCase("gpt-small", strategy="zero2", optimizer="norm of all")])


# ---- state -----------------------------------------------------------------------------------------------------------


class _Weigher(WholeRecorder):
    """Records the bytes of optimizer state on this rank."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.held = trainer.strategy.measures.held_bytes().optimizer


def _weighed(strategy: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Return bytes of optimizer state: of this rank, and on one process in all and of the largest parameter."""
    weigher, module = _Weigher(), make_module("gpt-small", "lamb")
    sizes = [8 * p.numel() for p in module.parameters()]
    trainer = make_trainer(strategy, options, max_steps=2, callbacks=[weigher])
    trainer.fit(module, DataLoader(Texts(16, 9), batch_size=4))
    return weigher.held, sum(sizes), max(sizes)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "size", "options"), [("zero3", 2, {}), ("hybrid", 4, {"tensor": 2, "shard": 2})])
def test_bytes_of_state(ranks: Ranks, strategy: str, size: int, options: dict[str, Any]) -> None:
    """Each rank holds the state of its own parameters: each state once, at most a share plus one parameter."""
    found = ranks(_weighed, size, strategy, options)
    for held, total, largest in found:
        assert held <= total / size + largest
    assert sum(held for held, _, _ in found) == found[0][1]


class _Listener(pl.Callback):
    """Records the elements of each exchange between owners and other ranks in the last step."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.context = recorded()
        self.calls = self.context.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)
        self.sent = [call.elements for call in self.calls if call.name == "all_to_all"]


def _exchanges(strategy: str) -> tuple[list[int], int, int]:
    """Return elements: of each exchange, of all parameters, of the largest."""
    listener, module = _Listener(), make_module("gpt-small", "lamb")
    sizes = [p.numel() for p in module.parameters()]
    trainer = make_trainer(strategy, max_steps=2, callbacks=[listener])
    trainer.fit(module, DataLoader(Texts(16, 9), batch_size=4))
    return listener.sent, sum(sizes), max(sizes)


@pytest.mark.parametrize(("strategy", "exchanges"), [("zero2", 2), ("zero3", 3)])
def test_elements_sent(ranks: Ranks, strategy: str, exchanges: int) -> None:
    """Gradients go to owners and parameters come back; under ZeRO-3 parameters go there, too. None exceeds a share."""
    for sent, total, largest in ranks(_exchanges, 2, strategy):
        assert len(sent) == exchanges
        assert all(total / 8 <= each <= total / 2 + largest for each in sent)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_resumed_under_other_layouts(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """States held whole by owners, and states not shaped like their parameter, move between layouts."""
    single = LayoutCase("gpt-small", strategy="single", optimizer=optimizer, steps=4, samples=32)
    zero2, zero3 = (replace(single, strategy=name) for name in ("zero2", "zero3"))
    tensor = replace(single, strategy="tensor", options={"tensor": 2, "shard": 1})
    expected = reference(single)
    expected = replace(expected, losses=expected.losses[2:])
    for case in (zero2, tensor):
        ranks(run, 2, replace(case, steps=2), save=(str(tmp_path / case.strategy), 2))
    first, second = (str(tmp_path / name / "step=2.ckpt") for name in ("zero2", "tensor"))
    found = [
        *ranks(run, 2, tensor, resume=first),
        *ranks(run, 1, single, resume=first, init_group=False),
        *ranks(run, 2, zero3, resume=second),
    ]
    assert not [difference for record in found for difference in differences(record, expected)]
