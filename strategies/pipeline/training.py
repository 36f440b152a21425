"""Training steps of a pipeline: micro-batches that add up to the whole batch, or its last part on all of them at once.

Usually the code after the blocks runs once per micro-batch, with the whole batch's values (``tracing/whole_batch.py``).
Where that cannot give the loss of one process, it runs once on the outputs of all micro-batches, as one process does:
exact for any loss, but all forwards come before all backwards, and the last stage holds its values for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.pipeline import micro_batches as batches
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.gates import Gates, StagePass
from trainwright.strategies.pipeline.results import LogRecorder, Publisher, StepVerdict, no_log, redirected_log
from trainwright.strategies.pipeline.schedules import make_schedule, orders_of
from trainwright.strategies.pipeline.stage import Activation, Sends, UserStepStage, leaves_of, releasable_sends
from trainwright.strategies.pipeline.stage import Place as SendPlace
from trainwright.strategies.pipeline.tracing.block_values import identities
from trainwright.strategies.pipeline.tracing.routes import StageRoutes
from trainwright.strategies.pipeline.tracing.stand_ins import StandIns, Written
from trainwright.strategies.pipeline.tracing.step_randomness import StepRandomness
from trainwright.strategies.pipeline.tracing.step_state import StepState, contents_of
from trainwright.strategies.pipeline.tracing.whole_batch import Kind, MixedSamplesError, Rehearsal, Replay
from trainwright.strategies.pipeline.value_spec import tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Steps(Protocol):
    """Runs of the user's ``training_step``, which end in :meth:`PipelineEngine.call`, as a strategy requires them."""

    @property
    def written(self) -> Written:
        """The module as written."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rehearses: bool = False) -> Any:
        """Run it on one micro-batch; a rehearsal without collectives of the strategy."""

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it without gradients, on all stages together."""

    def whole(self, name: str) -> Tensor:
        """Return a parameter of this rank as a whole local tensor; called on every holder in the same order."""


@dataclass
class PipelineStep:
    """A step of one batch.

    Args:
        whole: arguments of the user's step.
        parts: of each micro-batch.
        batch, batches: whole, and as micro-batches.
        sizes: samples of each.
        scale: see :meth:`PipelineEngine.train`.
    """

    whole: Arguments
    parts: list[Arguments]
    batch: Any
    batches: list[Any]
    sizes: list[int]
    scale: Callable[[Tensor, float], Tensor]
    recorder: LogRecorder = field(init=False)
    rehearsal: Rehearsal | None = field(default=None, init=False)
    problem: str = field(default="", init=False)
    is_lost: bool = field(default=False, init=False)


@dataclass(eq=False)
class Training:
    """Runs training steps on this rank's stages, once the first step is traced.

    Args:
        module, cut, gates, stages, routes, state, randomness: of the engine.
        ranks: rank in the group of each stage.
        group: of the pipeline.
        device: of results.
        schedule: its name.
        steps: of the strategy.
        draws: whether the step draws random numbers outside of the blocks.
        objects: path and name of lists and the like that it changes.
        is_whole: whether the code after the blocks runs once per batch.
    """

    module: nn.Module
    cut: PipelineCut
    gates: Gates
    stages: list[UserStepStage]
    routes: StageRoutes
    state: StepState
    randomness: StepRandomness
    ranks: Sequence[int]
    group: dist.ProcessGroup
    device: torch.device
    schedule: str
    steps: Steps
    draws: bool
    objects: Sequence[tuple[str, str]]
    is_whole: bool
    _step: PipelineStep = field(init=False)

    def __post_init__(self) -> None:
        self._ends = self.cut.stages - 1 in self.cut.mine
        self._publisher = Publisher(self.group, self.ranks[-1], self.device)
        self._schedules: dict[Any, tuple[Any, dict[SendPlace, list[SendPlace]] | None]] = {}
        self._metrics = [sub for sub in self.module.modules() if isinstance(sub, Metric | MetricCollection)]
        self._buffers: dict[int, dict[str, list[tuple[int, int]]]] = {}
        self._block_modules: dict[int, list[tuple[str, nn.Module]]] = {}
        self._stand_ins = StandIns(self.steps.written, self.gates, self.device)

    def run(self, step: PipelineStep) -> Any:
        """Run forward and backward of all micro-batches; returns the step's result on every rank. A collective."""
        self.state.begin_step()
        random, restore = random_state(self.device), contents_of(self.module, self.objects, self._metrics)
        output, verdict = self._attempt(step)
        if verdict.is_redone and verdict.problem:
            self.is_whole = True
            rank_zero_info(
                "The code after the blocks runs once per batch instead of once per micro-batch, so that the loss is "
                f"that of one process: {verdict.problem}. All forwards then come before all backwards, and the last "
                "stage holds the values of the whole batch after the blocks."
            )
        if verdict.is_redone:
            set_random_state(random, self.device)
            restore()
            output, verdict = self._attempt(step)
        if verdict.problem:
            raise RuntimeError(
                f"A later micro-batch of this step computes something else than the first: {verdict.problem}. Its loss "
                "would not be that of one process. No weight has changed. Use strategy.micro_batches=1, or pipeline=1."
            )
        self.state.end_step()
        return output

    def _attempt(self, step: PipelineStep) -> tuple[Any, StepVerdict]:
        count, log, draws = len(step.parts), getattr(self.module, "log", no_log), self.draws
        is_joined = self.is_whole and count > 1
        self._step = step = replace(step)
        for stage in self.stages:
            stage.run_step = self.forward
            stage.signatures = [batches.signature(given) for given in step.parts]
            stage.run_tail = self._run_tail if is_joined and stage.is_last else None
        try:
            if draws:
                self.randomness.begin()
            if count > 1:
                step.rehearsal = self._rehearse(step)
                step.is_lost = self._ends and step.rehearsal.draws and not draws
            known = {} if step.rehearsal is None or is_joined else step.rehearsal.logs
            sizes = [sum(step.sizes)] if is_joined else step.sizes
            step.recorder = LogRecorder(sizes, self.device, self.module, known)
            with redirected_log(self.module, self._log), ExitStack() as stack:
                for metric in self._metrics:
                    stack.enter_context(with_attributes(metric, update=partial(self._update, metric.update)))
                self._run_schedule(count)
        except BaseException:
            self.forget()
            raise
        has_drawn = draws or (step.rehearsal is not None and step.rehearsal.draws)
        verdict = StepVerdict(step.problem, step.is_lost, has_drawn)
        self.end()
        output, verdict = self._publisher.publish(step.recorder, log, verdict)
        if draws:
            self.randomness.end()
        self.draws = verdict.draws
        return output, verdict

    def _update(self, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        replay = getattr(self.gates.current, "replay", None)
        if replay is None:
            return update(*args, **kwargs)
        if not replay.repeats and any(replay.kind(tensor) >= Kind.SUM for tensor in tensors_in((args, kwargs))):
            replay.stop("a metric is updated with a value of the whole batch")
        with replay.paused():
            return update(*args, **kwargs)

    def _log(self, name: str, value: Any, **kwargs: Any) -> None:
        replay = getattr(self.gates.current, "replay", None)
        if replay is not None and not replay.contributes(value):
            replay.stop(f"what self.log({name!r}) is given is no sum over samples")
        with nullcontext() if replay is None else replay.paused():
            self._step.recorder.log(name, value, **kwargs)

    # ---- the whole batch -------------------------------------------------------------------------------------------

    def _rehearse(self, step: PipelineStep) -> Rehearsal:
        """Run the step on the whole batch without values; only up to the blocks where the last stage is elsewhere."""
        batch = batches.copied(step.batch)
        args, kwargs = batches.replace_argument(*step.whole, step.batch, batch)
        samples, is_full = batches.tensors_of(batch), self._ends and not self.is_whole
        rehearsal = Rehearsal(self._stand_ins, self.cut.blocks, samples, sum(step.sizes), is_full)
        self.gates.current = rehearsal
        self.state.begin_micro_batch()
        no_metric = {"forward": lambda *_, **__: self._stand_ins.like(torch.zeros(())), "update": lambda *_, **__: None}
        restore = contents_of(self.module, self.objects)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.randomness.micro_batch(None) if self.draws else nullcontext())
                stack.enter_context(redirected_log(self.module, rehearsal.log))
                for metric in self._metrics:
                    stack.enter_context(with_attributes(metric, **no_metric))
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.steps.run(args, kwargs, rehearses=True)
        except MixedSamplesError:
            raise
        except Exception as error:  # if it is the user's, the step raises it, too
            lines = str(error).splitlines() or [""]
            rehearsal.problem = f"the step cannot be rehearsed ({type(error).__name__}: {lines[0]})"
        finally:
            self.gates.current = None
            restore()
        return rehearsal

    def _run_tail(self, stage: UserStepStage, outputs: list[Activation]) -> list[tuple[Tensor | None, ...]]:
        """Run the code after the blocks, and its backward, on all micro-batches' outputs; returns their gradients."""
        step = self._step
        parameters = [source.kind == "parameter" for source in self.routes.sent[-1]]
        leaves = [leaves_of(output.form, output.tensors) for output in outputs]
        shared = [False] * (len(leaves[0]) - len(parameters)) + parameters
        joined = [_joined(each, step.sizes, same) for *each, same in zip(*leaves, shared, strict=True)]
        received = outputs[0].form.build(joined)
        loss = self._user_step(StagePass(self.routes, self.cut.stages, received), step.whole, None)
        if loss is not None and loss.requires_grad and not step.is_lost:
            step.scale(loss, 1.0).sum().backward()
        return [tuple(leaf.grad for leaf in each) for each in leaves]

    # ---- micro-batches ---------------------------------------------------------------------------------------------

    def forward(self, stage: int, part: int, received: Any) -> Any:
        """Run the user's step for one stage and micro-batch; see :class:`UserStepStage`."""
        step = self._step
        run = StagePass(self.routes, stage, received)
        if step.rehearsal is not None and (run.is_last or step.rehearsal.has_values):
            start, ends = sum(step.sizes[:part]), run.is_last and not self.is_whole
            samples = batches.tensors_of(step.batches[part])
            run.replay = Replay(step.rehearsal, samples, start, step.sizes[part], ends)
        is_joined = self.is_whole and len(step.parts) > 1
        run.leaves_after = is_joined and run.is_last
        output = self._user_step(run, step.parts[part], part)
        self._check_buffers(stage, part)
        if not run.is_last or is_joined:
            return output
        if run.replay is not None and output is not None and not run.replay.contributes(output):
            run.replay.problem = run.replay.problem or "the loss is no sum over samples"
        if run.replay is not None and run.replay.problem:
            step.is_lost = step.is_lost or part == 0
            step.problem = step.problem or run.replay.problem
        if step.problem or step.is_lost:  # no gradient
            return None
        # A new tensor: torch detaches it in place, which must not affect the user's tensor, nor a view.
        return None if output is None else step.scale(output, step.sizes[part] / sum(step.sizes)).sum() * 1.0

    def _check_buffers(self, stage: int, part: int) -> None:
        """Raise if micro-batches change a buffer of a block that the first step left alone, one after the other."""
        if stage not in self._block_modules:  # once: walking through all modules takes longer than looking at buffers
            blocks = [(self.cut.names[index], self.cut.blocks[index]) for index in self.cut.spans[stage]]
            self._block_modules[stage] = [each for name, block in blocks for each in block.named_modules(prefix=name)]
        found = {
            f"{path}.{name}": identities(buffer)
            for path, sub in self._block_modules[stage]
            for name, buffer in sub._buffers.items()
            if buffer is not None and f"{path}.{name}" not in self.state.labels
        }
        before = self._buffers.get(stage, found) if part else found
        changed = [name for name, value in found.items() if before.get(name, value) != value]
        if changed:
            raise RuntimeError(
                f"A step changes the buffer {changed[0]!r}, which the first step did not, and would do so once per "
                "micro-batch. Change it in a hook (on_train_batch_end), in every step, or use strategy.micro_batches=1."
            )
        self._buffers[stage] = found

    def _user_step(self, run: StagePass, arguments: Arguments, part: int | None) -> Any:
        """Return what a stage sends, or the loss."""
        step = self._step
        is_last = run.is_last and not run.leaves_after
        run.randomness = self.randomness if self.draws else None
        self.gates.current = run
        step.recorder.current = (part or 0) if is_last else None
        self.state.begin_micro_batch()
        seeded = None if len(step.parts) == 1 else part
        try:
            with self.randomness.micro_batch(seeded) if self.draws else nullcontext():
                output = self.steps.run(*arguments)
        finally:
            self.gates.current, step.recorder.current = None, None
        is_tail = run.stage == self.cut.stages
        shared = False if run.leaves_after else True if is_tail else None
        self.state.end_micro_batch(run.stage - is_tail, shared)
        return step.recorder.finish(part or 0, output) if is_last else output

    # ---- schedules -------------------------------------------------------------------------------------------------

    def _run_schedule(self, count: int) -> None:
        schedule, taken = self._schedule(count)
        sends = None if taken is None else Sends(taken)
        for stage in self.stages:
            stage.sends = sends
        schedule.step(target=torch.arange(count), return_outputs=False)
        if sends is not None:
            sends.finish()

    def _schedule(self, count: int) -> tuple[Any, dict[SendPlace, list[SendPlace]] | None]:
        """Return torch's schedule for ``count`` micro-batches, and its releasable sends."""
        key = count, self.is_whole
        if key not in self._schedules:
            made = make_schedule(self.schedule, self.stages, count, lambda output, target: output, drains=self.is_whole)
            orders = orders_of(made)
            taken = None if orders is None else releasable_sends(orders, dist.get_rank(self.group))
            self._schedules[key] = made, taken
        return self._schedules[key]

    def end(self) -> None:
        """Drop what a step held."""
        vars(self).pop("_step", None)
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.sends = None

    def forget(self) -> None:
        """Drop the schedules as well, after an error."""
        self.end()
        self.gates.current = None
        self._schedules.clear()


def _joined(parts: Sequence[Tensor], sizes: Sequence[int], is_shared: bool) -> Tensor:
    """Return one tensor of all micro-batches: joined along its samples, the same in each, or a mean over samples.

    Args:
        parts: of each micro-batch.
        sizes: samples of each.
        is_shared: whether it is one parameter.
    """
    for dim in () if is_shared else range(parts[0].dim()):
        if all(part.shape[dim] == size for part, size in zip(parts, sizes, strict=True)):
            return torch.cat(list(parts), dim)
    if is_shared or not parts[0].is_floating_point():
        return parts[0].clone()
    return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum(0)
