"""Options common to all strategies, and the protocol to query them without building the strategy.

A strategy's options are a dataclass without torch. Its fields, with their defaults, are the keys of ``strategy=<name>``
and the arguments of the strategy's class; the comment above a field is its help. Its methods validate values and report
facts about the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from trainwright.core.config.options import checked, class_of, value_problems, word
from trainwright.core.layout import Layout

# Lightning's; ranks refuse their subclasses.
AVERAGING_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


@dataclass(frozen=True)
class PlannedRun:
    """Configuration of a run, against which options are checked before a process starts.

    Attributes:
        cfg: its resolved configuration (a ``DictConfig``).
        verb: fit, validate, test or predict.
        layout: closed; ``None``: unknown or invalid.
        world_size: number of ranks, parameter servers included; ``None``: invalid.
        devices: ranks per machine; ``None``: invalid.
        has_launcher: whether torchrun or SLURM started the ranks.
    """

    cfg: Any
    verb: str = "fit"
    layout: Layout | None = None
    world_size: int | None = None
    devices: int | None = None
    has_launcher: bool = False

    def replaceable_ranks(self, options: StrategyOptions) -> tuple[int, ...]:
        """Return the ranks that can be lost and restarted one by one while the others continue."""
        launch = self.cfg.launch
        if launch.recovery not in ("rejoin", "auto") or launch.max_restarts == 0 or launch.min_devices is not None:
            return ()
        return (options.replaceable_ranks(int(self.cfg.devices)) or ()) if self.verb == "fit" else ()

    def parts(self, *groups: str) -> Iterator[tuple[str, Any, str]]:
        """Yield the dotted key, node and class of each callback in some groups of the configuration."""
        for group in groups:
            for name, value in self.cfg[group].items():
                yield f"{group}.{name}", value, class_of(value)


@dataclass
class StrategyOptions:
    """Options of every strategy."""

    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = found in the model.
    blocks: list[str] | None = None
    # Recompute activations in the backward pass to save memory: none, full (every block) or selective (the modules
    # that checkpoint_modules names).
    activation_checkpointing: str = word("none", "none", "full", "selective")
    # Names (patterns with *) of the modules to recompute with activation_checkpointing=selective; null = none.
    checkpoint_modules: list[str] | None = None
    # Compile each block with torch.compile; false = off.
    compile: bool = checked(
        False, lambda given: isinstance(given, bool | Mapping), "true, false or what torch.compile takes"
    )
    # Before the first step, compare losses and gradients of a layout that splits the module with those of the module as
    # written: refuse (end the run if they differ by more than rounding), warn or off.
    certificate: str = word("refuse", "refuse", "warn", "off")
    # Write checkpoints into one file that torch.load reads: true = always (the first rank holds the whole state then),
    # false = never; null = with single and ddp always, else for paths in .ckpt if the state has at most 256 MiB.
    one_file: bool | None = None
    # Checks of the configuration before a process starts, as package.module:function, for custom strategies; [] = none.
    # They are not passed to the strategy's class.
    checks: list[str] = field(default_factory=list)

    # Whether ranks average gradients at every step, so that `compression` applies.
    averages_gradients: ClassVar[bool] = False
    # Whether the ZeRO stage is an option rather than implied by the name.
    has_any_stage: ClassVar[bool] = False
    # Whether it supports Apple GPUs (accelerator=mps), which have neither collectives nor float64.
    takes_mps: ClassVar[bool] = False

    @classmethod
    def take(cls, given: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split keyword arguments into options and the rest; ``None`` selects an option's default."""
        names = {item.name for item in fields(cls)} - {"_target_", "checks"}
        taken = {name: value for name, value in given.items() if name in names and value is not None}
        return cls(**taken), {name: value for name, value in given.items() if name not in names}

    # ---- facts ----------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Return the requested layout, open or closed: the axes among the options, or replicas on all ranks.

        Raises:
            ValueError: if the layout is invalid.
        """
        sizes = {axis.name: getattr(self, axis.name) for axis in fields(Layout) if hasattr(self, axis.name)}
        return Layout(**sizes) if sizes else Layout(replicate=-1)

    def closed_layout(self, world_size: int) -> Layout:
        """Return the layout for ``world_size`` training ranks.

        Raises:
            ValueError: if it does not fit ``world_size``.
        """
        return self.layout().resolve(world_size)

    @property
    def serving_ranks(self) -> int:
        """Number of parameter-server ranks, the last of a run."""
        return 0

    @property
    def planned_as(self) -> str | None:
        """Name of the built-in strategy with the same memory and compute per rank; ``None``: no prediction possible."""
        return None

    @property
    def takes_sparse_gradients(self) -> bool:
        """True if sparse gradients (``nn.Embedding(sparse=True)``) are supported."""
        return False

    @property
    def averages_every_step(self) -> bool:
        """True if each step uses the mean gradient of all data ranks, so that batch shares may be unequal."""
        return True

    @property
    def rounds_to(self) -> tuple[str, ...]:
        """Names of dtypes in which options have gradients or hidden states sent; results are as exact as these."""
        return ()

    def replaceable_ranks(self, devices: int) -> tuple[int, ...] | None:
        """Return the ranks of ``devices`` that can be lost while the others continue; ``None``: unsupported."""
        return None

    def least_batch(self, layout: Layout) -> int:
        """Return the smallest batch size of a data rank under a closed layout."""
        return 1

    def difference_from_one_process(self, steps: int, compression: str) -> str | None:
        """Explain why the first ``steps`` steps differ from those of one process; ``None``: no known reason.

        Args:
            steps: number of compared steps.
            compression: name of the chosen compressor.
        """
        return None

    # ---- what is refused ------------------------------------------------------------------------------------------

    def value_problems(self) -> Iterator[str]:
        """Yield the values that their fields do not allow."""
        return value_problems(type(self), vars(self), "strategy.")

    def problems(self) -> Iterator[str]:
        """Yield problems of the values, alone and combined: each states what is allowed and what to type.

        What a field allows by itself is declared by it (:mod:`trainwright.core.config.options`); only combinations are
        left to check, and may be of values that are refused already.
        """
        yield from self.value_problems()
        mode, modules = self.activation_checkpointing, self.checkpoint_modules
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
        """Yield problems of the values under a layout; checks that depend on an open axis (``-1``) are skipped."""
        yield from ()

    def problems_of_call(self) -> Iterator[str]:
        """Yield the problems checked by the strategy's constructor, where the world size is unknown."""
        yield from self.problems()
        yield from self.layout_problems(self.layout())

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """Yield conflicts of this strategy with the rest of the configuration."""
        yield from ()

    def module_problems(self, run: PlannedRun, build: Any) -> Iterator[str]:
        """Yield reasons why the module is not supported.

        Args:
            run: with a layout.
            build: returns the module on the meta device, or ``None`` if it cannot be built there. Imports torch.
        """
        yield from ()
