"""A step of a rank that is built on tensors without memory: its passes, and what becomes of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainwright.planning.model.without_memory import loss_of
from trainwright.planning.search.work import Work, bucket_bytes
from trainwright.planning.time.order import FORWARD, Action
from trainwright.strategies.data.gathering import parameter_groups
from trainwright.strategies.data.reducer import GradientReducer
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.first_step.block_values import HookRange
from trainwright.strategies.pipeline.first_step.routes import Routes
from trainwright.strategies.pipeline.form import Form, take_apart
from trainwright.strategies.pipeline.gates import Gates, StagePass
from trainwright.strategies.pipeline.stage import arrive
from trainwright.strategies.state.shards import ParameterShard


class Step(nn.Module):
    """Runs the user's step as a ``forward``, so that FSDP2's root surrounds it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        # Surrounds the call within the root's hooks; a pipeline ends a stage's part of it there.
        self.guard: Callable[[Callable[[], Any]], Any] = _call

    def forward(self, batch: Any) -> Any:
        """The loss, or what a stage hands on."""
        return self.guard(partial(self.module.training_step, batch, 0))


def _call(function: Callable[[], Any]) -> Any:
    return function()


class Averaging:
    """What becomes of gradients, as the strategies have FSDP2, ZeRO's reducers and DistributedDataParallel do it.

    Args:
        step: the rank's module.
        work: layout and step.
        shards: of each of the reducers.
    """

    def __init__(self, step: Step, work: Work, shards: Sequence[Sequence[ParameterShard]]) -> None:
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


class MicroBatch:
    """Forward and backward of a micro-batch.

    Args:
        forward: of the rank's step; returns what `training_step` does.
        averaging: of its gradients.
    """

    def __init__(self, forward: Callable[[], Any], averaging: Averaging) -> None:
        self._forward, self._averaging = forward, averaging

    def __call__(self, begins: bool) -> None:
        """Run; gradients of the step before are dropped after forward, as Lightning does, if a step begins."""
        loss = loss_of(self._forward())
        if begins:
            self._averaging.zero()
        loss.backward()


class PipelinePass:
    """The passes of a rank's stages, in the order of the schedule, as far as it gets fuller.

    Args:
        forward: of the rank's step.
        averaging: of its gradients.
        step: the rank's module.
        form: of what one stage hands to the next.
        actions: the passes, in order.
        blocks: of the whole model, by name.
        spans: blocks of each stage.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        averaging: Averaging,
        step: Step,
        form: Form,
        actions: Sequence[Action],
        blocks: Mapping[str, nn.Module],
        spans: Sequence[range],
    ) -> None:
        self._forward_step, self._averaging, self._step, self._form = forward, averaging, step, form
        self._actions, self._names = actions, list(blocks)
        cut = cast(PipelineCut, SimpleNamespace(names=self._names, spans=spans, stages=len(spans), ghosts={}))
        # What else than outputs travels is found out by a step of real numbers.
        self._routes = Routes(cut, HookRange(0, 0), [frozenset()] * len(spans))
        # By stage and micro-batch: what a forward has returned, and the leaves of its graph.
        self._waiting: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._gates = Gates(list(blocks.values()))
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
        run = self._gates.current = StagePass(self._routes, stage, received)
        self._step.guard = run.run
        try:
            output = self._forward_step()
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
