"""Builds one rank of a planned layout at full size, on tensors without memory, and counts its bytes.

The first rank of all is built: its parts of the module are cut by the strategies' engines over a fake process group of
the whole world, sharded by torch's FSDP2 (stage 3) or by ZeRO's own reducer (stages 1 and 2), and forward and backward
run on fake tensors. What is alive at a time is counted storage by storage. The optimizer does not step: its state is
added from the layout's own bytes (of an optimizer step on fake tensors torch counts wholes of sharded tensors).

The module is cut and sharded on the meta device, outside of the fake mode, in which that would take many times as long.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

from trainwright.strategies.blocks import checkpoint_activations
from trainwright.strategies.engines import EngineOptions, Engines
from trainwright.strategies.groups import LayoutGroups
from trainwright.strategies.layout import Layout
from trainwright.strategies.reducer import GradientReducer
from trainwright.strategies.shards import ParameterShard
from trainwright.trainer.planning.facts import LiveCounter, autocast_of, default_dtype, fake_world, quiet
from trainwright.trainer.planning.memory import Held, in_flight, moments
from trainwright.trainer.planning.search import Candidate, Searched

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
        parameters, predicted_parameters: of these, what is held between steps.
        seconds: that it took.
    """

    rank: int
    world_size: int
    counted: float
    predicted: float
    parameters: float
    predicted_parameters: float
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
        """One or two lines."""
        verdict = "as predicted" if self.holds else f"which is more than {100 * WITHIN:.0f} % apart"
        expected = f"{self.predicted / _GIB:.2f}, {100 * self.deviation:+.1f} %"
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
            "seconds": self.seconds,
        }


def prove(cfg: DictConfig, candidate: Candidate) -> Proof:
    """Build the first rank of a candidate and count its bytes.

    Args:
        cfg: that was planned for.
        candidate: of its plan.

    Raises:
        ValueError: if this process has met other ranks already.
    """
    began = time.monotonic()
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(resolved, DictConfig)
    searched = Searched(resolved)
    predicted, parameters = _predicted(searched, candidate)
    counted, held = _Rank(searched, candidate).count()
    return Proof(
        0, candidate.layout.world_size, counted + predicted.optimizer, predicted.total, held, parameters,
        time.monotonic() - began,
    )  # fmt: skip


def _predicted(searched: Searched, candidate: Candidate) -> tuple[Held, float]:
    """What the first rank holds at its fullest moment before the optimizer steps, and its parameters."""
    work = candidate.work
    cost = searched.facts.of(candidate.cut)
    live = in_flight(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, 0)
    share = searched.shares(work)[0]
    found = moments(searched.table, cost, work, share, live)
    most = max(found[:-1], key=lambda held: held.total)
    return most, most.parameters


class _Leave(Exception):  # noqa: N818 - no error: it ends a stage's part of the user's step
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class _Step(nn.Module):
    """Runs the user's step as a ``forward``, so that FSDP2's root surrounds it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> list[Tensor]:
        """The loss, or what a stage hands on."""
        try:
            output = self.module.training_step(batch, 0)
        except _Leave as left:
            output = left.output
        if isinstance(output, dict) and "loss" in output:
            output = output["loss"]
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


class _Rank:
    """The first rank of a layout."""

    def __init__(self, searched: Searched, candidate: Candidate) -> None:
        self._searched, self._work, self._cut = searched, candidate.work, candidate.cut
        self._module = searched.module
        self._owned = self._owned_blocks()

    def _owned_blocks(self) -> list[str]:
        blocks = self._searched.facts.blocks
        if not self._work.has_pipeline:
            return list(blocks)
        spans = self._searched.spans(self._work.layout.pipeline * self._work.stages_per_rank)
        mine = range(0, len(spans), self._work.layout.pipeline)
        return [blocks[index] for stage in mine for index in spans[stage]]

    def count(self) -> tuple[float, float]:
        """Most bytes alive in forward and backward without the optimizer's, and bytes of parameters."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        layout, precision = self._work.layout, self._searched.cfg.precision
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(quiet())
            stack.enter_context(default_dtype(precision))
            stack.enter_context(fake_world(layout.world_size))
            step = self._build(layout)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            step.to_empty(device="cpu")
            held = sum(_local_bytes(p) for p in step.parameters())
            reducers = self._reducers()
            counter = LiveCounter()
            counter.watch([_local(p) for p in step.parameters()])
            with counter:
                for _ in range(2):  # the first step leaves the gradients that the second finds
                    counter.reset_peak()
                    self._run(step, reducers, precision)
            return counter.peak, held

    def _build(self, layout: Layout) -> _Step:
        """Cut and sharded, on the meta device."""
        module, work, cut = self._module, self._work, self._cut
        module.__dict__["log"] = module.__dict__["log_dict"] = lambda *args, **kwargs: None
        if self._searched.cfg.precision == "bf16-true":
            module.to(torch.bfloat16)
        groups = LayoutGroups(layout, "cpu")
        owned = set(self._owned)
        for name in self._searched.facts.blocks:
            if name not in owned:
                _empty(module.get_submodule(name))
        if layout.tensor * layout.context * layout.expert > 1:
            self._cut_module(groups, Layout(**{**layout.sizes, "pipeline": 1, "expert": layout.expert}))
        blocks = {name: module.get_submodule(name) for name in self._owned}
        if work.has_pipeline:
            self._close_stages(blocks)
        checkpoint_activations(module, cut.checkpointing, blocks.values(), cut.checkpoint_modules)  # type: ignore[arg-type]
        self._mesh = groups.mesh(("replicate",), ("shard", "context"))
        step = _Step(module)
        if work.splits_parameters:
            for block in blocks.values():
                fully_shard(block, mesh=self._mesh, reshard_after_forward=not work.has_pipeline)
            fully_shard(step, mesh=self._mesh, reshard_after_forward=False)
        return step

    def _cut_module(self, groups: LayoutGroups, layout: Layout) -> None:
        module, cut = self._module, self._cut
        options = EngineOptions(
            sequence_parallel=cut.sequence_parallel,
            loss_parallel=cut.loss_parallel,
            attention=cut.attention,
            balance=cut.balance,
            plan={**self._searched.said.get("plan", {}), "blocks": self._owned},
        )
        # Sizes of other axes say nothing here; groups know them.
        engines = Engines(module, layout, groups, options, torch.device("cpu"))
        engines.apply()
        real: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                found = None if parameter is None else engines.cut_of(owner, name)
                if parameter is None or found is None:
                    continue
                part = real.setdefault(
                    id(parameter), nn.Parameter(found.part(parameter.detach()), requires_grad=parameter.requires_grad)
                )
                owner._parameters[name] = part

    def _close_stages(self, blocks: dict[str, nn.Module]) -> None:
        """The first block of another stage after the last own one ends the step; those between are passed through."""
        facts = self._searched.facts
        last_own = max(facts.blocks.index(name) for name in blocks)
        for index, name in enumerate(facts.blocks):
            if name not in blocks:
                is_end = index > last_own
                facts.module.get_submodule(name).forward = _leave if is_end else _hand_on

    def _reducers(self) -> list[GradientReducer]:
        work = self._work
        if work.splits_parameters or work.stage == 0:
            return []
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        shards = [ParameterShard(parameter, self._mesh) for parameter in parameters]
        self._shards = shards
        return [GradientReducer(shards, self._mesh, int(work.bucket_bytes))]

    def _run(self, step: _Step, reducers: list[GradientReducer], precision: str) -> None:
        work = self._work
        live = int(in_flight(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, 0))
        passes = -(-live // work.stages_per_rank) if work.has_pipeline else 1
        with contextlib.ExitStack() as stack:
            if work.has_pipeline:
                self._zero(step)
                for reducer in reducers:
                    reducer.begin()
                    stack.enter_context(reducer.accumulate(shards_too=True))
                if work.splits_parameters:
                    step.set_is_last_backward(False)  # type: ignore[operator]
                    step.set_reshard_after_backward(False)  # type: ignore[operator]
                    step.set_requires_gradient_sync(False)  # type: ignore[operator]
            graphs = []
            for _ in range(passes):
                with autocast_of(precision):
                    graphs.append(step(self._searched.facts.resized(work.micro_batch)))
            if not work.has_pipeline:
                self._zero(step)
            for outputs in graphs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
                outputs.clear()
        for reducer in reducers if work.has_pipeline else ():
            reducer.finish()

    def _zero(self, step: _Step) -> None:
        for parameter in step.parameters():
            parameter.grad = None
        for shard in getattr(self, "_shards", ()):
            shard.optimized.grad = None


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local


def _local_bytes(parameter: Tensor) -> int:
    return _local(parameter).numel() * parameter.element_size()


def _empty(block: nn.Module) -> None:
    """Take all parameters from a block of another stage."""
    for part in block.modules():
        part._parameters.clear()
        part._buffers.clear()


def _hand_on(*args: Any, **kwargs: Any) -> Any:
    return args[0]


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Leave((args, kwargs))
