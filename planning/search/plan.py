"""What a plan answers: layouts that are possible, ranked, and why others are not."""

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
"""Part of a device's memory that tensors may take; the rest is for its context, communicators, and gaps."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that is possible, how it is run, and what is predicted of it.

    Args:
        strategy: name: ``single``, ``ddp``, ``zero1`` to ``zero3``, ``hybrid``.
        work: layout and step.
        cut: how a pass is split.
        memory: of the rank that needs most, at the moment at which it does.
        time: of an optimizer step.
        samples: of an optimizer step.
        overrides: what to type behind the recipe to have it.
        at_step: most of each kind on any rank when the optimizer steps; what can be seen of it in a run.
        blocks: of the module that a rank has.
        block: the heaviest of them.
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
        """Its axes, closed."""
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
        """Predicted."""
        return self.samples / self.time.total

    @property
    def title(self) -> str:
        """The strategy and its axes, for people."""
        return describe(self.strategy, self.layout, self.work.stage)


@dataclass(frozen=True)
class Refusal:
    """A layout that cannot be had.

    Args:
        what: strategy and axes.
        kind: ``"layout"`` (a strategy refuses it), ``"batch"`` or ``"memory"``.
        reason: what was given, what is allowed, what to type.
        overrides: what would be refused so if it was typed.
        needed: bytes a rank, where that is the reason.
    """

    what: str
    kind: str
    reason: str
    overrides: tuple[str, ...] = ()
    needed: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What was found.

    Args:
        name: of the recipe.
        world_size: ranks.
        profile: of their devices.
        precision: of the run.
        global_batch_size: samples of a step; None: each layout its own.
        ranked: possible layouts, the fastest first; one for each set of axes and stage.
        refused: all others.
        parameters: elements of the module.
        seconds: that planning took.
        considered: ways to run that were weighed.
        notes: what the first layout's bytes depend on beside sizes; sentences.
    """

    name: str
    world_size: int
    profile: DeviceProfile
    precision: str
    global_batch_size: int | None
    ranked: tuple[LayoutCandidate, ...]
    refused: tuple[Refusal, ...]
    parameters: int = 0
    seconds: float = 0.0
    considered: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> LayoutCandidate | None:
        """The fastest; None if nothing is possible."""
        return self.ranked[0] if self.ranked else None


def describe(strategy: str, layout: Layout, stage: int) -> str:
    """``hybrid, stage 1: pipeline 8 x shard 16 x tensor 8``."""
    sizes = {**layout.sizes, "expert": layout.expert}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    is_open = layout.state_ranks > 1 and strategy_options(strategy).has_any_stage
    named = f"{strategy}, stage {stage}" if is_open else strategy
    return f"{named}: {axes}" if axes else named


def describe_data(layout: Layout) -> str:
    """``16 data ranks x pipeline 8 x tensor 8``: the data ranks of a layout, however they share state."""
    axes = {axis: getattr(layout, axis) for axis in ("pipeline", "context", "tensor")}
    return f"{layout.data_ranks} data ranks" + "".join(f" x {axis} {size}" for axis, size in axes.items() if size > 1)


_GIB = 2**30


class Refusals:
    """One refusal for each layout and kind: the first, and of those for want of memory the one that lacks least."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Refusal] = {}

    def add(self, what: str, kind: str, reason: str, overrides: Sequence[str] = (), needed: float = 0.0) -> None:
        """Take note of one; the arguments are those of :class:`~trainwright.planning.search.plan.Refusal`."""
        known = self._known.get((what, kind))
        if known is None or (needed and needed < known.needed):
            self._known[what, kind] = Refusal(what, kind, reason, tuple(overrides), needed)

    def beside(self, possible: Collection[str]) -> tuple[Refusal, ...]:
        """Those of layouts that are possible in no way.

        Args:
            possible: titles of all that are.
        """
        return tuple(each for each in self._known.values() if each.what not in possible)


def too_large(held: Held, capacity: float, profile: DeviceProfile) -> str:
    """The reason for want of memory.

    Args:
        held: what the layout needs at the least.
        capacity: bytes of a device that tensors may take.
        profile: of the device.
    """
    if held.host > profile.host_memory_bytes:
        return (
            f"needs {held.host / _GIB:.1f} GiB of host memory a rank, device={profile.name} has "
            f"{profile.host_memory_bytes / _GIB:.1f} GiB"
        )
    sizes = {kind: getattr(held, kind) for kind in KINDS}
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in sizes.items() if size > 0.05 * _GIB)
    return (
        f"needs {held.total / _GIB:.1f} GiB a rank at the least ({listed}), device={profile.name} has "
        f"{capacity / _GIB:.1f} GiB for it"
    )
