"""Runs training and evaluation steps of an unmodified module over the stages of a pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.pipeline.cut import PipelineCut, StageParameters, put
from trainwright.strategies.pipeline.form import FormBook
from trainwright.strategies.pipeline.gates import Gates, StagePass
from trainwright.strategies.pipeline.micro_batches import (
    BatchDims,
    batch_size_of,
    part_sizes,
    replace_argument,
    signature,
    split_batch,
)
from trainwright.strategies.pipeline.misuse import Watch, make_watch
from trainwright.strategies.pipeline.relay import Carrier, RelayPass
from trainwright.strategies.pipeline.results import Publisher, Recorder, bound_log
from trainwright.strategies.pipeline.schedules import CHOICES, make_schedule, orders_of, ranks_of_stages
from trainwright.strategies.pipeline.sends import Place, Sends, known_to_be_taken
from trainwright.strategies.pipeline.stage import Around, OwnForwardStage

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
        schedule: a key of :data:`~trainwright.strategies.pipeline.schedules.SCHEDULES`.
        micro_batches: parts of a batch; fewer for a batch with fewer samples.
        device: of activations.
        run: ``run(method, args, kwargs)`` runs a method of the module as the strategy wants it run (precision, root
            module); innermost it must use :meth:`call`, and return what that returns.
        batch_dims: exceptions to "samples are along dim 0", by path in the batch; see :func:`split_batch`.
        around_backward: ``around_backward(stage, last)`` gives a context manager for every backward of a stage that
            computes gradients of weights, ``last`` for its last one in the step; ``None`` is none.

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
        batch_dims: BatchDims | None = None,
        around_backward: Around | None = None,
    ) -> None:
        self.cut = cut
        self._module, self._group, self._device = module, group, torch.device(device)
        self._schedule_name, self._micro_batches = schedule, micro_batches
        self._run, self._dims = run, dict(batch_dims or {})
        self._ranks = ranks_of_stages(dist.get_world_size(group), cut.stages, schedule)
        self.last_stage_rank = self._ranks[-1]
        self._gates = Gates(cut.blocks)
        self._book = FormBook(_common_prefix(group, self._device))
        _greet_neighbours(group, self._device)
        self._carrier = Carrier(group, self._device)
        self._publisher = Publisher(group, self.last_stage_rank, self._device)
        self._schedules: dict[int, tuple[Any, dict[Place, list[Place]] | None]] = {}
        self._step: _Step | None = None
        self._unwatched = set(cut.mine)
        self._relay_watched = False
        self._is_whole = False
        self.stages = [self._make_stage(index, around_backward) for index in cut.mine]

    def _make_stage(self, index: int, around: Around | None) -> OwnForwardStage:
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
            around=around,
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
        self._gates.attach()

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
            RuntimeError: if the step does not call the blocks once and in order, or uses a parameter that is not here.
        """
        run = self._gates.current
        return run.run(function) if isinstance(run, StagePass) else function()

    # Training

    def train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, batch: Any, scale: Callable[[Tensor, float], Tensor]
    ) -> Any:
        """One ``training_step`` of the whole batch: forward and backward of all micro-batches. A collective.

        Gradients are those of the mean over the batch (micro-batch k weighs n_k / n) and accumulate into ``p.grad``.

        Args:
            args, kwargs: of ``training_step``; one of them is ``batch``.
            batch: same on all ranks of the pipeline.
            scale: what is differentiated for the loss of a micro-batch that holds the given share of the samples (it
                also knows of accumulation and loss scaling).

        Returns:
            On every rank what the step would have returned for the whole batch, without gradient: the loss, or a dict;
            ``None`` if all micro-batches gave ``None`` (gradients are then zeros).
        """
        size = batch_size_of(batch, self._dims)
        parts = split_batch(batch, min(self._micro_batches, size), self._dims)
        arguments = [replace_argument(args, kwargs, batch, part) for part in parts]
        recorder = Recorder(part_sizes(size, len(parts)), self._device)
        self._step = _Step(arguments, recorder, scale)
        signatures = [signature(arguments[index]) for index in range(len(parts))]
        for stage in self.stages:
            stage.signatures = signatures
        try:
            with self._recorded_log(recorder):
                self._run_schedule(len(parts))
        except BaseException:
            self._forget_step()
            raise
        self._end_step()
        return self._publisher.publish(recorder, getattr(self._module, "log", _no_log))

    def _forward(self, stage: int, part: int, received: Any) -> Any:
        step = self._step
        assert step is not None
        run = self._stage_pass(stage, received)
        args, kwargs = step.arguments[part]
        self._gates.current = run
        step.recorder.current = part if run.is_last else None
        try:
            output = self._run("training_step", args, kwargs)
        finally:
            self._gates.current, step.recorder.current = None, None
        if not run.is_last:
            return output
        loss = step.recorder.finish(part, output)
        share = step.recorder.sizes[part] / sum(step.recorder.sizes)
        # A new tensor always: torch detaches what it gets in place, which must not be the user's tensor, nor a view.
        return None if loss is None else step.scale(loss, share).sum() * 1.0

    def _stage_pass(self, stage: int, received: Any) -> StagePass:
        span = self.cut.spans[stage]
        if stage not in self._unwatched:
            return StagePass(self.cut.names, span, received)
        self._unwatched.discard(stage)
        run = StagePass(self.cut.names, span, received)
        run.watch = watch = make_watch(self.cut, lambda: run.phase)
        run.enter = watch.enter_block
        return run

    def _run_schedule(self, count: int) -> None:
        schedule, taken = self._schedule(count)
        sends = None if taken is None else Sends(taken)
        for stage in self.stages:
            stage.sends = sends
        schedule.step(target=torch.arange(count), return_outputs=False)
        if sends is not None:
            sends.finish()

    def _schedule(self, count: int) -> tuple[Any, dict[Place, list[Place]] | None]:
        """Torch's schedule for so many micro-batches, and what is known of its sends."""
        if count not in self._schedules:
            made = make_schedule(self._schedule_name, self.stages, count, lambda output, target: output)
            orders = orders_of(made)
            taken = None if orders is None else known_to_be_taken(orders, dist.get_rank(self._group))
            self._schedules[count] = made, taken
        return self._schedules[count]

    @contextmanager
    def _recorded_log(self, recorder: Recorder) -> Iterator[None]:
        log = getattr(self._module, "log", None)
        if log is None:
            yield
            return
        attributes = self._module.__dict__
        before = attributes.get("log")
        attributes["log"] = bound_log(log, recorder.log)
        try:
            yield
        finally:
            del attributes["log"]
            if before is not None:
                attributes["log"] = before

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
        self._share_buffers()
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
    def _share_buffers(self) -> None:
        """Running statistics outside of the blocks: only the stage that computes with real inputs has them right."""
        blocks = tuple(name + "." for name in self.cut.names)
        for name, buffer in self._module.named_buffers():
            stage = self.cut.buffer_stages.get(name)
            if stage is not None and not name.startswith(blocks) and buffer.numel():
                sent = buffer.detach().contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), group=self._group, group_src=self._ranks[stage])
                buffer.copy_(sent)

    def relay(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` (a validation step, a generation loop) on every rank of the pipeline, and return its result.

        Own blocks run, others' results are received; the last block's output is known to all. Enter
        :meth:`evaluating` before. A collective: all ranks pass through the blocks equally often.

        Raises:
            RuntimeError: if a pass does not go through all blocks in order, or goes on with a key-value cache.
        """
        run = RelayPass(self.cut, self._ranks, self._carrier)
        watch: Watch | None = None
        if not self._relay_watched:
            self._relay_watched = True
            watch = make_watch(self.cut, lambda: run.phase)
            run.enter = watch.enter_block
        before, self._gates.current = self._gates.current, run
        try:
            with watch if watch is not None else nullcontext():
                output = function()
        finally:
            self._gates.current = before
        run.finish()
        return output


class _Step:
    """What is going on in :meth:`PipelineEngine.train`."""

    def __init__(
        self,
        arguments: list[tuple[tuple[Any, ...], dict[str, Any]]],
        recorder: Recorder,
        scale: Callable[[Tensor, float], Tensor],
    ) -> None:
        self.arguments, self.recorder, self.scale = arguments, recorder, scale


def _common_prefix(group: dist.ProcessGroup, device: torch.device) -> str:
    """A text that the ranks of the group share and no other group has."""
    box = [uuid.uuid4().hex]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group, device=device)
    return f"trainwright/pipeline/{box[0]}"


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
