"""Output of `trainwright layout`: ranks and their roles, cuts of the model, and bytes per rank.

Computed on the meta device by the rules of the strategies; no process is started and no weight gets memory. The bytes
equal `strategy.measures.held_bytes()` after an optimizer step, with gradients.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from trainwright.core.failures.error_text import first_line
from trainwright.core.layout import Layout
from trainwright.core.lightning_internals import _configure_optimizers
from trainwright.core.text.plain import aligned
from trainwright.planning.memory.weights import Division, Shape, Weight, weights_of
from trainwright.strategies.compose.engine_options import EngineOptions, engine_options_of
from trainwright.strategies.compose.engines import stage_spans
from trainwright.strategies.compose.meta_module import build_on_meta
from trainwright.strategies.compose.model_plan import describe_plan, plan_for
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.compose.world import options_of, serving_ranks
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.schedules import stages_of_rank
from trainwright.strategies.plan.model_plan import ModelPlan

MIB = 2**20
# Rows of the table of bytes; the rest is only counted.
_SHOWN_LINES = 32


@dataclass(frozen=True)
class StateRules:
    """Sharding of parameters, gradients and optimizer state.

    Args:
        stage: of ZeRO; 0 shards nothing (`ddp`, `single`).
        offload: none, optimizer or parameters.
        halves: whether floating-point weights become bf16 (`precision=bf16-true`).
        servers: parameter servers, which hold parameters and the optimizer's state; 0: none.
        server_ranks: ranks that only serve, one server each; 0: servers run beside the first ranks.
    """

    stage: int = 0
    offload: str = "none"
    halves: bool = False
    servers: int = 0
    server_ranks: int = 0


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank holds, without buffers of collectives and activations.

    Args:
        parameters: parameters, including rows stepped by an offloaded optimizer.
        gradients: averaged gradients.
        optimizer: state of all optimizers; None if unknown.
    """

    parameters: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """Sum of the known parts."""
        return self.parameters + self.gradients + (self.optimizer or 0)


def bytes_of_ranks(
    module: LightningModule, layout: Layout, options: EngineOptions, rules: StateRules
) -> list[RankBytes]:
    """Return the bytes that each rank of a layout holds, by rank.

    Args:
        module: whole, on the meta device or real; unchanged afterwards.
        layout: closed.
        options: of the cut.
        rules: of the sharding.

    Raises:
        ValueError: if the module cannot be cut for this layout.
    """
    plan = plan_for(module, layout, options) if cuts_module(layout) else ModelPlan()
    weights, division = weights_of(module, plan, layout.tensor, rules.halves), Division.of(layout, rules.stage)
    stages = _held_along_pipeline(module, plan, layout, options)
    states = OptimizerStates(module)

    @cache
    def of(stage: int, index: int) -> RankBytes:
        mine = weights if stages is None else [weight for weight in weights if weight.name in stages[stage]]
        return _rank_bytes(((weight, weight.shard(division, index)) for weight in mine), states, rules)

    places = map(layout.coordinates, range(layout.world_size))
    held = [of(place["pipeline"], place["shard"] * layout.context + place["context"]) for place in places]
    return held if not rules.servers else _with_servers(held, {each.name: each for each in weights}, states, rules)


def _held_along_pipeline(
    module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions
) -> list[set[str]] | None:
    """Return the names of the parameters that each pipeline rank holds; ``None``: all."""
    if layout.pipeline == 1:
        return None
    stages = options.stages(layout.pipeline)
    holders = PipelineCut(module, plan, stage_spans(module, plan, stages, options.split), []).holders
    spread = (stages_of_rank(rank, layout.pipeline, stages, options.schedule) for rank in range(layout.pipeline))
    return [{name for name, at in holders.items() if set(mine) & set(at)} for mine in spread]


def _rank_bytes(
    held: Iterable[tuple[Weight, tuple[int, int, Shape]]], states: OptimizerStates, rules: StateRules
) -> RankBytes:
    """Return the bytes of parameters and their parts, see :meth:`Weight.shard`."""
    parameters = gradients = optimizer = 0
    is_known = states.problem is None
    for weight, (kept, averaged, stepped) in held:
        size, is_trained = weight.dtype.itemsize, weight.whole.requires_grad
        parameters += (kept + (math.prod(stepped) if rules.offload == "optimizer" else 0)) * size
        gradients += averaged * size if is_trained else 0
        state = states.bytes_of(weight.whole, stepped, weight.dtype) if is_trained else 0
        is_known, optimizer = is_known and state is not None, optimizer + (state or 0)
    return RankBytes(parameters, gradients, optimizer if is_known else None)


def _with_servers(
    held: Sequence[RankBytes], weights: Mapping[str, Weight], states: OptimizerStates, rules: StateRules
) -> list[RankBytes]:
    """Move optimizer state from workers to the ranks with servers, in parts of their rows."""
    held = [replace(each, optimizer=0) for each in held] + [RankBytes(0, 0, 0)] * rules.server_ranks
    first = len(held) - rules.server_ranks if rules.server_ranks else 0
    for number, served in enumerate(_served_bytes(states, weights, rules)):
        beside = held[first + number]
        held[first + number] = replace(
            beside, parameters=beside.parameters + served.parameters, optimizer=served.optimizer
        )
    return held


def _served_bytes(states: OptimizerStates, weights: Mapping[str, Weight], rules: StateRules) -> list[RankBytes]:
    if states.problem is not None or not states.optimizers:
        return [RankBytes(0, 0, None if states.problem else 0)] * rules.servers
    plan = ShardPlan.of(states.optimizers[0], {id(w.whole): name for name, w in weights.items()}, rules.servers)
    found = []
    for slices in plan.held:
        parts = [(weights[plan.names[piece.parameter]], piece) for piece in slices]
        # Servers send float32, and keep parameters of another type beside it.
        sent = sum(
            piece.numel * (plan.dtype.itemsize + (weight.dtype.itemsize if weight.dtype != plan.dtype else 0))
            for weight, piece in parts
        )
        state = _rank_bytes(((weight, (0, 0, piece.shape)) for weight, piece in parts), states, StateRules())
        found.append(replace(state, parameters=sent))
    return found


class OptimizerStates:
    """Optimizer state bytes for parts of parameters, found by stepping an optimizer on the meta device.

    Attributes:
        problem: why the optimizers cannot be built; None if they can.
        optimizers: of the module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.problem: str | None = None
        self.optimizers: Sequence[Optimizer] = ()
        self._groups: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._known: dict[tuple[int, Shape, torch.dtype], int | None] = {}
        try:
            made: Any = module.configure_optimizers()
            self.optimizers = _configure_optimizers(made)[0] if made is not None else ()
        except Exception as error:  # a user's code can raise anything without a Trainer
            self.problem = f"configure_optimizers failed without a Trainer: {first_line(error)}"
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._groups |= {id(parameter): (optimizer, group) for parameter in group["params"]}

    def bytes_of(self, parameter: nn.Parameter, shape: Shape, dtype: torch.dtype) -> int | None:
        """Return the state bytes for a part of a parameter; None if unknown.

        Args:
            parameter: of the module.
            shape: of the part.
            dtype: of the parameter in the run.
        """
        if self.problem is not None:
            return None
        if id(parameter) not in self._groups:
            return 0
        optimizer, group = self._groups[id(parameter)]
        key = (id(group), shape, dtype)
        if key not in self._known:
            self._known[key] = _state_bytes(
                optimizer, group, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            )
        return self._known[key]


def _state_bytes(optimizer: Optimizer, group: dict[str, Any], part: nn.Parameter) -> int | None:
    groups, state = optimizer.param_groups, optimizer.state
    part.grad = torch.empty_like(part)
    try:
        optimizer.param_groups, optimizer.state = [{**group, "params": [part]}], defaultdict(dict)
        type(optimizer).step(optimizer)  # bypasses a scheduler's wrapper
        made = optimizer.state[part].values()
        return sum(value.numel() * value.element_size() for value in made if isinstance(value, torch.Tensor))
    except Exception:  # an optimizer that reads values, which meta tensors lack
        return None
    finally:
        optimizer.param_groups, optimizer.state = groups, state


# ---------------------------------------------------------------------------------------------------------------------
# Text


def report(cfg: DictConfig, layout: Layout) -> str:
    """Return the text for a resolved configuration with a possible layout.

    Args:
        cfg: with `module`, `strategy` and `precision`.
        layout: closed.
    """
    rules = rules_of(cfg)
    parts = [layout.picture() + _servers(layout, rules)]
    try:
        module = build_on_meta(cfg)
    except Exception as error:  # a user's constructor can raise anything without memory
        why = first_line(error)
        return "\n\n".join([*parts, f"The module cannot be built without memory, so its plan is unknown: {why}"]) + "\n"
    options = engine_options_of(options_of(cfg.strategy))
    plan = plan_for(module, layout, options)
    parts.append(f"plan of {type(module).__name__}\n{describe_plan(plan, module)}")
    parts.append(_table(module, bytes_of_ranks(module, layout, options, rules), rules))
    return "\n\n".join(parts) + "\n"


def rules_of(cfg: DictConfig) -> StateRules:
    """Return the sharding rules of a configuration."""
    strategy = cfg.strategy
    return StateRules(
        stage=int(strategy.get("stage", 0)),
        offload=str(strategy.get("offload", "none")),
        halves=cfg.precision == "bf16-true",
        servers=int(strategy.get("servers", 0)),
        server_ranks=serving_ranks(cfg),
    )


def _servers(layout: Layout, rules: StateRules) -> str:
    """Return a line for each parameter server."""
    first = layout.world_size if rules.server_ranks else 0
    what = "on a separate rank that does not train" if rules.server_ranks else "beside the worker of that rank"
    return "".join(f"\nparameter server {number}: rank {first + number}, {what}" for number in range(rules.servers))


def _table(module: LightningModule, held: Sequence[RankBytes], rules: StateRules) -> str:
    whole = bytes_of_ranks(module, Layout(), EngineOptions(), StateRules(halves=rules.halves))[0]
    groups: dict[RankBytes, list[int]] = defaultdict(list)
    for rank, each in enumerate(held):
        groups[each].append(rank)
    rows = [(_ranks(ranks), *_cells(each)) for each, ranks in list(groups.items())[:_SHOWN_LINES]]
    rows.append(("whole model", *_cells(whole)))
    head = ("ranks", "parameters", "gradients", "optimizer", "total", "")
    lines = ["bytes per rank, without activations and communication buffers"]
    lines += [line.removeprefix("  ") for line in aligned(head, rows, "<>>>>>")]
    if len(groups) > _SHOWN_LINES:
        lines.insert(-1, f"... and {len(groups) - _SHOWN_LINES} more kinds of ranks")
    if whole.optimizer is None:
        why = OptimizerStates(module).problem or "the optimizer reads values of tensors"
        lines.append(f"optimizer: unknown: {why}")
    return "\n".join(lines)


def _cells(held: RankBytes) -> tuple[str, ...]:
    optimizer = "unknown" if held.optimizer is None else f"{held.optimizer:,}"
    return f"{held.parameters:,}", f"{held.gradients:,}", optimizer, f"{held.total:,}", f"{held.total / MIB:,.2f} MiB"


def _ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks like ``0-3, 8``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
