"""Unequal shares of the global batch compute what equal shares compute, also while shares change."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from tests.parity.harness import QUIET, Record, differences, make_trainer
from tests.parity.layout_modules import LENGTH, make_module
from tests.parity.layouts import LayoutCase as Case
from tests.parity.layouts import Texts, WholeRecorder
from tests.parity.test_cursor import OwnBatches
from tests.parity.test_streams import Stream
from tests.trainer.memory_harness import Hold, Model, make_loader
from tests.trainer.memory_harness import fit as fit_held
from tests.trainer.test_rollback import Judge
from trainwright import DealtStream
from trainwright.callbacks.guard.verdict import RollBack
from trainwright.callbacks.progress.throughput import num_samples

TOLERANCE = 1e-6
AUTO = {"every_steps": 1, "smoothing": 0.0}
SLOW_FIRST, SLOW_LAST = [4.0, 1.0], [1.0, 4.0]  # seconds per sample of the data ranks


class Paced(pl.Callback):
    """A simulated clock: a data rank takes a fixed number of seconds per sample.

    Also records batch sizes.
    """

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []
        self._taken = 0
        self._mine = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.balance is not None:
            trainer.balance.make_clock = lambda trainer: self

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._mine = self.seconds[trainer.strategy.ranks.data_rank]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(num_samples(batch))

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def take(self, wait_for_device: bool = False) -> list[float]:
        """Seconds of compute, data, hooks and waits since the last call."""
        new, self._taken = sum(self.sizes[self._taken :]), len(self.sizes)
        return [new * self._mine, 0.0, 0.0, 0.0]

    def refresh(self) -> None:
        """A window begins."""

    def stop(self) -> None:
        """Training has ended."""


def paced_trainer(strategy: str, options: dict[str, Any], seconds: list[float], *callbacks: Any, **more: Any) -> Any:
    """Return a Trainer, and the simulated clock of this rank."""
    paced = Paced(seconds)
    return make_trainer(strategy, options, callbacks=[*callbacks, paced], **more), paced


def run(case: Case, balance: Any, seconds: list[float], micro: int, workers: int = 0) -> tuple[Record, list[int]]:
    recorder = WholeRecorder()
    trainer, paced = paced_trainer(
        case.strategy,
        dict(case.options),
        seconds,
        recorder,
        global_batch_size=case.global_batch_size,
        max_steps=case.steps,
        balance=balance,
        **case.trainer,
    )
    loader = DataLoader(Texts(case.samples), batch_size=micro, num_workers=workers, shuffle=True)
    trainer.fit(make_module(case.network), loader)
    return recorder.record, paced.sizes


# ---- the same numbers -----------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {"global_batch_size": 16, "steps": 5, "samples": 44}  # an epoch is 16, 16 and 12 samples
TWO: dict[str, tuple[Any, ...]] = {
    "ddp": (Case("gpt", {}, "ddp", **COMMON), AUTO, SLOW_LAST, 8),
    "ddp, loader workers": (Case("gpt", {}, "ddp", **COMMON), AUTO, SLOW_FIRST, 8, 1),
    "zero1, accumulated": (Case("gpt", {}, "zero1", **COMMON), [3, 1], SLOW_LAST, 4),
    "zero3": (Case("gpt", {}, "zero3", clip=0.2, **COMMON), AUTO, SLOW_LAST, 8),
    "zero2, by tokens": (
        Case("masked", {}, "zero2", trainer={"loss_weighting": "tokens"}, **COMMON),
        AUTO,
        SLOW_FIRST,
        4,
    ),
    "ddp, bf16": (Case("gpt", {}, "ddp", trainer={"precision": "bf16-mixed"}, **COMMON), AUTO, SLOW_LAST, 8),
    "ddp, uneven steps": (Case("gpt", {}, "ddp", trainer={"uneven_steps": True}, **COMMON), AUTO, SLOW_LAST, 6),
}
FOUR: dict[str, tuple[Any, ...]] = {
    "pipeline x replicate, accumulated": (
        Case("gpt2", {"pipeline": 2, "replicate": 2, "shard": 1, "stage": 1}, **COMMON),
        AUTO,
        SLOW_LAST,
        4,
    ),
    "pipeline x shard": (Case("gpt2", {"pipeline": 2, "shard": 2}, **COMMON), AUTO, SLOW_FIRST, 8),
    "tensor x replicate": (Case("gpt-untied", {"tensor": 2, "replicate": 2, "shard": 1}, **COMMON), [1, 3], [1, 1], 8),
}


def all_held(cases: list[tuple[Any, ...]]) -> list[tuple[list[str], list[int]]]:
    """Return for each case the differences from equal shares, and the batch sizes of this rank."""
    found = []
    for case, balance, seconds, micro, *workers in cases:
        equal, _ = run(case, "none", seconds, micro)
        record, sizes = run(case, balance, seconds, micro, *workers)
        # Products of another number of rows are rounded to bfloat16 one by one.
        tolerance = 3e-2 if "precision" in case.trainer else TOLERANCE
        found.append((differences(record, equal, tolerance), sizes))
    return found


def assert_equal(ranks: Any, world_size: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, list[list[int]]]:
    """Assert that no rank differs; return batch sizes by case and rank."""
    results = ranks(all_held, world_size, list(cases.values()), timeout=120)
    found = [
        f"rank {rank}, {name}: {difference}"
        for rank, result in enumerate(results)
        for name, (different, _) in zip(cases, result, strict=True)
        for difference in different
    ]
    assert not found, "\n".join(found[:40])
    return {name: [result[index][1] for result in results] for index, name in enumerate(cases)}


@pytest.mark.thorough
def test_shares_follow_the_slow_rank_and_change_nothing_on_two_ranks(ranks: Any) -> None:
    sizes = assert_equal(ranks, 2, TWO)
    # The second step is measured, batches are drawn one ahead: 13 x 1 s and 3 x 4 s, or 10 and 2 of 12.
    assert sizes["ddp"] == sizes["zero3"] == [[8, 8, 10, 13, 13], [8, 8, 2, 3, 3]]
    assert sizes["ddp, loader workers"] == [[8, 8, 6, 3, 3], [8, 8, 6, 13, 13]]  # its workers were further ahead
    assert sizes["zero1, accumulated"] == [[6, 6, 6, 6, 6, 3, 6, 6, 6, 6], [2, 2, 2, 2, 2, 1, 2, 2, 2, 2]]
    assert sizes["zero2, by tokens"][1] == [4, 4, 4, 4, 7, 3, 7, 7, 7, 7]  # changes between two steps
    assert sizes["ddp, uneven steps"] == [[6, 2, 6, 2, 10, 10, 3, 10, 3], [6, 2, 6, 2, 2, 2, 1, 2, 1]]


@pytest.mark.thorough
def test_shares_move_between_the_replicas_of_a_layout(ranks: Any) -> None:
    sizes = assert_equal(ranks, 4, FOUR)
    fast, slow = [4, 4, 4, 4, 6, 2, 6, 6, 6, 6], [4, 4, 4, 4, 2, 2, 2, 2, 2, 2]
    assert sizes["pipeline x replicate, accumulated"] == [fast, slow, fast, slow]  # no less than its micro-batches
    assert sizes["pipeline x shard"] == [[8, 8, 2, 3, 3], [8, 8, 10, 13, 13]] * 2
    assert sizes["tensor x replicate"] == [[4, 4, 3, 4, 4]] * 2 + [[12, 12, 9, 12, 12]] * 2


# ---- what else depends on a rank's part -----------------------------------------------------------------------------


class Logging(pl.LightningModule):
    """Logs its loss in all ways; ``manual``: with manual optimization."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(LENGTH + 1, 1)
        self.automatic_optimization = not manual
        self.logged: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch["tokens"].float() / 10) ** 2).mean()
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum_of", loss, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["mean_step"]))

    def on_train_epoch_end(self) -> None:
        self.logged += [float(self.trainer.callback_metrics[name]) for name in ("mean_epoch", "sum_of")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(manual: bool, balance: Any, **options: Any) -> tuple[list[float], list[float]]:
    """Return logged values and final weights."""
    module = Logging(manual)
    trainer, _ = paced_trainer("ddp", {}, SLOW_LAST, max_epochs=2, balance=balance, **options)
    trainer.fit(module, DataLoader(Texts(27), batch_size=3))  # the last wave is of three samples
    return module.logged, module.net.weight.flatten().tolist()


def all_logged(ways: list[tuple[bool, dict[str, Any]]]) -> list[Any]:
    return [(logged(manual, "none", **options), logged(manual, AUTO, **options)) for manual, options in ways]


def test_logging_and_manual_optimization_equal_those_of_equal_shares(ranks: Any) -> None:
    ways: list[tuple[bool, dict[str, Any]]] = [
        (False, {}),
        (False, {"accumulate_grad_batches": 2}),
        (True, {}),
        (False, {"profiler": "simple"}),  # Lightning's own path
    ]
    for result in ranks(all_logged, 2, ways):
        for equal, auto in result:
            assert auto[0] == pytest.approx(equal[0], rel=1e-5)
            assert auto[1] == pytest.approx(equal[1], rel=1e-5)


class Normalising(Logging):
    """Has BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(LENGTH + 1), nn.Linear(LENGTH + 1, 1))


def normalised(synchronised: bool) -> tuple[list[str], list[list[float]]]:
    said, weights = [], []
    for balance in ("none", AUTO):
        torch.manual_seed(4)
        module = Normalising()
        trainer, _ = paced_trainer(
            "ddp", {}, SLOW_LAST, max_epochs=1, balance=balance, sync_batchnorm=synchronised, limit_train_batches=4
        )
        with pytest.warns() as caught:
            trainer.fit(module, DataLoader(Texts(27), batch_size=3))
        said += [str(each.message) for each in caught if "balance" in str(each.message)]
        weights.append(module.net[1].weight.flatten().tolist())
    return said, weights


def test_batch_norm_is_warned_about(ranks: Any) -> None:
    (said, (equal, auto)), *_ = ranks(normalised, 2, False)
    assert said == [text for text in said if "Normalising has BatchNorm" in text]
    assert len(said) == 1
    assert auto != pytest.approx(equal, rel=1e-3)


# ---- resuming -------------------------------------------------------------------------------------------------------


class Reading(pl.Callback):
    """Keeps which samples were trained on, step by step."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        divisor = trainer.fit_loop.epoch_loop.automatic_optimization.loss_divisor
        is_padding = divisor is not None and divisor.divisor(batch_idx) == float("inf")
        self.read.append([] if is_padding else batch["index"].tolist())


class Indexed(Texts):
    """Texts with their index."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


SIXTY = 60


def train(folder: Path, steps: int, resume: bool, balance: Any, workers: int = 0) -> tuple[Any, ...]:
    """Train an epoch of 5 steps up to a step; returns the record, what was read, sizes and the shares in the end."""
    recorder, reading, ranks = WholeRecorder(), Reading(), torch.distributed.get_world_size()
    trainer, paced = paced_trainer(
        "ddp",
        {},
        [1.0, 4.0, 1.0],
        recorder,
        reading,
        global_batch_size=12,
        max_steps=steps,
        balance=balance,
        default_root_dir=folder,
    )
    loader = DataLoader(Indexed(SIXTY), batch_size=12 // ranks, shuffle=True, num_workers=workers)
    path = str(folder / "state")
    trainer.fit(make_module("gpt"), loader, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    shares = None if trainer.balance is None else trainer.balance.shares
    return recorder.record, reading.read, paced.sizes, shares


def test_a_run_resumes_exactly_with_its_shares_or_on_other_ranks(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(train, 2, tmp_path / "whole", 5, False, "none")[0][0]
    first_part = ranks(train, 2, tmp_path, 3, False, AUTO, 1)
    assert [shares for *_, shares in first_part] == [[10, 2]] * 2
    before = [index for _, read, *_ in first_part for batch in read for index in batch]
    for world_size, first in ((2, [10, 2]), (3, [4, 4, 4])):
        resumed = ranks(train, world_size, tmp_path, 5, True, AUTO)
        assert [sizes[0] for _, _, sizes, _ in resumed] == first
        after = [index for _, read, *_ in resumed for batch in read for index in batch]
        assert Counter(before + after) == Counter(range(SIXTY))
        for record, *_ in resumed:
            assert record.losses == pytest.approx(whole.losses[3:], rel=1e-5)
            assert record.parameters.keys() == whole.parameters.keys()
            for name, value in whole.parameters.items():
                assert (record.parameters[name] - value).norm() <= 1e-5 * value.norm()


def go_back(held_at: int, fault_at: int) -> tuple[list[float], list[float], list[int], list[list[int]]]:
    """Losses with equal shares, and of a run whose shares change and that goes back in memory."""
    calm, _ = fit_held("ddp", [Hold()], Model(dropout=0.0), loader=make_loader(), max_steps=8)
    hold, paced = Hold(held_at), Paced(SLOW_LAST)
    judge = Judge(fault_at, lambda: RollBack(hold.snapshots.newest(held_at)))
    went, module = fit_held(
        "ddp", [judge, hold, paced], Model(dropout=0.0), loader=make_loader(), max_steps=8, balance=AUTO
    )
    assert module.trainer.global_step == 8
    return calm.losses, went.losses, judge.gone_back_to, paced.sizes


def test_going_back_to_before_shares_changed(ranks: Any) -> None:
    results = ranks(go_back, 2, 2, 5)
    for calm, went, gone_back_to, _ in results:
        assert gone_back_to == [2]
        assert went == pytest.approx(calm, rel=1e-5)
    assert results[0][3] != results[1][3]


# ---- what is refused ------------------------------------------------------------------------------------------------


def loaders() -> dict[str, Any]:
    texts = Texts(24)
    return {
        "one sample": DataLoader(texts, batch_size=1),
        "own batches": DataLoader(texts, batch_sampler=OwnBatches(SequentialSampler(texts), 4, False)),
        "stream": DataLoader(Stream(samples=24), batch_size=4),
        "dealt stream": DataLoader(DealtStream(Stream(samples=24)), batch_size=4),
        "two loaders": [DataLoader(texts, batch_size=4), DataLoader(texts, batch_size=4)],
    }


def said_of_loaders() -> dict[str, str]:
    found = {}
    for name, loader in loaders().items():
        trainer = make_trainer("ddp", max_steps=1, balance="auto")
        try:
            trainer.fit(make_module("gpt"), loader)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_data_of_which_nothing_can_be_moved(ranks: Any) -> None:
    expected = {
        "one sample": "balance with micro_batch_size=1: every data rank needs one sample at a time",
        "own batches": "balance='auto' is not supported with this training loader (DataLoader)",
        "stream": "balance='auto' is not supported with this training loader (DataLoader)",
        "dealt stream": "balance='auto' is not supported with this training loader (DataLoader)",
        "two loaders": "balance='auto' with 2 training loaders",
    }
    for said in ranks(said_of_loaders, 2):
        assert {name: expected[name] in said.get(name, "") for name in expected} == dict.fromkeys(expected, True), said


def said_of_arguments(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    found = []
    for strategy, options, arguments in cases:
        with pytest.raises(ValueError, match="balance") as caught:
            make_trainer(strategy, options, **arguments)
        found.append(str(caught.value))
    return found


def test_arguments_that_cannot_be(ranks: Any) -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("pipeline", {}, {"balance": "auto"}),
        ("hybrid", {"expert": 2}, {"balance": "auto"}),
        ("ddp", {}, {"balance": [1, 2, 3]}),
        ("ddp", {}, {"balance": "auto", "data_partition": "range"}),
        ("ddp", {}, {"balance": "auto", "use_distributed_sampler": False}),
        ("ddp", {}, {"balance": "fast"}),
        ("local_sgd", {"replicate": 2, "shard": 1}, {"balance": "auto"}),
    ]
    expected = [
        "one data rank computes every sample",
        "expert=2",
        "balance.shares has 3 number(s)",
        "data_partition=range",
        "use_distributed_sampler=false",
        "allowed: none, auto, fixed",
        "balance=auto with LocalSGDStrategy, whose ranks do not make every step together",
    ]
    for said in ranks(said_of_arguments, 2, cases):
        for text, part in zip(said, expected, strict=True):
            assert part in text


def test_one_process_has_nothing_to_balance() -> None:
    from trainwright import Trainer

    with pytest.raises(ValueError, match=re.escape("one data rank computes every sample")):
        Trainer(devices=1, balance="auto", **QUIET)
