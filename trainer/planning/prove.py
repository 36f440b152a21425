"""Builds ranks of a planned layout at full size, on tensors without memory, and counts their bytes.

The first rank is built, and in a pipeline the first rank of its last place too. A rank's parts of the module are cut by
the strategies' engines over a process group of the whole world in which nobody else is there, sharded by torch's FSDP2
(stage 3) or averaged by ZeRO's own reducer (stages 1 and 2); forward and backward run on fake tensors, in a pipeline
stage by stage in the order of its schedule. What is alive at a time is counted storage by storage.

Three things are not built. The optimizer does not step: its state is added from the layout's own bytes (of an optimizer
step on fake tensors torch counts wholes of sharded tensors). The buckets of torch's DistributedDataParallel, which does
not run on fake tensors, are stood for by tensors of their size. Messages between stages are not sent, and what a
backend would keep for them is not counted.

The module is cut and sharded on the meta device, outside of the fake mode, in which that would take many times as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from trainwright.strategies.blocks import checkpoint_activations
from trainwright.strategies.engines import EngineOptions, Engines
from trainwright.strategies.gathering import gather_ahead, parameter_groups
from trainwright.strategies.groups import LayoutGroups
from trainwright.strategies.hybrid_rules import cuts_module
from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.form import Form, take_apart
from trainwright.strategies.pipeline.gates import Gates, StagePass
from trainwright.strategies.pipeline.stage import arrive
from trainwright.strategies.reducer import GradientReducer
from trainwright.strategies.shards import ParameterShard
from trainwright.trainer.check_layout import build_on_meta
from trainwright.trainer.planning.experts import assume_routing
from trainwright.trainer.planning.live import LiveCounter, local
from trainwright.trainer.planning.memory import Held, moments
from trainwright.trainer.planning.order import FORWARD, INPUTS, Action, actions_of, until_fullest
from trainwright.trainer.planning.plan import Candidate
from trainwright.trainer.planning.searched import Searched
from trainwright.trainer.planning.without_memory import (
    autocast_of,
    default_dtype,
    fake_world,
    loss_of,
    quiet,
    without_trainer,
)
from trainwright.trainer.planning.work import Work, bucket_bytes

WITHIN = 0.05
"""Part by which counted and predicted bytes may differ."""
_GIB = 2**30


@dataclass(frozen=True)
class Proof:
    """What one rank was found to hold.

    Args:
        rank: which.
        world_size: of how many.
        counted: most bytes alive in forward and backward, state of the optimizer included.
        predicted: the same as planned.
        parameters, predicted_parameters: bytes of these that are held between steps.
        moment: of the step at which the most was predicted.
        seconds: that it took.
    """

    rank: int
    world_size: int
    counted: float
    predicted: float
    parameters: float
    predicted_parameters: float
    moment: str
    seconds: float

    @property
    def deviation(self) -> float:
        """Part by which the prediction is above (positive) or below what was counted."""
        return self.predicted / self.counted - 1

    @property
    def holds(self) -> bool:
        """Whether the two differ by no more than :data:`WITHIN`."""
        return abs(self.deviation) <= WITHIN

    def text(self) -> str:
        """Two lines."""
        verdict = "as predicted" if self.holds else f"which is more than {100 * WITHIN:.0f} % apart"
        expected = f"{self.predicted / _GIB:.2f}, {100 * self.deviation:+.1f} %, {self.moment}"
        return (
            f"proof: rank {self.rank} of {self.world_size}, built at full size without memory in {self.seconds:.1f} "
            f"s:\n  parameters {self.parameters / _GIB:.2f} GiB (predicted {self.predicted_parameters / _GIB:.2f}), "
            f"most in forward and backward {self.counted / _GIB:.2f} GiB (predicted {expected}), {verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values; bytes and seconds."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "counted_bytes": self.counted,
            "predicted_bytes": self.predicted,
            "deviation": self.deviation,
            "holds": self.holds,
            "parameter_bytes": self.parameters,
            "predicted_parameter_bytes": self.predicted_parameters,
            "moment": self.moment,
            "seconds": self.seconds,
        }


def prove(cfg: DictConfig, candidate: Candidate) -> tuple[Proof, ...]:
    """Build ranks of a candidate and count their bytes: the first, and of a pipeline the first of its last place.

    Args:
        cfg: that was planned for.
        candidate: of its plan.

    Raises:
        ValueError: if this process has met other ranks already, or the layout is one that cannot be proved; the
            message says why, and what to do.
    """
    _refuse(candidate.work)
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(resolved, DictConfig)
    searched = Searched(resolved)
    if searched.facts.near(candidate.cut).is_real:
        raise ValueError(
            f"--prove: training_step of {type(searched.module).__name__} reads values of tensors, so it cannot be run "
            "at full size without memory; leave out --prove"
        )
    return tuple(_prove(searched, candidate, rank) for rank in _ranks_of(candidate.layout))


def _refuse(work: Work) -> None:
    if work.offload != "none":
        raise ValueError(
            f"--prove: the first layout has strategy.offload={work.offload}, and bytes of the host and of the device "
            "cannot be told apart where neither is there; leave out --prove, or plan for more devices"
        )
    if work.has_pipeline and any(action.kind == INPUTS for action in _actions(work, 0)):
        raise ValueError(
            f"--prove: strategy.schedule={work.schedule} computes gradients of inputs and of weights apart, which is "
            "not built; allowed are schedules that do not, such as 1f1b and interleaved_1f1b"
        )


def _ranks_of(layout: Layout) -> tuple[int, ...]:
    """The first, and of a pipeline the first of its last place: those of which a plan predicts."""
    return (0, layout.world_size // layout.pipeline * (layout.pipeline - 1)) if layout.pipeline > 1 else (0,)


def _prove(searched: Searched, candidate: Candidate, rank: int) -> Proof:
    began = time.monotonic()
    most = _predicted(searched, candidate, candidate.layout.coordinates(rank)["pipeline"])
    counted, held = _Rank(searched, candidate, rank).count()
    return Proof(
        rank=rank,
        world_size=candidate.layout.world_size,
        counted=counted + most.optimizer,
        predicted=most.total,
        parameters=held,
        predicted_parameters=most.parameters,
        moment=most.moment,
        seconds=time.monotonic() - began,
    )


def _predicted(searched: Searched, candidate: Candidate, place: int) -> Held:
    """What a rank holds at its fullest moment before the optimizer steps."""
    work = candidate.work
    cost = searched.facts.near(candidate.cut)
    share = next(share for share in searched.shares(work) if share.place == place)
    found = moments(searched.table, cost, work, share)
    return max(found[:-1], key=lambda held: held.total)


def _actions(work: Work, place: int) -> Sequence[Action]:
    return actions_of(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, place)


# ---------------------------------------------------------------------------------------------------------------------
# A rank


class _Step(nn.Module):
    """Runs the user's step as a ``forward``, so that FSDP2's root surrounds it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        # Surrounds the call within the root's hooks; a pipeline ends a stage's part of it there.
        self.guard: Callable[[Callable[[], Any]], Any] = _call

    def forward(self, batch: Any) -> Any:
        """The loss, or what a stage hands on."""
        return self.guard(partial(self.module.training_step, batch, 0))


class _Rank:
    """One rank of a layout."""

    def __init__(self, searched: Searched, candidate: Candidate, rank: int) -> None:
        self._searched, self._work, self._cut, self._rank = searched, candidate.work, candidate.cut, rank
        self._module = build_on_meta(searched.cfg)
        self._engines: Engines | None = None

    def count(self) -> tuple[float, float]:
        """Most bytes alive in forward and backward without the optimizer's, and bytes of parameters."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        work, precision = self._work, self._searched.cfg.precision
        # Asked before there is a world: it has one of its own.
        form = self._searched.facts.handed_on(self._cut, work.micro_batch) if work.has_pipeline else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet())
            stack.enter_context(default_dtype(precision))
            stack.enter_context(fake_world(work.layout.world_size, self._rank))
            step = self._build()
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            step.to_empty(device="cpu")
            counter = LiveCounter()
            counter.watch([local(parameter) for parameter in step.parameters()])
            with counter:
                averaging = _Averaging(step, work, self._shards())
                run: Callable[[bool], None] = _Pass(self, step, averaging)
                if form is not None:
                    run = _PipelinePass(self, step, averaging, form)
                for begins, ends in _micro_batches(work):
                    counter.reset_peak()
                    with contextlib.nullcontext() if ends else averaging.unfinished():
                        run(begins)
            return counter.peak, sum(local(parameter).nbytes for parameter in step.parameters())

    # ---- what it holds ----------------------------------------------------------------------------------------------

    def _build(self) -> _Step:
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
        step = _Step(module)
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

    def _shard(self, step: _Step, blocks: Mapping[str, nn.Module]) -> None:
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

    @property
    def work(self) -> Work:
        """Layout and step."""
        return self._work

    def forward(self, step: _Step) -> Any:
        """Of a micro-batch: the loss, or what a stage hands on."""
        with autocast_of(self._searched.cfg.precision):
            return step(self._searched.facts.resized(self._work.micro_batch))

    def stages(self) -> tuple[list[str], list[nn.Module], list[range]]:
        """Names of all blocks, the blocks, and those of each stage of the pipeline."""
        names = self._searched.facts.blocks
        spans = self._searched.spans(self._work.layout.pipeline * self._work.stages_per_rank)
        return names, [self._module.get_submodule(name) for name in names], spans

    @property
    def place(self) -> int:
        """Along the pipeline."""
        return self._work.layout.coordinates(self._rank)["pipeline"]


def _micro_batches(work: Work) -> list[tuple[bool, bool]]:
    """Whether a step begins with it, and whether one ends with it, for each forward and backward that is run."""
    if work.rounds > 1:  # those that follow find what the second finds
        return [(True, False), (False, True)]
    return [(True, True)] * (1 if work.has_pipeline else 2)  # the first step leaves gradients that the second finds


def _call(function: Callable[[], Any]) -> Any:
    return function()


# ---------------------------------------------------------------------------------------------------------------------
# A step of it


class _Averaging:
    """What becomes of gradients, as the strategies have FSDP2, ZeRO's reducers and DistributedDataParallel do it.

    Args:
        step: the rank's module.
        work: layout and step.
        shards: of each of the reducers.
    """

    def __init__(self, step: _Step, work: Work, shards: Sequence[Sequence[ParameterShard]]) -> None:
        self._module = step
        self._split: Any = step if work.splits_parameters else None
        self._shards = [shard for each in shards for shard in each]
        self._reducers = [_reducer(each, work) for each in shards]
        self._leaves_whole = work.stage == 1 or work.no_sync
        self._is_unfinished = False
        self._buckets: list[Tensor] = []
        if work.stage == 0 and work.layout.replicate > 1:
            self._hold_buckets(are_added_to=work.rounds > 1)

    def _hold_buckets(self, are_added_to: bool) -> None:
        """In the place of DistributedDataParallel's: gradients go there at once, unless they are accumulated before."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._buckets = [torch.empty_like(parameter) for parameter in trained]
        for parameter in () if are_added_to else trained:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def zero(self) -> None:
        """Drop all gradients, as an optimizer does."""
        for parameter in self._module.parameters():
            parameter.grad = None
        for shard in self._shards:
            shard.optimized.grad = None

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[None]:
        """Around a micro-batch that others of the same step follow."""
        split, whole = self._split, self._leaves_whole
        self._is_unfinished = True
        with contextlib.ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.accumulate(shards_too=whole))
            if split is not None:
                set_sync = split.set_requires_gradient_sync if whole else split.set_requires_all_reduce
                set_sync(False)
                stack.callback(set_sync, True)
            yield
        self._is_unfinished = False

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Around the passes of a pipeline: they leave whole gradients."""
        with contextlib.ExitStack() as stack:
            for reducer in self._reducers:
                reducer.begin()
                stack.enter_context(reducer.accumulate(shards_too=True))
            if self._split is not None:
                self._split.set_is_last_backward(False)
                self._split.set_reshard_after_backward(False)
                self._split.set_requires_gradient_sync(False)
            yield

    def finish(self) -> None:
        """Average what the passes of a pipeline have left."""
        for reducer in self._reducers:
            reducer.finish()
        split = self._split
        if split is None:
            return
        split.set_is_last_backward(True)
        split.set_reshard_after_backward(True)
        split.set_requires_gradient_sync(not (self._is_unfinished and self._leaves_whole))
        state = split._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in parameter_groups(each):
                group.post_backward()
        state._root_post_backward_final_callback()
        split.set_requires_gradient_sync(True)


def _reducer(shards: Sequence[ParameterShard], work: Work) -> GradientReducer:
    whole = sum(shard.parameter.nbytes for shard in shards)
    return GradientReducer(shards, shards[0].mesh, int(bucket_bytes(work, whole)))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Pass:
    """Forward and backward of a micro-batch.

    Args:
        rank: whose.
        step: its module.
        averaging: of its gradients.
    """

    def __init__(self, rank: _Rank, step: _Step, averaging: _Averaging) -> None:
        self._rank, self._step, self._averaging = rank, step, averaging

    def __call__(self, begins: bool) -> None:
        """Run; gradients of the step before are dropped after forward, as Lightning does, if a step begins."""
        loss = loss_of(self._rank.forward(self._step))
        if begins:
            self._averaging.zero()
        loss.backward()


class _PipelinePass:
    """The passes of a rank's stages, in the order of the schedule, as far as it gets fuller.

    Args:
        rank: whose.
        step: its module.
        averaging: of its gradients.
        form: of what one stage hands to the next.
    """

    def __init__(self, rank: _Rank, step: _Step, averaging: _Averaging, form: Form) -> None:
        self._rank, self._step, self._averaging, self._form = rank, step, averaging, form
        self._names, blocks, self._spans = rank.stages()
        self._actions = until_fullest(_actions(rank.work, rank.place))
        # By stage and micro-batch: what a forward has returned, and the leaves of its graph.
        self._waiting: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._gates = Gates(blocks)
        self._gates.attach()

    def __call__(self, begins: bool) -> None:
        """Run; gradients of the step before are dropped first, if a step begins."""
        if begins:
            self._averaging.zero()
        with self._averaging.local():
            for action in self._actions:
                run = self._forward if action.kind == FORWARD else self._backward
                run(action.stage, action.part)
            self._waiting.clear()
        self._averaging.finish()

    def _forward(self, stage: int, part: int) -> None:
        received: Any = None
        leaves: tuple[Tensor, ...] = ()
        if stage > 0:
            received, leaves = arrive(self._form, [each.empty(torch.device("cpu")) for each in self._form.tensors])
        run = self._gates.current = StagePass(self._names, self._spans[stage], received)
        self._step.guard = run.run
        try:
            output = self._rank.forward(self._step)
        finally:
            self._gates.current = None
        outputs = (loss_of(output),) if run.is_last else take_apart(output, self._names[run.span.stop - 1])[1]
        self._waiting[stage, part] = outputs, leaves

    def _backward(self, stage: int, part: int) -> None:
        outputs, leaves = self._waiting.pop((stage, part))
        wanted = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(wanted, [torch.empty_like(output) for output in wanted])
        for leaf in leaves:
            leaf.grad = None  # sent
