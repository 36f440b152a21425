"""Result of a plan: possible layouts, ranked, and refused ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainwright.core.device_profiles import DeviceProfile
from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import KINDS, Held
from trainwright.planning.memory.state import UnitState
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut
from trainwright.planning.time.step import PredictedStepTime
from trainwright.strategies.contract.registry import strategy_options

USABLE = 0.92
"""Part of a device's memory for tensors; the rest is for context, communicators and fragmentation."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A possible layout, its execution, and predictions.

    Args:
        strategy: name: ``single``, ``ddp``, ``zero1`` to ``zero3``, ``hybrid``.
        work: layout and step.
        cut: of a pass.
        memory: peak memory of the largest rank.
        time: of an optimizer step.
        samples: of an optimizer step.
        overrides: that select it, after the recipe.
        at_step: maximum of each kind on any rank at the optimizer step, which a run can measure.
        blocks: number of blocks on a rank.
        block: the largest of them.
    """

    strategy: str
    work: Work
    cut: ModelCut
    memory: Held
    time: PredictedStepTime
    samples: int
    overrides: tuple[str, ...] = ()
    at_step: Held = field(default_factory=Held)
    blocks: int = 0
    block: UnitState = field(default_factory=UnitState)

    @property
    def layout(self) -> Layout:
        """Its closed axes."""
        return self.work.layout

    @property
    def accumulation(self) -> int:
        """Micro-batches that a data rank accumulates."""
        return self.work.rounds

    @property
    def micro_batch_size(self) -> int:
        """Samples that a data rank reads at a time; a pipeline splits them."""
        return self.work.micro_batch * self.work.parts

    @property
    def samples_per_second(self) -> float:
        """Predicted throughput."""
        return self.samples / self.time.total

    @property
    def title(self) -> str:
        """The strategy and its axes as text."""
        return describe(self.strategy, self.layout, self.work.stage)


@dataclass(frozen=True)
class Refusal:
    """A layout that is not possible.

    Args:
        what: strategy and axes.
        kind: ``"layout"`` (refused by a strategy), ``"batch"`` or ``"memory"``.
        reason: given value, allowed values, remedy.
        overrides: that would be refused for this reason.
        needed: bytes per rank, if memory is the reason.
    """

    what: str
    kind: str
    reason: str
    overrides: tuple[str, ...] = ()
    needed: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Result of a plan.

    Args:
        name: of the recipe.
        world_size: number of ranks.
        profile: of their devices.
        precision: of the run.
        global_batch_size: samples per step; None: each layout its own.
        ranked: possible layouts, fastest first; one per set of axes and stage.
        refused: all others.
        parameters: elements of the module.
        seconds: duration of planning.
        considered: executions evaluated.
        notes: sentences on assumptions about the first layout's memory.
    """

    name: str
    world_size: int
    profile: DeviceProfile
    precision: str
    global_batch_size: int | None
    ranked: tuple[LayoutCandidate, ...]
    refused: tuple[Refusal, ...] = ()
    parameters: int = 0
    seconds: float = 0.0
    considered: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> LayoutCandidate | None:
        """The fastest; None if nothing is possible."""
        return self.ranked[0] if self.ranked else None


def describe(strategy: str, layout: Layout, stage: int) -> str:
    """Return a layout as text: ``hybrid, stage 1: pipeline 8 x shard 16 x tensor 8``."""
    sizes = {**layout.sizes, "expert": layout.expert}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    is_open = layout.state_ranks > 1 and strategy_options(strategy).has_any_stage
    named = f"{strategy}, stage {stage}" if is_open else strategy
    return f"{named}: {axes}" if axes else named


def describe_data(layout: Layout) -> str:
    """Return the data ranks and other axes of a layout: ``16 data ranks x pipeline 8 x tensor 8``."""
    axes = {axis: getattr(layout, axis) for axis in ("pipeline", "context", "tensor")}
    return f"{layout.data_ranks} data ranks" + "".join(f" x {axis} {size}" for axis, size in axes.items() if size > 1)


_GIB = 2**30


class Refusals:
    """The first refusal of each layout and kind; for memory, the one that lacks least."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Refusal] = {}

    def add(self, what: str, kind: str, reason: str, overrides: Sequence[str] = (), needed: float = 0.0) -> None:
        """Record a refusal; the arguments are those of :class:`~trainwright.planning.search.plan.Refusal`."""
        known = self._known.get((what, kind))
        if known is None or (needed and needed < known.needed):
            self._known[what, kind] = Refusal(what, kind, reason, tuple(overrides), needed)

    def excluding(self, possible: Collection[str]) -> tuple[Refusal, ...]:
        """Return the refusals of layouts that are not possible in another way.

        Args:
            possible: titles of all possible layouts.
        """
        return tuple(each for each in self._known.values() if each.what not in possible)


def too_large(held: Held, capacity: float, profile: DeviceProfile) -> str:
    """Return the reason of a refusal for memory.

    Args:
        held: least memory of the layout.
        capacity: device memory for tensors, bytes.
        profile: of the device.
    """
    if held.host > profile.host_memory_bytes:
        return (
            f"needs {held.host / _GIB:.1f} GiB of host memory per rank, device={profile.name} has "
            f"{profile.host_memory_bytes / _GIB:.1f} GiB"
        )
    sizes = {kind: getattr(held, kind) for kind in KINDS}
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in sizes.items() if size > 0.05 * _GIB)
    return (
        f"needs {held.total / _GIB:.1f} GiB per rank at least ({listed}), device={profile.name} has "
        f"{capacity / _GIB:.1f} GiB"
    )
