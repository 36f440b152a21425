"""A rank of a planned layout that is built at full size, on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainwright.planning.model.experts import assume_routing
from trainwright.planning.model.live import LiveCounter, local
from trainwright.planning.model.without_memory import (
    autocast_of,
    default_dtype,
    fake_tensors,
    fake_world,
    quiet,
    without_trainer,
)
from trainwright.planning.proof.built_step import Averaging, MicroBatch, PipelinePass, Step
from trainwright.planning.search.plan import Candidate
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.work import Work
from trainwright.planning.time.order import Action, actions_of, until_fullest
from trainwright.strategies.compose.check_layout import build_on_meta
from trainwright.strategies.compose.engines import EngineOptions, Engines
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.data.gathering import gather_ahead
from trainwright.strategies.pipeline.form import Form
from trainwright.strategies.plan.blocks import checkpoint_activations
from trainwright.strategies.state.shards import ParameterShard


class BuiltRank:
    """One rank of a layout.

    Args:
        searched: the configuration that was planned for.
        candidate: of its plan.
        rank: which.
    """

    def __init__(self, searched: Searched, candidate: Candidate, rank: int) -> None:
        self._searched, self._work, self._cut, self._rank = searched, candidate.work, candidate.cut, rank
        self._module = build_on_meta(searched.cfg)
        self._engines: Engines | None = None

    def count(self) -> tuple[float, float]:
        """Most bytes alive in forward and backward without the optimizer's, and bytes of parameters."""
        work, precision = self._work, self._searched.cfg.precision
        # Asked before there is a world: it has one of its own.
        form = self._searched.facts.handed_on(self._cut, work.micro_batch) if work.has_pipeline else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet())
            stack.enter_context(default_dtype(precision))
            stack.enter_context(fake_world(work.layout.world_size, self._rank))
            step = self._build()
            stack.enter_context(fake_tensors())
            step.to_empty(device="cpu")
            counter = LiveCounter()
            counter.watch([local(parameter) for parameter in step.parameters()])
            with counter:
                averaging = Averaging(step, work, self._shards())
                run = self._pass(step, averaging, form)
                for begins, ends in _micro_batches(work):
                    counter.reset_peak()
                    with contextlib.nullcontext() if ends else averaging.unfinished():
                        run(begins)
            return counter.peak, sum(local(parameter).nbytes for parameter in step.parameters())

    # ---- what it holds ----------------------------------------------------------------------------------------------

    def _build(self) -> Step:
        """Cut and sharded, on the meta device."""
        module, work, cut = self._module, self._work, self._cut
        groups = LayoutGroups(work.layout, "cpu")
        self._mesh = groups.mesh(("replicate",), ("shard", "context"))
        self._expert_mesh = groups.mesh(("replicate",), ("expert_shard",)) if work.layout.expert > 1 else self._mesh
        without_trainer(module)
        if self._searched.cfg.precision == "bf16-true":
            module.to(torch.bfloat16)
        blocks = {name: module.get_submodule(name) for name in self._searched.facts.blocks}
        if self._is_cut:
            self._engines = self._cut_module(groups)
            blocks = self._engines.owned_blocks if self._engines.plan.blocks else blocks
        checkpoint_activations(module, cut.checkpointing, blocks.values(), cut.checkpoint_modules)  # type: ignore[arg-type]
        step = Step(module)
        if work.splits_parameters:
            self._shard(step, blocks)
        return step

    @property
    def _is_cut(self) -> bool:
        return cuts_module(self._work.layout)

    def _cut_module(self, groups: LayoutGroups) -> Engines:
        module, cut, work, said = self._module, self._cut, self._work, self._searched.said
        blocks = self._searched.facts.blocks
        options = EngineOptions(
            schedule=work.schedule,
            micro_batches=work.parts,
            stages_per_rank=work.stages_per_rank,
            batch_dims=said.get("batch_dims", {}),
            sequence_parallel=cut.sequence_parallel,
            loss_parallel=cut.loss_parallel,
            attention=cut.attention,
            balance=cut.balance,
            plan={**said.get("plan", {}), **({"blocks": blocks} if blocks else {})},
        )
        engines = Engines(module, work.layout, groups, options, torch.device("cpu"))
        engines.apply()
        assume_routing(engines.dispatchers, cut.routing)
        parts: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                found = None if parameter is None else engines.cut_of(owner, name)
                if parameter is None or found is None:
                    continue
                if id(parameter) not in parts:
                    part = found.part(parameter.detach())
                    parts[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
                owner._parameters[name] = parts[id(parameter)]
        return engines

    def _shard(self, step: Step, blocks: Mapping[str, nn.Module]) -> None:
        """By FSDP2; in a pipeline parameters are gathered once a step."""
        options: dict[str, Any] = {
            "reshard_after_forward": not self._work.has_pipeline,
            "ignored_params": {parameter for parameter in step.parameters() if parameter.dim() == 0},
        }
        for block in blocks.values():
            if self._work.layout.expert > 1 and self._engines is not None:
                for experts in self._engines.expert_modules_in(block):
                    fully_shard(experts, mesh=self._expert_mesh, **options)
            fully_shard(block, mesh=self._mesh, **options)
        fully_shard(step, mesh=self._mesh, **{**options, "reshard_after_forward": False})
        if self._work.prefetch is not None:
            gather_ahead(step, self._work.prefetch)

    def _shards(self) -> list[list[ParameterShard]]:
        """What ZeRO's reducers average in stages 1 and 2: for each mesh the parameters that others train too."""
        if self._work.splits_parameters or self._work.stage == 0:
            return []
        experts = self._engines.expert_parameters if self._engines is not None else set()
        found = []
        for mesh, are_experts in ((self._mesh, False), (self._expert_mesh, True)):
            chosen = [p for p in self._module.parameters() if p.requires_grad and (p in experts) == are_experts]
            if chosen and not (self._is_cut and mesh.size() == 1):
                found.append([ParameterShard(parameter, mesh) for parameter in chosen])
        return found

    # ---- what it runs -----------------------------------------------------------------------------------------------

    def _pass(self, step: Step, averaging: Averaging, form: Form | None) -> Callable[[bool], None]:
        """Runs forward and backward; told whether a step begins with it.

        Args:
            step: the rank's module.
            averaging: of its gradients.
            form: of what stages of a pipeline hand on; ``None``: there is no pipeline.
        """

        def forward() -> Any:
            with autocast_of(self._searched.cfg.precision):
                return step(self._searched.facts.resized(self._work.micro_batch))

        if form is None:
            return MicroBatch(forward, averaging)
        work, names = self._work, self._searched.facts.blocks
        place = work.layout.coordinates(self._rank)["pipeline"]
        return PipelinePass(
            forward,
            averaging,
            step,
            form,
            actions=until_fullest(actions_at(work, place)),
            blocks={name: self._module.get_submodule(name) for name in names},
            spans=self._searched.spans(work.layout.pipeline * work.stages_per_rank),
        )


def _micro_batches(work: Work) -> list[tuple[bool, bool]]:
    """Whether a step begins with it, and whether one ends with it, for each forward and backward that is run."""
    if work.rounds > 1:  # those that follow find what the second finds
        return [(True, False), (False, True)]
    return [(True, True)] * (1 if work.has_pipeline else 2)  # the first step leaves gradients that the second finds


def actions_at(work: Work, place: int) -> Sequence[Action]:
    """The passes of a rank at a place along the pipeline, in order."""
    return actions_of(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, place)
