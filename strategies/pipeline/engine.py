"""Training and evaluation steps of an unmodified module over pipeline stages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.core.problems import first_of
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.contract.randomness.state import kept_random_state
from trainwright.strategies.pipeline import micro_batches as batches
from trainwright.strategies.pipeline.cut import PipelineCut, StageParameters, put
from trainwright.strategies.pipeline.gates import Gates, StagePass, order_message, units_of
from trainwright.strategies.pipeline.micro_batches import BatchDims
from trainwright.strategies.pipeline.relay import RelayPass
from trainwright.strategies.pipeline.results import no_log, redirected_log
from trainwright.strategies.pipeline.schedules import CHOICES, ranks_of_stages
from trainwright.strategies.pipeline.stage import UserStepStage
from trainwright.strategies.pipeline.tracing.block_values import Placeholder
from trainwright.strategies.pipeline.tracing.dependency_trace import DependencyTrace
from trainwright.strategies.pipeline.tracing.routes import StageRoutes, needs_everything, plan_routes
from trainwright.strategies.pipeline.tracing.step_randomness import StepRandomness
from trainwright.strategies.pipeline.tracing.step_state import StatePlace, StepState, find_places
from trainwright.strategies.pipeline.tracing.whole_batch import Rehearsal
from trainwright.strategies.pipeline.training import PipelineStep, Steps, Training
from trainwright.strategies.pipeline.value_spec import SpecRegistry, ValueChannel
from trainwright.strategies.plan.module_state import ModuleState


class PipelineEngine:
    """Driver of this rank's stages.

    Every stage runs the user's ``training_step`` on each micro-batch: blocks of other stages are skipped, the first own
    block gets the received activation, and after the last own block the step is left (the last stage continues to the
    loss).

    The constructor is a collective of the group.

    Args:
        module: the user's module, cut (``cut.apply()``).
        cut: of the module.
        group: ranks of one pipeline, in order.
        schedule: a key of :data:`~trainwright.strategies.pipeline.schedules.CHOICES`.
        micro_batches: per batch; fewer for a batch with fewer samples.
        device: of activations.
        steps: run the user's module as the strategy requires.
        batch_dims: exceptions to "samples are along dim 0", by path in the batch; see :func:`split_batch`.
        look: like ``run``, without gradients and on all stages completely; default: ``run``.
        sent_as: see :class:`UserStepStage`.

    Attributes:
        cut: as given.
        last_stage_rank: rank in the group of the last stage.
    """

    def __init__(
        self,
        module: nn.Module,
        cut: PipelineCut,
        *,
        group: dist.ProcessGroup,
        schedule: str,
        micro_batches: int,
        device: torch.device,
        steps: Steps,
        batch_dims: BatchDims | None = None,
        sent_as: torch.dtype | None = None,
    ) -> None:
        self.cut, self._steps = cut, steps
        self._module, self._group, self._device = module, group, torch.device(device)
        self._schedule_name, self._micro_batches = schedule, micro_batches
        self._dims = dict(batch_dims or {})
        self._ranks = ranks_of_stages(dist.get_world_size(group), cut.stages, schedule)
        self.last_stage_rank = self._ranks[-1]
        self._gates = Gates(cut.blocks, units_of(module, cut))
        unique = broadcast_value(uuid.uuid4().hex, 0, group, self._device)
        self._registry = SpecRegistry(f"trainwright/pipeline/{unique}")
        _connect_neighbors(group, self._device)
        self._channel = ValueChannel(group, self._device)
        self._training: Training | None = None
        self._randomness = StepRandomness(self._device, self.from_last_stage)
        self._is_compiled = False
        # Kind of relay -> whether every rank gets all block values, and whether it draws random numbers outside of
        # blocks.
        self._relays: dict[str, tuple[bool, bool]] = {}
        self._is_whole = False
        self.stages = [self._make_stage(index, sent_as) for index in cut.mine]

    def _make_stage(self, index: int, sent_as: torch.dtype | None) -> UserStepStage:
        return UserStepStage(
            StageParameters(self.cut, index),
            index,
            self.cut.stages,
            self._device,
            self._group,
            ranks=self._ranks,
            registry=self._registry,
            source=f"The block {self.cut.names[self.cut.spans[index].stop - 1]!r}",
            sent_as=sent_as,
        )

    def attach(self) -> None:
        """Install the gates, after all other hooks, patches and compilations of the blocks.

        Raises:
            ValueError: if a block is compiled and the schedule computes input and weight gradients separately.
        """
        compiled = [
            name
            for name, block in zip(self.cut.names, self.cut.blocks, strict=True)
            if any(module._compiled_call_impl is not None for module in block.modules())
        ]
        if compiled and CHOICES[self._schedule_name].splits_backward:
            possible = [name for name, choice in CHOICES.items() if not choice.splits_backward]
            raise ValueError(
                f"schedule={self._schedule_name!r} computes input and weight gradients separately, which a compiled "
                f"block ({compiled[0]}) does not support. Set compile to off, or schedule to one of: "
                f"{', '.join(possible)}."
            )
        self._is_compiled = any(module._compiled_call_impl is not None for module in self._module.modules())
        self._gates.attach()
        _ = self.cut.engine_hooks  # hooks registered later are the user's

    def detach(self) -> None:
        """Remove the gates, schedules and buffers."""
        self._gates.detach()
        if self._training is not None:
            self._training.forget()

    def refresh(self) -> None:
        """Renegotiate what stages send, after ``requires_grad`` of parameters changed.

        Call it between the same steps on every rank of the pipeline. No communication.
        """
        self._registry.refresh()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, which runs the user's step; returns its result, or the stage's output if it ends early.

        Raises:
            RuntimeError: if the step does not call the blocks once and in order, or needs what cannot be sent.
        """
        run = self._gates.current
        if isinstance(run, StagePass | Rehearsal):
            with self.cut.listed_ghosts():
                return run.run(function)
        if isinstance(run, RelayPass) and run.trace is not None:
            run.trace.refresh()
        return function()

    # Training

    def train(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        batch: Any,
        scale: Callable[[Tensor, float], Tensor],
        samples: int | None = None,
    ) -> Any:
        """Run one ``training_step`` of the whole batch: forward and backward of all micro-batches. A collective.

        Gradients are those of the whole batch (see ``training.py``) and accumulate into ``p.grad``.

        Args:
            args, kwargs: of ``training_step``; one of them is ``batch``.
            batch: the same on all ranks of the pipeline.
            scale: returns the scaled loss of a micro-batch, given its share of the samples.
            samples: of a batch, according to its loader; ``None``: unknown.

        Returns:
            On every rank the step's result for the whole batch, without gradient: the loss, or a dict; ``None`` if all
                micro-batches returned ``None`` (gradients are then zeros).
        """
        size = batches.batch_size_of(batch, self._dims)
        parts = batches.split_batch(batch, min(self._micro_batches, size), self._dims)
        arguments = [batches.replace_argument(args, kwargs, batch, part) for part in parts]
        if self._training is None:
            if samples is not None and len(parts) > 1:
                batches.check_samples(batch, self._dims, size, samples)
            self._training = self._trace_first_step(arguments[0])
        sizes = batches.part_sizes(size, len(parts))
        return self._training.run(PipelineStep((args, kwargs), arguments, batch, parts, sizes, scale))

    def join_micro_batches(self) -> bool:
        """Run the code after the blocks once per batch from now on; returns whether this is new."""
        training = self._training
        if training is None or training.is_whole or self._micro_batches == 1:
            return False
        training.is_whole = True
        return True

    def _trace_first_step(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Training:
        """Trace the first micro-batch without gradients to find dependencies between stages. A collective.

        Restores the module's state.

        Raises:
            RuntimeError: if a value cannot be sent, or depends on how the batch is split.
        """
        args, kwargs = arguments
        trace = DependencyTrace(self.cut, self._device, arguments)
        run = RelayPass(self.cut, self._ranks, self._channel, trace, everything=True)
        error: Exception | None = None
        places: list[StatePlace] = []
        problems: list[str] = []
        ranks = set(dist.get_process_group_ranks(self._group))
        stop = listen(
            lambda call: trace.record_collective(call.kind, ranks & set(dist.get_process_group_ranks(call.group)))
        )
        with torch.no_grad(), kept_random_state(self._device), self.evaluating():
            state = ModuleState(self._module)
            trace.name_state(self._module)
            try:
                with redirected_log(self._module, lambda name, value, **options: trace.use_results(value)):
                    trace.use_results(self._relayed(run, lambda: self._steps.look(args, kwargs)))
                places, problems = find_places(self.cut, self._module, state.changes(), trace, self._micro_batches)
                if run.passes != 1:
                    raise RuntimeError(order_message(self.cut.names, 0, len(self.cut.names)))
            except Exception as raised:
                error = raised
                run.fail(raised)
            finally:
                stop()
            state.restore()
        trace.finish()
        problems += trace.problems
        wanted = [*trace.needs, trace.results]
        own = wanted, trace.mutated, problems, error is None, trace.draws, trace.joins
        found = all_gather_values(own, self._group, self._device)
        if len({each[3] for each in found}) > 1:
            raise error or RuntimeError("training_step failed on another stage of the pipeline: see its rank's error.")
        forms, left = run.known()
        if len(forms) == len(self.cut.blocks):
            needs = [(each[0], each[1]) for each in found]
            routes, unsent = plan_routes(self.cut, self._ranks, trace, needs, forms, left)
            problems = list(dict.fromkeys([*unsent, *(problem for each in found for problem in each[2])]))
            if problems:
                raise RuntimeError(first_of(problems)) from error
        if error is not None:
            raise error
        draws, is_whole = (any(each[place] for each in found) for place in (4, 5))
        return Training(
            self._module, self.cut, self._gates, self.stages, routes,
            StepState(self._module, places, self._ranks, self._channel), self._randomness, self._ranks, self._group,
            self._device, self._schedule_name, self._steps, draws, trace.changed_objects, is_whole,
        )  # fmt: skip

    # Evaluation

    def from_last_stage(self, value: Any, source: str) -> Any:
        """Return the value of the last stage on all ranks of the pipeline. A collective.

        Args:
            value: of the last stage; ignored on others.
            source: description for messages.
        """
        return self._channel.broadcast(self.last_stage_rank, value, source)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Materialize modules outside of the blocks on every stage inside; reentrant. A collective at entry."""
        if self._is_whole:
            yield
            return
        outside = sorted(self.cut.outside)
        for name in outside:
            tensor = self._shared(name)
            if name in self.cut.ghosts:
                put(self.cut.slots(name), tensor)
        self.share_buffers(of_blocks=False)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for name in self.cut.ghosts.keys() & outside:
                self.cut.put_ghost_back(name)

    @torch.no_grad()
    def _shared(self, name: str) -> Tensor:
        # Every holder calls it: gathering it may be a collective of these.
        tensor = self._steps.whole(name).detach().contiguous() if name in self.cut.owned else torch.empty(0)
        shared: Tensor = self._channel.broadcast(self._ranks[self.cut.holders[name][0]], tensor, name)
        return shared

    @torch.no_grad()
    def share_buffers(self, *, of_blocks: bool = True) -> None:
        """Send buffers from the stages that compute them to all ranks. A collective.

        Args:
            of_blocks: also those of blocks, which only their own stage needs during training.
        """
        blocks = tuple(name + "." for name in self.cut.names)
        for name, buffer in list(self._module.named_buffers()):
            stage = self.cut.buffer_stages.get(name)
            if stage is None or not buffer.numel() or (name.startswith(blocks) and not of_blocks):
                continue
            is_absent = isinstance(buffer, Placeholder)
            empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            sent = empty if is_absent else buffer.detach().contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self._group, group_src=self._ranks[stage])
            if is_absent:
                path, _, key = name.rpartition(".")
                self._module.get_submodule(path)._buffers[key] = sent
            else:
                buffer.copy_(sent)

    def relay(self, function: Callable[[], Any], kind: str = "") -> Any:
        """Run ``function`` (a validation step, a generation loop) on every rank of the pipeline; returns its result.

        Own blocks run, results of others are received; the last block's output is known to all. Must be inside
        :meth:`evaluating`. A collective: all ranks pass through the blocks equally often.

        Args:
            function: to run.
            kind: the first run of a kind is traced: if more than outputs of preceding blocks is used, all ranks receive
                all block values.

        Raises:
            RuntimeError: if a pass does not visit all blocks in order, or reuses an unsupported key-value cache.
        """
        if kind in self._relays:
            everything, draws = self._relays[kind]
            run = RelayPass(self.cut, self._ranks, self._channel, None, everything)
            output = self._relayed(run, function, draws)
            if draws:
                self._randomness.leave()
            return output
        trace = DependencyTrace(self.cut, self._device)
        run = RelayPass(self.cut, self._ranks, self._channel, trace, everything=True)
        with redirected_log(self._module, partial(_logged_and_used, getattr(self._module, "log", no_log), trace)):
            output = self._relayed(run, function)
        trace.use_results(output)
        trace.finish()
        routes = StageRoutes(self.cut, (), *run.known())
        everything = len(routes.forms) == len(self.cut.blocks) and needs_everything(routes, trace)
        flags = torch.tensor([int(everything), int(trace.draws)], device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        everything, draws = map(bool, flags.tolist())
        self._relays[kind] = everything, draws
        self._randomness.leave(draws)
        return output

    def _relayed(self, run: RelayPass, function: Callable[[], Any], draws: bool = True) -> Any:
        run.randomness = self._randomness if draws else None
        with ExitStack() as stack:
            stack.enter_context(with_attributes(self._gates, current=run))
            if draws:
                self._randomness.share()
            if run.trace is not None:
                if self._is_compiled:  # compiled code cannot be traced, and would be recompiled for this run
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                run.trace.check_generators()
                stack.enter_context(run.trace)
                stack.enter_context(run.trace.in_user_code())
            with self.cut.listed_ghosts():
                output = function()
            if run.trace is not None:
                run.trace.check_generators()
        run.finish()
        return output


def _connect_neighbors(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one number with each neighbor, pair by pair in the same order on all ranks.

    NCCL creates a communicator at the first exchange of a pair, blocking both; within a schedule this could deadlock.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for one in range(ranks if ranks > 2 else ranks - 1):
        other = (one + 1) % ranks
        number = torch.zeros(1, device=device)
        for source, target in ((one, other), (other, one)):
            if rank == source:
                dist.send(number, group=group, group_dst=target)
            elif rank == target:
                dist.recv(number, group=group, group_src=source)


def _logged_and_used(log: Callable[..., Any], trace: DependencyTrace, name: str, value: Any, **kwargs: Any) -> None:
    trace.use_results(value)
    log(name, value, **kwargs)
