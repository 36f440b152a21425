"""Runs of modules under layouts and on one process, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.parity.harness import Record, Recorder, differences, make_trainer, train_bare, world_size
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
        shuffle: whether samples are shuffled.
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
    shuffle: bool = False
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


def run(
    case: LayoutCase,
    save: tuple[str, int] | None = None,
    resume: str | None = None,
    spoil: bool = False,
    with_lightning: bool = False,
) -> Record:
    """Train ``case`` on the ranks of the default process group.

    Args:
        case: the run.
        save: folder of checkpoints ``step=N.ckpt``, and the steps between two; ``None`` saves none.
        resume: path of a checkpoint.
        spoil: whether to change all weights first, on which a resumed run must not depend.
        with_lightning: whether to use Lightning's own Trainer, under one data rank.
    """
    recorder, batch_size = WholeRecorder(), case.global_batch_size // (data_ranks(case) * case.accumulation)
    callbacks: list[Any] = [recorder]
    if save is not None:
        callbacks.append(ModelCheckpoint(save[0], "{step}", every_n_train_steps=save[1], save_top_k=-1))
    options: dict[str, Any] = {"global_batch_size": case.global_batch_size}
    if with_lightning:
        options = {"accumulate_grad_batches": case.accumulation, "use_distributed_sampler": False}
    trainer = make_trainer(
        case.strategy,
        dict(case.options),
        pl.Trainer if with_lightning else None,
        max_steps=case.steps,
        callbacks=callbacks,
        enable_checkpointing=save is not None,
        gradient_clip_val=case.clip,
        **{**options, **case.trainer},
    )
    module = make_module(case.network, case.optimizer)
    if spoil:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1)
    loader = DataLoader(Texts(case.samples, case.length), batch_size=batch_size, shuffle=case.shuffle)
    trainer.fit(module, loader, ckpt_path=resume)
    return recorder.record


def data_ranks(case: LayoutCase) -> int:
    """Return the number of data ranks of a case on the ranks of the default process group."""
    from trainwright.core.layout import Layout
    from trainwright.strategies.contract.registry import make_strategy

    if case.strategy in ("single", "ddp"):
        return world_size() if case.strategy == "ddp" else 1
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
    network: str, optimizer: str, global_batch_size: int, steps: int, samples: int, length: int, clip: float | None
) -> Record:
    return train_bare(make_module(network, optimizer), Texts(samples, length), global_batch_size, steps, clip)


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
