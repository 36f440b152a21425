"""Module state that a step advances, once per step for any number of micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.tracing.dependency_trace import DependencyTrace, Source, depends_on_data
from trainwright.strategies.pipeline.value_spec import ValueChannel
from trainwright.strategies.plan.module_state import Change


@dataclass(frozen=True)
class StatePlace:
    """Buffer or attribute changed by a step.

    Attributes:
        path: of the submodule.
        name: in it.
        stage: whose value is valid.
        is_shared: whether other stages have it too (it is outside of the blocks).
        is_buffer: whether it is registered as a buffer.
    """

    path: str
    name: str
    stage: int
    is_shared: bool
    is_buffer: bool


# Stands for a value that no step has set yet.
_ABSENT = object()


def find_places(
    cut: PipelineCut, module: nn.Module, changes: Iterable[Change], trace: DependencyTrace, micro_batches: int
) -> tuple[list[StatePlace], list[str]]:
    """Return the state that this rank's stages handle, and problems of several micro-batches.

    Args:
        cut: of the module.
        module: the user's.
        changes: of one full run of the step.
        trace: trace of that run; sources of shared state are added to the last stage's needs.
        micro_batches: per step.
    """
    places, problems = [], []
    for change in changes:
        block = next((i for i, name in enumerate(cut.names) if f"{change.path}.".startswith(f"{name}.")), None)
        if block is not None and not cut.owns_block(block):
            continue
        sub = module.get_submodule(change.path)
        sources = trace.of(change.value) if block is None else trace.inner_sources(change.value)
        if isinstance(sub, Metric | MetricCollection):
            continue  # accumulates over micro-batches, and is synchronized when computed
        if change.is_first and block is not None and change.name in sub.state_dict():
            problems.append(_unsaved_buffer_problem(change))
        if change.kind == "object":
            if depends_on_data(sources) and block is None:
                problems.append(_stored_tensor_problem(change))
            trace.changed_objects.append((change.path, change.name))
            continue
        depends = depends_on_data(sources) if change.kind == "tensor" else trace.reads_numbers
        is_result = change.name not in sub._buffers and Source("state", change.label) not in sources
        if depends and change.kind == "tensor" and block is not None and is_result:
            continue  # used by the step itself, such as an auxiliary loss
        if depends and micro_batches > 1:
            if change.kind != "tensor" or block is not None or not _is_after(sources, cut):
                problems.append(_data_dependent_problem(change, sub, micro_batches))
                continue
            trace.joins = True
        stage = cut.stage_of_block(block) if block is not None else _stage_for(cut, sources, change)
        if block is None and stage == cut.stages - 1:
            trace.use_results(change.value)
        places.append(StatePlace(change.path, change.name, stage, block is None, change.name in sub._buffers))
    return places, problems


def _stage_for(cut: PipelineCut, sources: Iterable[Source], change: Change) -> int:
    """Return the first stage if it has all sources of a shared value before the blocks; otherwise the last."""
    first = change.kind == "tensor" and all(
        source.kind in ("batch", "state") or (source.kind == "parameter" and 0 in cut.holders[source.name])
        for source in sources
    )
    return 0 if first and any(source.kind == "parameter" for source in sources) else cut.stages - 1


def _is_after(sources: Iterable[Source], cut: PipelineCut) -> bool:
    """Return whether a value is computed after the blocks, from the last one's output."""
    return any(source.kind == "block" and source.block == len(cut.names) - 1 for source in sources)


def _data_dependent_problem(change: Change, sub: nn.Module, micro_batches: int) -> str:
    return (
        f"training_step changes {change.label!r} ({type(sub).__name__}) depending on samples, and a pipeline runs it "
        f"once for each of {micro_batches} micro-batches, so the result would differ from that of the whole batch "
        "(statistics of BatchNorm, running means). Use strategy.micro_batches=1, pipeline=1, or layers that do not "
        "depend on other samples (LayerNorm or GroupNorm; self.log of the value instead of an attribute)."
    )


def _unsaved_buffer_problem(change: Change) -> str:
    return (
        f"training_step creates the buffer {change.label!r}, which only this stage of the pipeline then has, so a "
        "checkpoint would lack it. Register it as a tensor in __init__, or with persistent=False."
    )


def _stored_tensor_problem(change: Change) -> str:
    return (
        f"training_step keeps tensors in {change.label!r} ({type(change.value).__name__}). A pipeline runs it once for "
        "each micro-batch, and only the last stage reaches its end, so other ranks would keep nothing. Return the "
        "value in training_step's dict (on_train_batch_end gets it as outputs), log it with self.log(..., "
        "on_epoch=True), or use pipeline=1."
    )


def contents_of(
    module: nn.Module, places: Sequence[tuple[str, str]], metrics: Iterable[nn.Module] = ()
) -> Callable[[], None]:
    """Return a function that restores what lists, dicts and sets of a module, and its metrics, hold now."""
    owners = (vars(module.get_submodule(path)).get(name) for path, name in places)
    held: list[tuple[Any, Any]] = [(v, copy.copy(v)) for v in owners if hasattr(v, "clear")]
    held += [(vars(metric), {name: _copied(value) for name, value in vars(metric).items()}) for metric in metrics]

    def restore() -> None:
        for container, content in held:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(content)

    return restore


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value


class StepState:
    """State of a step from which every micro-batch starts.

    Args:
        module: the user's.
        places: from :func:`find_places`.
        ranks: rank in the pipeline of each stage.
        channel: between the ranks.

    Attributes:
        labels: names of the places.
    """

    def __init__(
        self, module: nn.Module, places: Sequence[StatePlace], ranks: Sequence[int], channel: ValueChannel
    ) -> None:
        self._module, self._ranks, self._channel = module, ranks, channel
        self._places = places
        self.labels = {f"{place.path}.{place.name}" for place in places}
        self._shared = sorted((p for p in places if p.is_shared), key=lambda p: (p.stage, p.path, p.name))
        self._begun: dict[StatePlace, Any] = {}
        self._given: dict[StatePlace, Any] = {}
        self._ended: dict[StatePlace, tuple[Any, bool]] = {}

    def begin_step(self) -> None:
        """Save the state at the start of the step."""
        self._ended.clear()
        self._begun = {place: self._get(place) for place in self._places}

    def begin_micro_batch(self) -> None:
        """Restore the saved state, as new tensors: backward may still need those of the previous micro-batch."""
        for place, value in self._begun.items():
            self._given[place] = value.detach().clone() if isinstance(value, Tensor) else value
            self._set(place, self._given[place])

    def end_micro_batch(self, stage: int, shared: bool | None = None) -> None:
        """Save the state at the end of a stage's micro-batch; ``shared``: only that outside of blocks, or in blocks."""
        for place in self._places:
            if place.stage == stage and shared in (None, place.is_shared):
                value = self._get(place)
                self._ended[place] = value, value is self._given[place]

    @torch.no_grad()
    def end_step(self) -> None:
        """Set the state to that of one run of the step; state outside of the blocks on every rank. A collective."""
        for place, begun in self._begun.items():
            ended, is_same = self._ended.get(place, (begun, False))
            if isinstance(begun, Tensor) and is_same:  # written to, not replaced
                begun.copy_(ended)  # keep the tensor object, which others may hold
                ended = begun
            self._set(place, ended)
        self._begun, self._given = {}, {}
        for stage in dict.fromkeys(place.stage for place in self._shared):
            mine = [place for place in self._shared if place.stage == stage]
            own = {f"{p.path}.{p.name}": value for p in mine if (value := self._get(p)) is not _ABSENT}
            values = self._channel.broadcast(self._ranks[stage], own, "The module's state")
            for place in mine:
                self._put(place, values.get(f"{place.path}.{place.name}", _ABSENT))

    def _held_in(self, place: StatePlace) -> dict[str, Any]:
        owner = self._module.get_submodule(place.path)
        return owner._buffers if place.is_buffer else owner.__dict__

    def _get(self, place: StatePlace) -> Any:
        return self._held_in(place).get(place.name, _ABSENT)

    def _set(self, place: StatePlace, value: Any) -> None:
        held = self._held_in(place)
        self._module.get_submodule(place.path).__dict__.pop(place.name, None)  # of a skipped block: not as a buffer
        if value is _ABSENT:  # the step may ask whether there is one
            held.pop(place.name, None)
        else:
            held[place.name] = value

    def _put(self, place: StatePlace, value: Any) -> None:
        held = self._get(place)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
            held.copy_(value)
        else:
            self._set(place, value)
