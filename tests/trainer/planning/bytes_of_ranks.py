"""Bytes that a rank is predicted to need at its fullest moment, beside those that are alive there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.live_bytes import LiveBytes
from tests.parity.harness import make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import LayoutCase, Texts
from trainwright.strategies.engines import EngineOptions, plan_for, stage_spans
from trainwright.strategies.hybrid_rules import micro_batches_for
from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.schedules import stages_per_rank_of
from trainwright.strategies.plan import ModelPlan
from trainwright.trainer.planning.facts import Cut, ModelFacts
from trainwright.trainer.planning.memory import Held, StateTable, Work, in_flight, moments, share_of


class Fullest(pl.Callback):
    """Counts what is alive from the third step on; by then optimizers have their state and buckets their order."""

    def __init__(self, data: Tensor) -> None:
        self.data = data  # the whole data set, which a device does not hold
        self.peak = 0
        self._live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_step < 2 or self._live is not None:
            return
        self._live = LiveBytes(_known(trainer), [self.data])
        self._live.__enter__()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.peak = self._live.peak
            self._live = None


def _known(trainer: Any) -> list[Tensor]:
    parameters = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    states = [t for o in trainer.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*trainer.lightning_module.parameters(), *parameters, *states, *gradients]


def measured(case: LayoutCase, data_ranks: int) -> int:
    """On a rank: most bytes alive in a step."""
    texts = Texts(case.samples, case.length)
    fullest = Fullest(texts.tokens)
    micro = case.global_batch_size // (data_ranks * case.accumulation)
    trainer = make_trainer(
        case.strategy,
        dict(case.options),
        global_batch_size=case.global_batch_size,
        max_steps=4,
        max_epochs=-1,
        callbacks=[fullest],
        **dict(case.trainer),
    )
    trainer.fit(make_module(case.network, "adamw"), DataLoader(texts, batch_size=micro))
    return fullest.peak


@dataclass
class Predictor:
    """Predicts for cases of one network."""

    network: str
    length: int

    def __post_init__(self) -> None:
        with torch.device("meta"):
            self.module = make_module(self.network, "adamw")
        batch = {"tokens": torch.zeros(4, self.length, dtype=torch.long)}
        self.facts = ModelFacts(
            self.module, batch, 4, real=lambda: make_module(self.network, "adamw")
        )  # fmt: skip

    def all_moments(self, case: LayoutCase, world_size: int) -> list[list[Held]]:
        """For each place along the pipeline, what is held at each moment."""
        given = dict(case.options)
        axes = {axis: given.get(axis, 1) for axis in ("pipeline", "replicate", "context", "tensor", "expert")}
        layout, stage = _layout_of(case, given, axes, world_size)
        options = EngineOptions(
            **{k: v for k, v in given.items() if k in EngineOptions.__dataclass_fields__ and k != "split"},
            split=tuple(given["split"]) if "split" in given else "balanced",
        )
        plan = plan_for(self.module, layout, options)
        self.table = StateTable(
            self.facts, lambda tensor: plan_for(self.module, Layout(tensor=tensor), options), self.module
        )
        micro = case.global_batch_size // (layout.data_ranks * case.accumulation)
        schedule = options.schedule
        per_rank = stages_per_rank_of(schedule, options.stages_per_rank) if layout.pipeline > 1 else 1
        parts = (
            min(micro_batches_for(schedule, options.micro_batches, layout.pipeline), micro)
            if layout.pipeline > 1
            else 1
        )
        work = Work(
            layout, stage, micro // parts, case.accumulation, parts, schedule, per_rank,
            given.get("offload", "none"), bool(given.get("no_sync_accumulation")),
        )  # fmt: skip
        cut = Cut(
            layout.tensor, layout.context, options.sequence_parallel, options.loss_parallel,
            given.get("activation_checkpointing", "none"), attention=options.attention, balance=options.balance,
        )  # fmt: skip
        cost = self.facts.of(cut)
        kinds = self.facts.kinds
        spans = [range(len(kinds))]
        if layout.pipeline > 1:
            spans = stage_spans(self.module, ModelPlan(blocks=plan.blocks), layout.pipeline * per_rank, options.split)
        found = []
        for rank in range(layout.pipeline):
            share = share_of(kinds, spans, layout.pipeline, schedule, rank)
            live = in_flight(schedule, layout.pipeline, per_rank, parts, rank)
            found.append(moments(self.table, cost, work, share, live))
        self.layout = layout
        return found


def _layout_of(case: LayoutCase, given: dict[str, Any], axes: dict[str, int], world_size: int) -> tuple[Layout, int]:
    if case.strategy in ("single", "ddp"):
        return Layout(replicate=world_size), 0
    stage = int(case.strategy[-1]) if case.strategy.startswith("zero") else given.get("stage", 3)
    return Layout(**{**axes, "shard": given.get("shard", -1)}).resolve(world_size), stage


@cache
def predictor(network: str, length: int) -> Predictor:
    """One for each network and length; what it found out is kept."""
    return Predictor(network, length)
