"""Local SGD and DiLoCo: replicas with local optimizer steps, averaged or synchronized by an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.strategies.averaging.background import Background
from trainwright.strategies.averaging.compression.names import make_compressor
from trainwright.strategies.averaging.compression.options import choose_compression
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.contract.groups import new_subgroup
from trainwright.strategies.local_updates.options import DiLoCoOptions, LocalSGDOptions, fragment_problem
from trainwright.strategies.local_updates.outer import OuterParameters
from trainwright.strategies.local_updates.replicas import LocalReplicas, UpdateSchedule, attach_replicas, fragment_of
from trainwright.strategies.local_updates.state import averages, optimizer_tensors, outer_boxes, read_outer

_COMPRESSION = "compression/"


class LocalSGDStrategy(HybridStrategy):
    """Local optimizer steps per replica; parameters are averaged every ``sync_every`` steps (arXiv:1805.09767).

    With ``sync_every=1`` and SGD, momentum included, it is equivalent to DDP.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.local_updates.options.LocalSGDOptions`;
            ``average_optimizer`` multiplies the traffic by the optimizer's states.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "local_sgd"
    options_class = LocalSGDOptions
    options: LocalSGDOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_replicas(self, AveragedReplicas(self, self.options))


class AveragedReplicas(LocalReplicas):
    """Replicas whose parameters are averaged every H steps.

    Args:
        strategy: of this replica.
        options: of the strategy.
    """

    def __init__(self, strategy: HybridStrategy, options: LocalSGDOptions) -> None:
        super().__init__(strategy, UpdateSchedule(options.sync_every, warmup_steps=options.warmup_steps))
        self._averages_optimizer = options.average_optimizer

    def _stepped(self, step: int) -> None:
        if self._schedule.due(step) is None:
            return
        self._means.average(self._own())
        if self._averages_optimizer:
            states = averages(optimizer_tensors(self._strategy.optimizers, self._strategy._name_of()))
            self._means.average({key: states[key] for key in self._means.common(list(states))})
        self._publish_all()
        self._is_synced = True

    def _dropped_text(self) -> str:
        return "its replicas' weights and optimizer states were averaged, and each replica's own state is dropped"


class DiLoCoStrategy(HybridStrategy):
    """Local optimizer steps per replica, synchronized every ``sync_every`` steps by an outer optimizer.

    DiLoCo (arXiv:2311.08105): the difference between the common parameters and those of each replica (the outer
    gradient) is averaged, SGD with Nesterov momentum steps the common parameters by it, and every replica continues
    from them. With ``outer_lr=1`` and ``outer_momentum=0`` it is local SGD. States of the inner optimizers stay local.

    Streaming (arXiv:2501.18512): with ``fragments`` the repeated blocks of the model are synchronized in turn, each
    every ``sync_every`` steps; with ``overlap_steps`` an average overlaps with training and is then mixed with the
    replica's parameters.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.local_updates.options.DiLoCoOptions`. ``mixing`` is the
            paper's alpha; unused without overlap.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "diloco"
    options_class = DiLoCoOptions
    options: DiLoCoOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_replicas(self, OuterReplicas(self, self.options))


class OuterReplicas(LocalReplicas):
    """Replicas whose common parameters are stepped by an outer optimizer.

    Args:
        strategy: of this replica.
        options: of the strategy.
    """

    def __init__(self, strategy: HybridStrategy, options: DiLoCoOptions) -> None:
        super().__init__(strategy, UpdateSchedule(options.sync_every, options.fragments, options.warmup_steps))
        self._options, self._overlap = options, options.overlap_steps
        self._choice = choose_compression(options.compression)
        self._outer: OuterParameters | None = None
        self._background: Background | None = None
        self._background_group: dist.ProcessGroup | None = None
        self._launched: dict[int, int] = {}  # fragment -> step of its unmerged average
        self._fragment_names: dict[str, int] = {}

    # ---- setup ----------------------------------------------------------------------------------------------------

    def set_up(self, trainer: Trainer) -> None:
        """See the base class."""
        super().set_up(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._assign_fragments()
        if self._overlap and self._means.group is not None:
            # A separate group: messages of two threads must not interleave.
            self._background_group = new_subgroup(self._strategy.layout.groups("replicate"))
            self._background = Background(self._strategy.root_device)

    def _assign_fragments(self) -> None:
        if self._strategy._engines.is_cut:
            blocks, order = list(self._strategy._engines.plan.blocks), list(self._strategy._assembly.names)
        else:
            blocks = list(self._strategy._find_blocks()) if self._schedule.fragments > 1 else []
            order = list(self._strategy._exchanges.named)
        refuse(fragment_problem(self._schedule.fragments, len(blocks)))
        self._fragment_names = {name: fragment_of(name, blocks, order, self._schedule.fragments) for name in order}

    def _release(self) -> None:
        super()._release()
        self._launched = {}
        self._outer = None
        self._background_group = None

    def end(self) -> None:
        """See the base class; waits for averages in flight."""
        super().end()
        if self._outer is not None:
            self._outer.land()

    def close(self) -> None:
        """See the base class."""
        super().close()
        if self._background is not None:
            self._background.close()
            self._background = None

    def start(self) -> None:
        """Set the common parameters from the current ones, unless there are any."""
        if self._outer is not None:
            return
        self._outer = OuterParameters(
            self._trained_parts(),
            lambda name: self._fragment_names.get(name, 0),
            self._means,
            self._options,
            None if self._choice is None else make_compressor(self._choice),
            self._background,
            self._background_group,
        )

    @property
    def outer(self) -> OuterParameters:
        """Outer optimizer and common parameters, while training."""
        assert self._outer is not None
        return self._outer

    @property
    def held(self) -> tuple[int, int]:  # type: ignore[override]
        """Bytes of parameters and optimizer; the outer optimizer counts as the latter."""
        return 0, 0 if self._outer is None else self._outer.num_bytes()

    def boxes(self, boxes: dict[str, TensorParts]) -> dict[str, TensorParts]:
        """See the base class; with common parameters and momentum, which are equal on all replicas."""
        boxes = super().boxes(boxes)
        if self._outer is not None:
            # Keys like an optimizer's: <index>/<parameter>/<value>.
            boxes |= {f"optimizer/{key}": parts for key, parts in self._common_boxes().items()}
        return {key: parts for key, parts in boxes.items() if parts.parts}

    # ---- the step -------------------------------------------------------------------------------------------------

    def _stepped(self, step: int) -> None:
        if step == self._schedule.warmup_steps:
            self.outer.reset_common(self._trained_parts())  # equal on all replicas by now
        changed = self._merge_due(step)
        fragment = self._schedule.due(step)
        if fragment is not None:
            self.outer.launch(fragment, self._trained_parts())
            self._launched[fragment] = step
            if not self._overlap:
                self._merge(fragment, 0.0)
                changed = True
            if fragment == 0:
                self._average_buffers()
        if changed:
            self._publish_all()
        self._is_synced = fragment is not None and not self._overlap and self._schedule.fragments == 1

    def _merge_due(self, step: int) -> bool:
        due = [fragment for fragment, begun in self._launched.items() if begun + self._overlap <= step]
        for fragment in sorted(due):
            self._merge(fragment, self._options.mixing)
        return bool(due)

    def _merge(self, fragment: int, mixing: float) -> None:
        self.outer.land(fragment)
        self.outer.merge(fragment, self._trained_parts(), mixing)
        del self._launched[fragment]

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def content(self, checkpoint: Mapping[str, Any], complete: bool, make: Callable[..., Content]) -> Content:
        """See the base class; waits for averages in flight."""
        self.start()
        self.outer.land()
        return super().content(checkpoint, complete, make)

    def _remembered(self) -> dict[str, Tensor]:
        return {f"{_COMPRESSION}{key}": value for key, value in self.outer.compression().items()}

    def _common_boxes(self) -> dict[str, TensorParts]:
        return outer_boxes(self.outer, self._strategy.placement, self._optimized())

    def _metadata(self) -> dict[str, Any]:
        return {
            "has_outer": True,
            "launched": {str(k): v for k, v in self._launched.items()},
            "options": self._signature(),
        }

    def _signature(self) -> dict[str, Any]:
        """Return the settings that must not change for averages in flight and residuals to stay valid."""
        choice = None if self._choice is None else asdict(self._choice)
        return {"sync_every": self._schedule.sync_every, "fragments": self._schedule.fragments, "compression": choice}

    def _dropped_text(self) -> str:
        return (
            "the weights and optimizer states of its replicas were averaged, and the outer optimizer's state and each "
            "replica's own state are dropped"
        )

    def _reset(self) -> None:
        if self._outer is not None:
            self._outer.discard_flights()
            self._outer = None
        self._launched = {}
        self.start()

    def _restore_common(self, source: RunState | SnapshotReader, saved: Mapping[str, Any]) -> list[str]:
        if not saved.get("has_outer"):
            return []
        if not read_outer(source, self.outer, self._strategy.placement, self._optimized()):
            return ["its outer optimizer has other parameters, so its state is dropped"]
        if saved["options"] == self._signature():
            self._launched = {int(fragment): step for fragment, step in saved["launched"].items()}
        elif saved["launched"]:
            return ["averages in flight are dropped, since its synchronization settings were different"]
        return []

    def _start_from_common(self) -> None:
        common = self.outer.common()
        for name, part in self._trained_parts().items():
            if name in common:
                part.copy_(common[name])
