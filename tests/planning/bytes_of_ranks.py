"""Predicted peak memory of ranks, and live bytes measured on them."""

from dataclasses import dataclass, field
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
from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import Held, moments
from trainwright.planning.memory.share import share_of
from trainwright.planning.memory.state import StateTable
from trainwright.planning.model.experts import EVEN, Routing, probability_sent
from trainwright.planning.model.facts import ModelFacts
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import stage_spans
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.compose.rules import micro_batches_for
from trainwright.strategies.expert.engine import Dispatcher
from trainwright.strategies.pipeline.schedules import stages_per_rank_of
from trainwright.strategies.plan.model_plan import ModelPlan


@dataclass
class TokenCounts:
    """Tokens exchanged by a rank, and the numbers of an even routing.

    Attributes:
        counts: rows sent, rows received, and pairs of a row and an expert computed.
        even: the same with even routing.
    """

    counts: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    even: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def listen(self, dispatcher: Dispatcher) -> None:
        """Count what an exchange does, without changing it."""
        dispatcher.answers = _Counting(dispatcher, self)

    def take(self) -> Routing:
        """Return counts relative to even routing, and reset them."""
        parts = [count / even if even else 1.0 for count, even in zip(self.counts, self.even, strict=True)]
        self.counts, self.even = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        return Routing(*parts)


class _Counting:
    def __init__(self, dispatcher: Dispatcher, travelled: TokenCounts) -> None:
        self.dispatcher, self.travelled = dispatcher, travelled

    def agree(self, index: Tensor) -> Any:
        routes, (tokens, chosen) = self.dispatcher.agree(index), index.shape
        ranks = self.dispatcher.size
        rows = tokens * ranks * probability_sent(self.dispatcher.layer.experts, chosen, ranks)
        self._add(0, sum(routes.send), rows)
        self._add(1, sum(routes.receive), rows)
        self.even = tokens * chosen
        return routes

    def places(self, local: Tensor) -> Any:
        found = self.dispatcher.places(local)
        self._add(2, len(found[0]), self.even)
        return found

    def _add(self, kind: int, count: float, even: float) -> None:
        self.travelled.counts[kind] += count
        self.travelled.even[kind] += even


class LivePeak(pl.Callback):
    """Peak of live bytes from the third step on, when optimizers have their state and buckets their order.

    Attributes:
        peak: bytes.
        routing: of tokens in the micro-batch of the peak.
    """

    sees_parts = True  # parameters as sharded, not whole ones

    def __init__(self, data: Tensor) -> None:
        self.data = data  # the whole data set is not on a device
        self.peak, self.routing = 0, EVEN
        self._live: LiveBytes | None = None
        self._travelled = TokenCounts()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_step < 2 or self._live is not None:
            return
        engines = getattr(trainer.strategy, "_engines", None)
        for dispatcher in engines.dispatchers if engines is not None else ():
            self._travelled.listen(dispatcher)
        self._live = LiveBytes(_known(trainer), [self.data])
        self._live.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self._live is None:
            return
        routing = self._travelled.take()
        if self._live.peak > self.peak:
            self.peak, self.routing = self._live.peak, routing

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.peak = max(self.peak, self._live.peak)
            self._live = None


def _known(trainer: Any) -> list[Tensor]:
    parameters = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    states = [t for o in trainer.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*trainer.lightning_module.parameters(), *parameters, *states, *gradients]


def measured(case: LayoutCase, data_ranks: int) -> tuple[int, Routing]:
    """Return the peak of live bytes in a step on a rank, and the routing of tokens then."""
    texts = Texts(case.samples, case.length)
    recorder = LivePeak(texts.tokens)
    micro = case.global_batch_size // (data_ranks * case.accumulation)
    limits = {"global_batch_size": case.global_batch_size, "max_steps": 4, "max_epochs": -1}
    trainer = make_trainer(case.strategy, dict(case.options), callbacks=[recorder], **limits, **dict(case.trainer))
    trainer.fit(make_module(case.network, "adamw"), DataLoader(texts, batch_size=micro))
    return recorder.peak, recorder.routing


@dataclass
class Predictor:
    """Predictions for cases of one network."""

    network: str
    length: int

    def __post_init__(self) -> None:
        with torch.device("meta"):
            self.module = make_module(self.network, "adamw")
        batch = {"tokens": torch.zeros(4, self.length, dtype=torch.long)}
        self.facts = ModelFacts(self.module, batch, 4, real=lambda: make_module(self.network, "adamw"))

    def all_moments(self, case: LayoutCase, world_size: int, routing: Routing = EVEN) -> list[list[Held]]:
        """Return the memory at each moment, by rank along the pipeline."""
        given = dict(case.options)
        layout, stage = self.layout_of(case, world_size), _stage_of(case)
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
        per_rank = parts = 1
        if layout.pipeline > 1:
            per_rank = stages_per_rank_of(schedule, options.stages_per_rank)
            parts = min(micro_batches_for(schedule, options.micro_batches, layout.pipeline), micro)
        work = Work(
            layout, stage, micro // parts, case.accumulation, parts, schedule, per_rank,
            given.get("offload", "none"), bool(given.get("no_sync_accumulation")),
            prefetch=given.get("prefetch"),
        )  # fmt: skip
        cut = ModelCut(
            layout.tensor, layout.context, options.sequence_parallel, options.loss_parallel,
            given.get("activation_checkpointing", "none"), attention=options.attention, balance=options.balance,
            expert=layout.expert, routing=routing,
        )  # fmt: skip
        cost = self.facts.of(cut)
        kinds, spans = self.facts.kinds, [range(len(self.facts.kinds))]
        if layout.pipeline > 1:
            spans = stage_spans(self.module, ModelPlan(blocks=plan.blocks), layout.pipeline * per_rank, options.split)
        shares = (share_of(kinds, spans, layout.pipeline, schedule, rank) for rank in range(layout.pipeline))
        return [moments(self.table, cost, work, share) for share in shares]

    def layout_of(self, case: LayoutCase, world_size: int) -> Layout:
        """Return the closed layout of a case."""
        if case.strategy in ("single", "ddp"):
            return Layout(replicate=world_size)
        names = ("pipeline", "replicate", "context", "tensor", "expert")
        axes = {axis: case.options.get(axis, 1) for axis in names}
        return Layout(**axes, shard=case.options.get("shard", -1)).resolve(world_size)


def _stage_of(case: LayoutCase) -> int:
    if case.strategy in ("single", "ddp"):
        return 0
    return int(case.strategy[-1]) if case.strategy.startswith("zero") else case.options.get("stage", 3)


@cache
def predictor(network: str, length: int) -> Predictor:
    """Return a cached predictor."""
    return Predictor(network, length)
