"""The options that every strategy has, and the protocol through which everyone else asks a strategy's options.

A strategy's options are a dataclass that knows no torch. Its fields, with their defaults, are the keys of
``strategy=<name>`` and the arguments of the strategy's class; the comment above a field is its help. Its methods say
which values are refused and what others may know of the strategy without building it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from trainwright.core.config.options import class_of
from trainwright.core.layout import Layout

MISSING = "???"
"""What OmegaConf calls a value that must be given."""
CERTIFICATES = ("refuse", "warn", "off")
CHECKPOINTINGS = ("none", "full", "selective")
# Lightning's; their subclasses are refused by the ranks.
AVERAGING_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def number(default: Any, *, least: float = 0, most: float | None = None, above: float | None = None) -> Any:
    """A field whose numbers have other bounds than 0 and the largest of its kind, both allowed; ``above`` is not."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


def word(default: str | None, *allowed: str) -> Any:
    """A field that takes some words only."""
    return field(default=default, metadata={"words": allowed})


@dataclass(frozen=True)
class PlannedRun:
    """The run that options are checked against, before a process starts.

    Attributes:
        cfg: its resolved configuration (a ``DictConfig``).
        verb: fit, validate, test or predict.
        layout: closed; ``None``: not known, or refused.
        world_size: ranks, those that only serve included; ``None``: refused.
        devices: ranks of a machine; ``None``: refused.
        has_launcher: whether torchrun or SLURM has started the ranks.
    """

    cfg: Any
    verb: str = "fit"
    layout: Layout | None = None
    world_size: int | None = None
    devices: int | None = None
    has_launcher: bool = False

    def replaceable_ranks(self, options: StrategyOptions) -> tuple[int, ...]:
        """Ranks that the run can lose while the others go on, so that each is started anew for itself and joins."""
        launch = self.cfg.launch
        if launch.recovery not in ("rejoin", "auto") or launch.max_restarts == 0 or launch.min_devices is not None:
            return ()
        return (options.replaceable_ranks(int(self.cfg.devices)) or ()) if self.verb == "fit" else ()

    def parts(self, *groups: str) -> Iterator[tuple[str, Any, str]]:
        """Dotted key, node and class of each callback in some groups of the configuration."""
        for group in groups:
            for name, value in self.cfg[group].items():
                yield f"{group}.{name}", value, class_of(value)


@dataclass
class StrategyOptions:
    """Every strategy."""

    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = found in the model.
    blocks: list[str] | None = None
    # Recompute activations in the backward pass to save memory: none, full (every block) or selective (the modules
    # that checkpoint_modules names).
    activation_checkpointing: str = "none"
    # Names (patterns with *) of the modules to recompute with activation_checkpointing=selective; null = none.
    checkpoint_modules: list[str] | None = None
    # Compile each block with torch.compile; false = off.
    compile: bool = False
    # Before the first step, compare losses and gradients of a layout that splits the module with those of the module as
    # written: refuse (end the run if they differ by more than rounding), warn or off.
    certificate: str = "refuse"
    # Functions that look at the configuration before a process starts, as package.module:function, of a strategy of
    # your own; [] = none. Its class is not given them.
    checks: list[str] = field(default_factory=list)

    # Whether ranks average gradients among themselves at every step, so that `compression` has something to compress.
    averages_gradients: ClassVar[bool] = False
    # Whether its name says nothing of the stage of ZeRO that it has.
    has_any_stage: ClassVar[bool] = False
    # Whether it trains on an Apple GPU (accelerator=mps), which has no collectives and no float64.
    takes_mps: ClassVar[bool] = False

    @classmethod
    def take(cls, given: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The options among some keyword arguments, and the other arguments.

        ``None`` stands for the default.
        """
        names = {item.name for item in fields(cls)} - {"_target_", "checks"}
        taken = {name: value for name, value in given.items() if name in names and value is not None}
        return cls(**taken), {name: value for name, value in given.items() if name not in names}

    # ---- facts ----------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """The layout that is asked for, open or closed: the axes among the options, or replicas on all ranks.

        Raises:
            ValueError: if there is no such layout.
        """
        sizes = {axis.name: getattr(self, axis.name) for axis in fields(Layout) if hasattr(self, axis.name)}
        return Layout(**sizes) if sizes else Layout(replicate=-1)

    def closed_layout(self, world_size: int) -> Layout:
        """The layout on so many ranks, all of which train.

        Raises:
            ValueError: if it cannot be had on these.
        """
        return self.layout().resolve(world_size)

    @property
    def serving_ranks(self) -> int:
        """Ranks that only serve the others, the last ones of a run."""
        return 0

    @property
    def planned_as(self) -> str | None:
        """Name of the built-in strategy whose ranks hold and compute the same; ``None``: it cannot be predicted."""
        return None

    @property
    def takes_sparse_gradients(self) -> bool:
        """Whether parameters may have sparse gradients (``nn.Embedding(sparse=True)``)."""
        return False

    @property
    def averages_every_step(self) -> bool:
        """Whether each step is made with the mean gradient of all data ranks, so that they may share it unequally."""
        return True

    def replaceable_ranks(self, devices: int) -> tuple[int, ...] | None:
        """Ranks of ``devices`` that can be lost while the others go on; ``None``: none can be under this strategy."""
        return None

    def least_batch(self, layout: Layout) -> int:
        """Samples that a data rank must read at a time under a closed layout."""
        return 1

    def difference_from_one_process(self, steps: int, compression: str) -> str | None:
        """Why the first ``steps`` steps are not those of one process, where that is known; ``None``: it is not.

        Args:
            steps: that are compared.
            compression: name of the group's choice.
        """
        return None

    # ---- what is refused ------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, by themselves and together: each with what is allowed and what to type."""
        mode, modules = self.activation_checkpointing, self.checkpoint_modules
        yield from unknown_word("activation_checkpointing", mode, CHECKPOINTINGS)
        yield from unknown_word("certificate", self.certificate, CERTIFICATES)
        if mode == "selective" and not modules:
            yield (
                "strategy.activation_checkpointing=selective: which modules? Type "
                "'strategy.checkpoint_modules=[model.layers.*.mlp]', or activation_checkpointing=full for all blocks"
            )
        if mode in ("none", "full") and modules:
            yield (
                f"strategy.checkpoint_modules with activation_checkpointing={mode}: is read with selective only; type "
                "strategy.activation_checkpointing=selective, or leave strategy.checkpoint_modules out"
            )

    def layout_problems(self, layout: Layout) -> Iterator[str]:
        """What is wrong with the values under a layout; what depends on an open axis (``-1``) is left out."""
        yield from ()

    def problems_of_call(self) -> Iterator[str]:
        """What the constructor of the strategy refuses, which does not know the number of ranks."""
        yield from self.problems()
        yield from self.layout_problems(self.layout())

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """What cannot be had beside this strategy in the rest of the configuration."""
        yield from ()

    def module_problems(self, run: PlannedRun, build: Any) -> Iterator[str]:
        """What speaks against the module itself.

        Args:
            run: with a layout.
            build: gives the module on the meta device, or ``None`` where it cannot be built so. Calling it imports
                torch.
        """
        yield from ()


def unknown_word(option: str, given: Any, allowed: Iterable[Any]) -> Iterator[str]:
    """The problem of an option that takes some words only."""
    names = [str(each) for each in allowed]
    if str(given) not in names:
        near = difflib.get_close_matches(str(given), names, n=1)
        question = f"did you mean {near[0]}? " if near else ""
        yield f"strategy.{option}={given}: unknown; {question}allowed: {', '.join(names)}"


def as_typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, (list, tuple)) else str(value)
