"""Runs training and evaluation steps of an unmodified module over the stages of a pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.pipeline import micro_batches as batches
from trainwright.strategies.pipeline.cut import PipelineCut, StageParameters, put
from trainwright.strategies.pipeline.first_step.block_values import Placeholder
from trainwright.strategies.pipeline.first_step.module_state import ModuleState
from trainwright.strategies.pipeline.first_step.routes import StageRoutes, needs_everything, plan_routes
from trainwright.strategies.pipeline.first_step.step_randomness import StepRandomness
from trainwright.strategies.pipeline.first_step.step_state import StatePlace, StepState, find_places
from trainwright.strategies.pipeline.first_step.survey import Survey
from trainwright.strategies.pipeline.form import Carrier, FormBook
from trainwright.strategies.pipeline.gates import Gates, StagePass, order_message
from trainwright.strategies.pipeline.micro_batches import BatchDims
from trainwright.strategies.pipeline.relay import RelayPass
from trainwright.strategies.pipeline.results import LogRecorder, Publisher, logged_to
from trainwright.strategies.pipeline.schedules import CHOICES, make_schedule, orders_of, ranks_of_stages
from trainwright.strategies.pipeline.sends import Place as SendPlace
from trainwright.strategies.pipeline.sends import Sends, known_to_be_taken
from trainwright.strategies.pipeline.stage import OwnForwardStage

Run = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class PipelineEngine:
    """Drives the stages of this rank.

    Every stage runs the user's own ``training_step`` on each micro-batch: blocks of other stages are skipped, the first
    own block gets what arrived, and after the last own block the step is left (the last stage goes on to the loss).

    Making it is a collective of the group.

    Args:
        module: the user's module, cut (``cut.apply()``).
        cut: how.
        group: ranks of one pipeline, in order.
        schedule: a key of :data:`~trainwright.strategies.pipeline.schedules.CHOICES`.
        micro_batches: parts of a batch; fewer for a batch with fewer samples.
        device: of activations.
        run: ``run(method, args, kwargs)`` runs a method of the module as the strategy wants it run (precision, root
            module); innermost it must use :meth:`call`, and return what that returns.
        batch_dims: exceptions to "samples are along dim 0", by path in the batch; see :func:`split_batch`.
        look: as ``run``, for a run without gradients in which every stage runs all of the step; ``None`` is ``run``.
        whole: see :meth:`evaluating`.

    Attributes:
        cut: as given.
        last_stage_rank: rank in the group whose stage reaches the loss.
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
        run: Run,
        look: Run | None = None,
        whole: Callable[[str], Tensor] | None = None,
        batch_dims: BatchDims | None = None,
    ) -> None:
        self.cut = cut
        self._module, self._group, self._device = module, group, torch.device(device)
        self._schedule_name, self._micro_batches = schedule, micro_batches
        self._run, self._look, self._whole = run, look or run, whole
        self._dims = dict(batch_dims or {})
        self._ranks = ranks_of_stages(dist.get_world_size(group), cut.stages, schedule)
        self.last_stage_rank = self._ranks[-1]
        self._gates = Gates(cut.blocks)
        self._book = FormBook(_common_prefix(group, self._device))
        _greet_neighbours(group, self._device)
        self._carrier = Carrier(group, self._device)
        self._publisher = Publisher(group, self.last_stage_rank, self._device)
        self._schedules: dict[int, tuple[Any, dict[SendPlace, list[SendPlace]] | None]] = {}
        self._step: _Step | None = None
        self._routes: StageRoutes | None = None
        self._state: StepState | None = None
        self._randomness = StepRandomness(group, self._device)
        self._draws = False
        self._is_compiled = False
        # What was run in a relay -> whether every rank must get everything for it, whether it draws outside of blocks.
        self._relays: dict[str, tuple[bool, bool]] = {}
        self._is_whole = False
        self.stages = [self._make_stage(index) for index in cut.mine]

    def _make_stage(self, index: int) -> OwnForwardStage:
        return OwnForwardStage(
            StageParameters(self.cut, index),
            index,
            self.cut.stages,
            self._device,
            self._group,
            ranks=self._ranks,
            book=self._book,
            forward=self._forward,
            source=f"The block {self.cut.names[self.cut.spans[index].stop - 1]!r}",
        )

    def attach(self) -> None:
        """Put the gates in front of the blocks, after everything else has hooked, patched and compiled them.

        Raises:
            ValueError: if a block is compiled and the schedule computes gradients of inputs and weights apart.
        """
        compiled = [
            name
            for name, block in zip(self.cut.names, self.cut.blocks, strict=True)
            if any(module._compiled_call_impl is not None for module in block.modules())
        ]
        if compiled and CHOICES[self._schedule_name].splits_backward:
            possible = [name for name, choice in CHOICES.items() if not choice.splits_backward]
            raise ValueError(
                f"schedule={self._schedule_name!r} computes gradients of inputs and of weights apart, which a compiled "
                f"block ({compiled[0]}) cannot. Set compile to off, or schedule to one of: {', '.join(possible)}."
            )
        self._is_compiled = any(module._compiled_call_impl is not None for module in self._module.modules())
        self._gates.attach()
        _ = self.cut.engine_hooks  # from here on hooks are the user's

    def detach(self) -> None:
        """Take the gates away, and forget schedules and buffers."""
        self._gates.detach()
        self._forget_step()

    def refresh(self) -> None:
        """Ask anew for the forms of what stages send, after ``requires_grad`` of parameters was changed.

        To be called between the same steps on every rank of the pipeline. Nothing is communicated.
        """
        self._book.refresh()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, which runs the user's step, and return its result, or the stage's output if it ends early.

        Raises:
            RuntimeError: if the step does not call the blocks once and in order, or needs what cannot be sent here.
        """
        run = self._gates.current
        if isinstance(run, StagePass):
            return run.run(function)
        if isinstance(run, RelayPass) and run.survey is not None:
            run.survey.refresh()
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
        """One ``training_step`` of the whole batch: forward and backward of all micro-batches. A collective.

        Gradients are those of the mean over the batch (micro-batch k weighs n_k / n) and accumulate into ``p.grad``.

        Args:
            args, kwargs: of ``training_step``; one of them is ``batch``.
            batch: same on all ranks of the pipeline.
            scale: what is differentiated for the loss of a micro-batch that holds the given share of the samples (it
                also knows of accumulation and loss scaling).
            samples: of a batch, by its loader; ``None``: not known.

        Returns:
            On every rank what the step would have returned for the whole batch, without gradient: the loss, or a dict;
            ``None`` if all micro-batches gave ``None`` (gradients are then zeros).
        """
        size, parts = self._split(batch)
        arguments = [batches.replace_argument(args, kwargs, batch, part) for part in parts]
        if self._routes is None:
            if samples is not None and len(parts) > 1:
                batches.check_samples(batch, self._dims, size, samples)
            self._learn(arguments[0], len(parts))
        recorder = LogRecorder(batches.part_sizes(size, len(parts)), self._device, self._module)
        seeds = self._randomness.seeds(len(parts)) if self._draws else []
        self._step = _Step(arguments, recorder, scale, seeds)
        for stage in self.stages:
            stage.signatures = [batches.signature(given) for given in arguments]
        state = self._state
        if state is not None:
            state.begin_step()
        try:
            with logged_to(self._module, recorder.log):
                self._run_schedule(len(parts))
        except BaseException:
            self._forget_step()
            raise
        self._end_step()
        if state is not None:
            state.end_step()
        return self._publisher.publish(recorder, getattr(self._module, "log", _no_log))

    def micro_batches_of(self, batch: Any) -> list[tuple[Any, float]]:
        """The parts that :meth:`train` runs, and the share of the samples in each."""
        size, parts = self._split(batch)
        counts = batches.part_sizes(size, len(parts))
        return [(part, count / size) for part, count in zip(parts, counts, strict=True)]

    def _split(self, batch: Any) -> tuple[int, list[Any]]:
        size = batches.batch_size_of(batch, self._dims)
        return size, batches.split_batch(batch, min(self._micro_batches, size), self._dims)

    def _forward(self, stage: int, part: int, received: Any) -> Any:
        step = self._step
        assert step is not None
        assert self._routes is not None
        run = StagePass(self._routes, stage, received)
        args, kwargs = step.arguments[part]
        self._gates.current = run
        step.recorder.current = part if run.is_last else None
        if self._state is not None:
            self._state.begin_micro_batch()
        try:
            with self._randomness.outside(step.seeds[part]) if step.seeds else nullcontext():
                run.randomness = self._randomness if step.seeds else None
                output = self._run("training_step", args, kwargs)
        finally:
            self._gates.current, step.recorder.current = None, None
        if self._state is not None:
            self._state.end_micro_batch(stage)
        if not run.is_last:
            return output
        loss = step.recorder.finish(part, output)
        share = step.recorder.sizes[part] / sum(step.recorder.sizes)
        # A new tensor always: torch detaches what it gets in place, which must not be the user's tensor, nor a view.
        return None if loss is None else step.scale(loss, share).sum() * 1.0

    def _learn(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], micro_batches: int) -> None:
        """Run the first micro-batch without gradients and see what stages need of each other. A collective.

        Nothing of that run is left in the module.

        Raises:
            RuntimeError: if something cannot be sent, or depends on how the batch is split.
        """
        args, kwargs = arguments
        survey = Survey(self.cut, self._device, arguments)
        run = RelayPass(self.cut, self._ranks, self._carrier, survey, everything=True)
        error: Exception | None = None
        places: list[StatePlace] = []
        problems: list[str] = []
        random = random_state(self._device)
        ranks = set(dist.get_process_group_ranks(self._group))
        stop = listen(lambda call: survey.hear(call.kind, ranks & set(dist.get_process_group_ranks(call.group))))
        with torch.no_grad(), self.evaluating(self._whole):
            state = ModuleState(self._module)
            survey.name_state(self._module)
            try:
                with logged_to(self._module, lambda name, value, **options: survey.use_results(value)):
                    survey.use_results(self._relayed(run, lambda: self._look("training_step", args, kwargs)))
                places, problems = find_places(self.cut, self._module, state.changes(), survey, micro_batches)
                if run.passes != 1:
                    raise RuntimeError(order_message(self.cut.names, 0, len(self.cut.names)))
            except Exception as raised:
                error = raised
            finally:
                stop()
            state.restore()
        set_random_state(random, self._device)
        survey.finish()
        problems += survey.problems
        told = survey.needs, survey.mutated, problems, error is None, survey.draws
        found = all_gather_values(told, self._group, self._device)
        forms, left = run.known()
        if len(forms) == len(self.cut.blocks):
            needs = [(each[0], each[1]) for each in found]
            self._routes, unsent = plan_routes(self.cut, self._ranks, survey, needs, forms, left)
            problems = list(dict.fromkeys([*unsent, *(problem for each in found for problem in each[2])]))
            if problems:
                raise RuntimeError(" ".join(problems)) from error
        if error is not None:
            raise error
        if not all(each[3] for each in found):
            raise RuntimeError("training_step failed on another stage of the pipeline; see the error of its rank.")
        self._draws = any(each[4] for each in found)
        self._state = StepState(self._module, places, self._ranks, self._carrier) if places else None

    def _run_schedule(self, count: int) -> None:
        schedule, taken = self._schedule(count)
        sends = None if taken is None else Sends(taken)
        for stage in self.stages:
            stage.sends = sends
        schedule.step(target=torch.arange(count), return_outputs=False)
        if sends is not None:
            sends.finish()

    def _schedule(self, count: int) -> tuple[Any, dict[SendPlace, list[SendPlace]] | None]:
        """Torch's schedule for so many micro-batches, and what is known of its sends."""
        if count not in self._schedules:
            made = make_schedule(self._schedule_name, self.stages, count, lambda output, target: output)
            orders = orders_of(made)
            taken = None if orders is None else known_to_be_taken(orders, dist.get_rank(self._group))
            self._schedules[count] = made, taken
        return self._schedules[count]

    def _end_step(self) -> None:
        self._step = None
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.sends = None

    def _forget_step(self) -> None:
        self._end_step()
        self._gates.current = None
        self._schedules.clear()

    # Evaluation

    def from_last_stage(self, value: Any, source: str) -> Any:
        """Return a structure of tensors of the last stage's rank on all ranks of the pipeline. A collective.

        Args:
            value: what the last stage has; ignored on the others.
            source: what it comes from, for messages.
        """
        return self._carrier.broadcast(self.last_stage_rank, value, source)

    @contextmanager
    def evaluating(self, whole: Callable[[str], Tensor] | None = None) -> Iterator[None]:
        """Modules outside of the blocks are whole on every stage while this is entered. A collective at entry.

        Args:
            whole: gives an own parameter, by name, as the whole local tensor; called on every rank that holds it in the
                same order. ``None`` takes the parameter as it is.
        """
        if self._is_whole:
            yield
            return
        outside = sorted(self.cut.outside)
        for name in outside:
            tensor = self._shared(name, whole)
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
    def _shared(self, name: str, whole: Callable[[str], Tensor] | None) -> Tensor:
        tensor = torch.empty(0)
        if name in self.cut.owned:
            owner, key = self.cut.slots(name)[0]
            # Every holder asks, as getting it may be a collective of the ranks that hold it.
            tensor = (whole(name) if whole is not None else getattr(owner, key)).detach().contiguous()
        shared: Tensor = self._carrier.broadcast(self._ranks[self.cut.holders[name][0]], tensor, name)
        return shared

    @torch.no_grad()
    def share_buffers(self, *, of_blocks: bool = True) -> None:
        """Give all ranks the buffers of the stages that compute with real inputs. A collective.

        Args:
            of_blocks: those of blocks as well, which only their own stage needs while it trains.
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
        """Run ``function`` (a validation step, a generation loop) on every rank of the pipeline, and return its result.

        Own blocks run, others' results are received; the last block's output is known to all. Enter
        :meth:`evaluating` before. A collective: all ranks pass through the blocks equally often.

        Args:
            function: what to run.
            kind: what it is. The first of a kind is looked at: where more than outputs of the blocks before is used,
                all ranks get what all blocks leave.

        Raises:
            RuntimeError: if a pass does not go through all blocks in order, or goes on with a key-value cache.
        """
        if kind in self._relays:
            everything, draws = self._relays[kind]
            run = RelayPass(self.cut, self._ranks, self._carrier, None, everything)
            return self._relayed(run, function, draws)
        survey = Survey(self.cut, self._device)
        run = RelayPass(self.cut, self._ranks, self._carrier, survey, everything=True)
        with logged_to(self._module, partial(_logged_and_used, getattr(self._module, "log", _no_log), survey)):
            output = self._relayed(run, function)
        survey.use_results(output)
        survey.finish()
        routes = StageRoutes(self.cut, (), *run.known())
        everything = len(routes.forms) == len(self.cut.blocks) and needs_everything(routes, survey)
        flags = torch.tensor([int(everything), int(survey.draws)], device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        self._relays[kind] = bool(flags[0]), bool(flags[1])
        return output

    def _relayed(self, run: RelayPass, function: Callable[[], Any], draws: bool = True) -> Any:
        before, self._gates.current = self._gates.current, run
        run.randomness = self._randomness if draws else None
        try:
            with ExitStack() as stack:
                if draws:
                    stack.enter_context(self._randomness.outside(self._randomness.seeds(1)[0]))
                if run.survey is not None:
                    if self._is_compiled:  # compiled code would not be followed, and be compiled for this run alone
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                    run.survey.look_at_generators()
                    stack.enter_context(run.survey)
                    stack.enter_context(run.survey.in_user_code())
                output = function()
                if run.survey is not None:
                    run.survey.look_at_generators()
        finally:
            self._gates.current = before
        run.finish()
        return output


class _Step(NamedTuple):
    """What is going on in :meth:`PipelineEngine.train`."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]
    recorder: LogRecorder
    scale: Callable[[Tensor, float], Tensor]
    seeds: list[int]


def _common_prefix(group: dist.ProcessGroup, device: torch.device) -> str:
    """A text that the ranks of the group share and no other group has."""
    return f"trainwright/pipeline/{broadcast_value(uuid.uuid4().hex, 0, group, device)}"


def _greet_neighbours(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one number with each neighbour, pair after pair in one order for all.

    NCCL makes a communicator for each pair when it first exchanges something and waits for both; made in the middle of
    a schedule, in the order of its sends, they could wait in a circle.
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


def _no_log(name: str, value: Any, **kwargs: Any) -> None:
    """A module without ``log`` logs nothing."""


def _logged_and_used(log: Callable[..., Any], survey: Survey, name: str, value: Any, **kwargs: Any) -> None:
    survey.use_results(value)
    log(name, value, **kwargs)
