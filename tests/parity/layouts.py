"""Runs of modules under layouts and on one process, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.parity.harness import Record, Recorder, differences, make_trainer, world_size
from tests.parity.layout_modules import LENGTH, VOCABULARY, make_module


class Texts(Dataset):
    """``samples`` fixed random sequences ``{"tokens": (LENGTH + 1,)}``, or ``(LENGTH,)``."""

    def __init__(self, samples: int, length: int = LENGTH + 1) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(VOCABULARY, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index]}


@dataclass(frozen=True)
class LayoutCase:
    """One run.

    Args:
        network: key of ``layout_modules.NETWORKS``.
        options: of the strategy.
        strategy: its name.
        global_batch_size, accumulation: samples per optimizer step, micro-batches per data rank that make them up.
        steps, samples, length: optimizer steps, samples of the data set and their positions.
        clip: largest norm of gradients; ``None`` is off.
        optimizer: name in :data:`~tests.parity.optimizers.OPTIMIZERS`.
        trainer: further options of the Trainer.
    """

    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "hybrid"
    global_batch_size: int = 8
    accumulation: int = 1
    steps: int = 2
    samples: int = 24
    length: int = LENGTH + 1
    clip: float | None = None
    optimizer: str = "sgd"
    trainer: Mapping[str, Any] = field(default_factory=dict)


class WholeRecorder(Recorder):
    """Records whole gradients and parameters by the names of the unmodified module."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.looks_at(trainer):
            self.record.gradients = dict(trainer.strategy.whole_gradients())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        weights = getattr(trainer, "token_weights", None)
        if weights is not None and self.record.losses:
            self.record.losses[-1] = float(weights.step_loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.parameters = dict(trainer.strategy.whole_parameters())


def run(case: LayoutCase) -> Record:
    """Train ``case`` on the ranks of the default process group."""
    recorder = WholeRecorder()
    options = {**case.trainer, **({"gradient_clip_val": case.clip} if case.clip else {})}
    data_ranks = _data_ranks(case)
    micro = case.global_batch_size // (data_ranks * case.accumulation)
    trainer = make_trainer(
        case.strategy,
        dict(case.options),
        global_batch_size=case.global_batch_size,
        max_steps=case.steps,
        max_epochs=-1,
        callbacks=[recorder],
        **options,
    )
    trainer.fit(
        make_module(case.network, case.optimizer), DataLoader(Texts(case.samples, case.length), batch_size=micro)
    )
    return recorder.record


def _data_ranks(case: LayoutCase) -> int:
    from trainwright.core.layout import Layout
    from trainwright.strategies.contract.registry import make_strategy

    if case.strategy == "single":
        return 1
    if case.strategy == "ddp":
        return world_size()
    layout: Layout = make_strategy(case.strategy, **case.options)._open_layout
    return layout.resolve(world_size()).data_ranks


def run_all(cases: list[LayoutCase]) -> list[Record]:
    """Train each case on every rank."""
    return [run(case) for case in cases]


def reference(case: LayoutCase) -> Record:
    """Return the record of a bare loop on one process, cached for all layouts."""
    return _bare_loop(
        case.network, case.optimizer, case.global_batch_size, case.steps, case.samples, case.length, case.clip
    )


@cache
def _bare_loop(
    network: str, optimizer_name: str, global_batch_size: int, steps: int, samples: int, length: int, clip: float | None
) -> Record:
    module, data, record = make_module(network, optimizer_name), Texts(samples, length), Record()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[assignment,method-assign]
    made: Any = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    for step in range(steps):
        first = step % -(-samples // global_batch_size) * global_batch_size
        batch = default_collate([data[i] for i in range(first, min(first + global_batch_size, samples))])
        optimizer.zero_grad()
        output: Any = module.training_step(batch, step)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        record.losses.append(loss.item())
        record.gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if isinstance(made, dict):
            made["lr_scheduler"]["scheduler"].step()
    record.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return record


def assert_layouts(ranks: Any, world_size: int, cases: list[LayoutCase], timeout: float = 120) -> None:
    """Assert that the record of each rank and case equals that of one process."""
    results = ranks(run_all, world_size, cases, timeout=timeout)
    found = [
        f"rank {rank}, {case}: {difference}"
        for rank, records in enumerate(results)
        for case, record in zip(cases, records, strict=True)
        for difference in differences(record, reference(case))
    ]
    assert not found, "\n".join(found[:40])


__all__ = ["LayoutCase", "Texts", "assert_layouts", "reference", "run", "run_all"]
