"""Options of ``strategy=local_sgd`` and ``strategy=diloco``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainwright.core.config.options import number
from trainwright.core.config.override_words import typed
from trainwright.strategies.averaging.compression.options import OFF as UNCOMPRESSED
from trainwright.strategies.averaging.compression.options import ONLY_OF_AVERAGES
from trainwright.strategies.compose.hybrid_options import HybridOptions
from trainwright.strategies.contract.communication.options import OFF
from trainwright.strategies.contract.options import AVERAGING_CALLBACKS, PlannedRun

MANUAL_OPTIMIZATION = (
    "local updates count the optimizer steps of the Trainer, but this module makes its own (automatic_optimization = "
    "False), possibly of several optimizers. Use strategy=ddp (or zero1, zero2) with it, or automatic optimization"
)
"""Error for modules with manual optimization."""
SYNC_BATCHNORM = (
    "sync_batchnorm=true makes all ranks wait for each other in every BatchNorm of every step, which local updates "
    "avoid. Leave it out: running statistics are averaged whenever replicas are synchronized"
)
"""Error for synchronized BatchNorm."""
_BETWEEN = "optimizer steps between synchronizations"


@dataclass
class LocalUpdateOptions(HybridOptions):
    """Options of replicas that synchronize every H steps."""

    # Number of replicas; -1 = the rest.
    replicate: int = number(-1, least=-1)
    # Ranks that share the state of one replica; -1 = the rest, 1 = nothing is sharded.
    shard: int = number(1, least=-1)
    # Optimizer steps between synchronizations of the replicas.
    sync_every: int = number(10, least=1, unit=_BETWEEN)
    # First optimizer steps, in which gradients are averaged over all replicas; 0 = off.
    warmup_steps: int = number(0, unit="first optimizer steps, with averaged gradients, 0 is off")

    averages_gradients = False
    averages_every_step = False
    planned_as = None
    # Options that make each step that of one process.
    as_one_process: ClassVar[Mapping[str, Any]] = {"sync_every": 1}
    name: ClassVar[str]

    def difference_from_one_process(self, steps: int, compression: str) -> str | None:
        """See the base class."""
        equal = all(getattr(self, key) == value for key, value in self.as_one_process.items())
        if self.warmup_steps >= steps or (compression == UNCOMPRESSED and equal):
            return None
        exact = " ".join(f"strategy.{key}={typed(value)}" for key, value in self.as_one_process.items())
        return (
            f"strategy={self.name} with strategy.sync_every={self.sync_every}: replicas with local steps do not train "
            f"as one process does. To compare, type {exact} with an SGD, or use steps with averaged gradients:"
            f" strategy.warmup_steps={steps} (or more)"
        )

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        if self.communication != OFF:
            yield (
                f"strategy.communication={self.communication} with local updates: it compares ways to average "
                "gradients at every step, but these replicas do not; leave it out, or measure with strategy=ddp"
            )
        if self.average_by:
            yield (
                f"strategy.average_by={self.average_by} with local updates: these replicas do not average gradients at "
                "every step; leave it out, or type strategy=ddp (or zero1, zero2, zero3, hybrid)"
            )
        if self.placement:
            yield (
                "strategy.placement with local updates: servers step tables with all ranks together, but replicas step "
                "locally; leave it out, or type strategy=hybrid"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        if run.verb != "fit":
            return
        layout = run.layout
        if layout is not None and layout.replicate == 1:
            others = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one rank"
            yield (
                f"strategy.replicate=1 of {layout.world_size} rank(s) ({others}): there are no replicas to "
                "synchronize; type devices=2 or more (with strategy.replicate=-1), or strategy=ddp (or hybrid)"
            )
        for key, _, callback in run.parts("callbacks", "monitor"):
            if callback in AVERAGING_CALLBACKS:
                yield f"{key}: {averaging_callback_problem(callback)}"
        if run.cfg.trainer.sync_batchnorm:
            yield f"trainer.{SYNC_BATCHNORM}"

    def module_problems(self, run: PlannedRun, build: Any) -> Iterator[str]:
        """See the base class."""
        yield from super().module_problems(run, build)
        module = build() if run.verb == "fit" else None
        if module is None:
            return
        if not module.automatic_optimization:
            yield f"{type(module).__name__}: {MANUAL_OPTIMIZATION}"
        fragments = getattr(self, "fragments", 1)
        if fragments > 1:
            from trainwright.strategies.plan.blocks import find_blocks

            try:
                blocks = len(find_blocks(module, self.blocks))
            except ValueError:
                return  # reported elsewhere
            yield from fragment_problem(fragments, blocks)


@dataclass
class LocalSGDOptions(LocalUpdateOptions):
    """`strategy=local_sgd`: replicas step locally; their parameters are averaged every H steps."""

    _target_: str = "trainwright.strategies.local_updates.strategy.LocalSGDStrategy"
    # Average optimizer states, too; false = each replica keeps its own.
    average_optimizer: bool = False

    name = "local_sgd"

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        if self.compressor is not None:
            yield (
                f"compression={self.compressor} with local_sgd, which averages parameters, whose compression errors "
                "would be permanent. Use strategy=diloco strategy.outer_lr=1 strategy.outer_momentum=0 "
                "strategy.outer_nesterov=false, which is local SGD on differences, and compresses these"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        if run.verb != "fit":
            return
        if run.layout is not None and run.layout.replicate == run.layout.world_size:
            yield from (
                f"{key}: ReplicaCheck compares replicas, but those of local_sgd on one rank each differ between two "
                "averages; type monitor=default, or strategy=diloco, whose common parameters it compares"
                for key, _, callback in run.parts("callbacks", "monitor")
                if callback == "ReplicaCheck"
            )


@dataclass
class DiLoCoOptions(LocalUpdateOptions):
    """`strategy=diloco`: replicas step locally; their progress is the gradient of an outer optimizer."""

    _target_: str = "trainwright.strategies.local_updates.strategy.DiLoCoStrategy"
    # Optimizer steps between synchronizations (of a fragment).
    sync_every: int = number(50, least=1, unit=_BETWEEN)
    # Learning rate of the outer SGD; 1 with outer_momentum 0 = the plain average.
    outer_lr: float = number(0.7, above=0, unit="1 with outer_momentum=0 is the plain average")
    # Momentum of the outer SGD; 0 = off.
    outer_momentum: float = number(0.9, below=1, unit="0 is off")
    # Nesterov momentum; false = classical momentum.
    outer_nesterov: bool = True
    # Parts of the model that are synchronized in turn; 1 = the whole model.
    fragments: int = number(1, least=1, unit="parts that are synchronized in turn, 1 is the whole model")
    # Optimizer steps that an average may overlap with; 0 = training waits for it.
    overlap_steps: int = number(0, unit="optimizer steps that an average may overlap with, 0 is off")
    # Fraction of a replica's own parameters kept when an overlapped average is merged; 0 = none.
    mixing: float = number(0.5, below=1, unit="0: merged parameters only")
    # Compressor of outer gradients: a name (fp16, bf16, int8, topk, ...) or its name and options, like {name: topk,
    # ratio: 0.01}; null = as set by the group compression.
    compression: Any = None
    # Keep common parameters and outer momentum in host memory; false = on the device.
    offload_outer: bool = False

    name = "diloco"
    as_one_process: ClassVar[Mapping[str, Any]] = {
        "sync_every": 1,
        "outer_lr": 1,
        "outer_momentum": 0,
        "outer_nesterov": False,
        "compression": None,
    }

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        given = self.compression if isinstance(self.compression, Mapping) else {}
        yield from (
            f"compression.{key}={given[key]} is for averages and has no effect on outer gradients; leave it out (first "
            "steps with averaged gradients are strategy.warmup_steps=...)"
            for key in ONLY_OF_AVERAGES
            if key in given
        )
        if any(self.value_problems()):
            return
        every, fragments, overlap = self.sync_every, self.fragments, self.overlap_steps
        if fragments > every:
            yield (
                f"strategy.fragments={fragments} with strategy.sync_every={every}: each fragment needs a step of its "
                f"own within sync_every steps; type strategy.fragments={every} or less, or a larger strategy.sync_every"
            )
        if overlap >= every:
            yield (
                f"strategy.overlap_steps={overlap} with strategy.sync_every={every}: an average must be merged before "
                f"the next one of the same parameters begins; type strategy.overlap_steps={every - 1} or less"
            )
        if self.outer_momentum == 0 and self.outer_nesterov:
            yield (
                "strategy.outer_nesterov=true with strategy.outer_momentum=0: Nesterov momentum needs one; type "
                "strategy.outer_nesterov=false, or strategy.outer_momentum=0.9"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        group = run.cfg.compression
        if run.verb == "fit" and group.name == "onebit":
            yield (
                f"compression=onebit with strategy=diloco: its {group.warmup_steps} warmup_steps are for Adam's "
                "momentum and have no effect on outer gradients; type strategy.compression=onebit, which sends signs "
                "without a warm-up, and strategy.warmup_steps=... for first steps with averaged gradients"
            )


def fragment_problem(fragments: int, blocks: int) -> list[str]:
    """Return why a model with ``blocks`` repeated blocks cannot be split into ``fragments``."""
    if fragments <= max(blocks, 1):
        return []
    if blocks == 0:
        return [
            f"strategy.fragments={fragments} of a model in which no repeated blocks were found; name them with "
            "strategy.blocks=['model.layers.*'], or type strategy.fragments=1"
        ]
    return [
        f"strategy.fragments={fragments} of a model with {blocks} block(s) (allowed: 1 to {blocks}, since a fragment "
        f"is made of whole blocks); type strategy.fragments={blocks}"
    ]


def averaging_callback_problem(callback: str) -> str:
    """Return the error for a Lightning averaging callback, given its class name."""
    return (
        f"{callback} averages over the steps of one replica, and replicas differ between two synchronizations, so "
        "ranks would evaluate and save different averages. Leave it out, or use strategy=ddp (or hybrid)"
    )
