"""Replicas with local optimizer steps: gradient averaging within a replica, evaluation on means, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.part import Replicas
from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.contract.same_model import varying_buffers
from trainwright.strategies.local_updates.mean import ReplicaMean
from trainwright.strategies.local_updates.options import MANUAL_OPTIMIZATION, SYNC_BATCHNORM, averaging_callback_problem
from trainwright.strategies.local_updates.state import (
    float_buffers,
    inner_boxes,
    inner_keys,
    optimizer_tensors,
    read_inner,
    with_mean_states,
    with_means,
)
from trainwright.strategies.state.checkpointing import OF_RUN
from trainwright.strategies.state.rank_state import is_transferred
from trainwright.strategies.state.run_state import OPTIMIZERS


@dataclass(frozen=True)
class UpdateSchedule:
    """Fragments in turn, each every ``sync_every`` steps, evenly spaced.

    Depends on the step count only, so it is the same on all ranks and after a resume.

    Args:
        sync_every: optimizer steps between averages of a fragment.
        fragments: at most ``sync_every``.
        warmup_steps: first steps, without synchronizations; 0: none.
    """

    sync_every: int
    fragments: int = 1
    warmup_steps: int = 0

    def due(self, step: int) -> int | None:
        """Return the fragment to average after ``step`` optimizer steps, if any."""
        if step <= self.warmup_steps:
            return None
        place = step % self.sync_every
        for fragment in range(self.fragments):
            if place == fragment * self.sync_every // self.fragments:
                return fragment
        return None


def fragment_of(name: str, blocks: Sequence[str], order: Sequence[str], count: int) -> int:
    """Return the fragment of a parameter: blocks are assigned round-robin (arXiv:2501.18512, section 3.1).

    Parameters before the blocks (an embedding) belong to the first fragment, those after them (a norm, a head) to the
    last.

    Args:
        name: of the parameter.
        blocks: names of the model's repeated blocks, in order.
        order: names of all parameters of the model, in order.
        count: number of fragments.
    """
    for index, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return index % count
    if count == 1 or name not in order:
        return 0
    place = order.index(name)
    first = next((at for at, each in enumerate(order) if each.startswith(f"{blocks[0]}.")), 0)
    return 0 if place < first else count - 1


# Key of local updates in run states.
_OWN = "local_updates"
_BUFFER = "buffers/"
_WEIGHT = "weights/"
_OPTIMIZER = "optimizer/"
_SCALER = "scaler"


class LocalReplicas(Replicas):
    """Replicas that average gradients internally and synchronize every ``sync_every`` steps.

    A replica is one rank, or ranks that share its state by ZeRO, tensor, context or expert ranks, or a pipeline.
    Between synchronizations replicas differ in parameters, running statistics and optimizer states. Before a
    validation, and when training has ended, every replica switches to the mean of parameters and float buffers; after
    a validation each switches back. Checkpoints hold the mean under the parameter names, and each rank's own state
    beside it. So neither validations nor checkpoints affect training.

    Norms, clipping and the loss scale of ``16-mixed`` are those of a replica: a step that overflows is skipped by its
    replica only.

    Args:
        strategy: of this replica.
        schedule: of synchronizations; during ``warmup_steps`` gradients are averaged as in DDP (post-local SGD,
            arXiv:1808.07217).
    """

    are_independent = True
    mesh_axes = ()  # the ranks of one replica

    def __init__(self, strategy: HybridStrategy, schedule: UpdateSchedule) -> None:
        self._strategy, self._schedule = strategy, schedule
        self._mean: ReplicaMean | None = None
        self._is_synced = True
        self._own_state: dict[str, Tensor] | None = None
        self._source: RunState | SnapshotReader | None = None

    def boxes(self, boxes: dict[str, TensorParts]) -> dict[str, TensorParts]:
        """See the base class; keys contain the replica, since replicas differ between synchronizations."""
        place = self._strategy.layout.coordinates(self._strategy.global_rank)["replicate"]
        return {f"{key} [replica {place}]": parts for key, parts in boxes.items()}

    # ---- setup ----------------------------------------------------------------------------------------------------

    def prepare(self, trainer: Trainer) -> None:
        """See the base class."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = self._strategy.lightning_module
        problems = [] if module.automatic_optimization else [f"{type(module).__name__}: {MANUAL_OPTIMIZATION}"]
        problems += [SYNC_BATCHNORM] if self._strategy._layer_sync else []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                problems.append(averaging_callback_problem(type(callback).__name__))
        refuse(problems)
        self._release()

    def set_up(self, trainer: Trainer) -> None:
        """See the base class."""
        strategy, groups = self._strategy, self._strategy._groups
        assert groups is not None
        self._mean = ReplicaMean(groups.along("replicate"), strategy.root_device, self._tag_of, strategy._bucket_bytes)
        scaler = self._scaler()
        if isinstance(scaler, AgreedGradScaler):  # each replica decides whether its step overflowed
            scaler.agree = partial(_any_of, groups.along("pipeline", "shard", "context", "tensor"))
        varying = varying_buffers(strategy.lightning_module)
        if varying and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(
                f"Statistics such as {varying[0]} differ between replicas during training; they are averaged at "
                "synchronizations, validations, saves and at the end."
            )

    def _tag_of(self, name: str) -> str:
        """See :data:`~trainwright.strategies.local_updates.mean.TagOf`."""
        parameter = self._strategy._exchanges.named.get(name)
        # Scalars are on every rank of the shard axis, beside different rows of the rest.
        return self._strategy._bucket_tag(name) + (" scalar" if parameter is not None and parameter.dim() == 0 else "")

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self._strategy.precision_plugin, "scaler", None)

    def _release(self) -> None:
        self._mean, self._own_state = None, None
        self._is_synced = True

    def close(self) -> None:
        """See the base class; each replica keeps its current weights, and a state can still be saved."""
        if self._own_state is not None:
            self._own_state, self._is_synced = None, True
        self._source = None

    # ---- state of a replica -----------------------------------------------------------------------------------------

    def _optimized(self) -> dict[str, Tensor]:
        """Return what optimizers hold in place of each stepped parameter, by name."""
        stepped = {id(parameter) for parameter in self._strategy._optimized_parameters()}
        found = {
            name: self._strategy._as_optimized(p)
            for name, p in self._strategy._exchanges.named.items()
            if p.requires_grad
        }
        return {name: held for name, held in found.items() if id(held) in stepped}

    def _trained_parts(self) -> dict[str, Tensor]:
        """Return this rank's part of each stepped parameter; must be published after in-place changes."""
        return {name: local_tensor(held).detach() for name, held in self._optimized().items()}

    def _own(self) -> dict[str, Tensor]:
        """Return parts of parameters, and float buffers, by name."""
        return {**self._trained_parts(), **float_buffers(self._strategy.lightning_module)}

    def _publish_all(self) -> None:
        for optimizer in self._strategy.optimizers:
            self._strategy._publish(optimizer)

    @property
    def _means(self) -> ReplicaMean:
        assert self._mean is not None
        return self._mean

    # ---- the step -------------------------------------------------------------------------------------------------

    def average_gradients(self) -> None:
        """See the base class; during the warm-up."""
        warms_up = self._strategy.lightning_module.trainer.global_step < self._schedule.warmup_steps
        if not warms_up or self._means.group is None:
            return
        held = self._optimized()
        has = [float(each.grad is not None) for each in held.values()]
        flags = torch.tensor(has, device=self._strategy.root_device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._means.group)
        gradients = {}
        for (name, each), flag in zip(held.items(), flags.tolist(), strict=True):
            if flag and each.grad is None:
                each.grad = torch.zeros_like(each)  # another replica has a gradient
            if flag:
                gradients[name] = local_tensor(each.grad)  # type: ignore[arg-type]
        self._means.average(gradients)

    def stepped(self) -> None:
        """See the base class."""
        self._is_synced = False
        # The current step is not counted yet; skipped steps do not get here.
        self._stepped(int(self._strategy.lightning_module.trainer.global_step) + 1)

    @abstractmethod
    def _stepped(self, step: int) -> None:
        """Do what is due after ``step`` optimizer steps. A collective of all ranks."""

    def _average_buffers(self) -> None:
        self._means.average(float_buffers(self._strategy.lightning_module))

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Switch to the means over replicas, saving this replica's own state. A collective."""
        fits = self._strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if not fits or self._is_synced or self._own_state is not None or self._means.group is None:
            return
        own = self._own()
        self._own_state = {name: tensor.clone() for name, tensor in own.items()}
        self._means.average(own)
        self._publish_all()

    def take_back(self) -> None:
        """Switch back to this replica's own state."""
        if self._own_state is None:
            return
        saved, self._own_state = self._own_state, None
        for name, tensor in self._own().items():
            tensor.copy_(saved[name])
        self._publish_all()

    def conclude(self) -> None:
        """Switch to the means for good; the own state is kept until the last checkpoint."""
        self.show()

    def end(self) -> None:
        """Keep the means."""
        self.show()  # for Lightning's own Trainer
        self._own_state = None
        self._is_synced = True

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def content(self, checkpoint: Mapping[str, Any], complete: bool, make: Callable[..., Content]) -> Content:
        """See the base class: means under parameter names, and each rank's own state beside them."""
        with_own = OPTIMIZERS in checkpoint
        if complete:
            self.take_back()
            content = make(checkpoint, complete=True)
            own = self._remembered()
        else:
            content = make(self.averaged(checkpoint))
            own = self._own() if self._own_state is None else self._own_state
            own = {**self._of_this_rank(own), **self._remembered()} if with_own else {}
        if not with_own:
            return content
        tensors = {**content.tensors, **self._common_boxes(), **inner_boxes(self._strategy.global_rank, own)}
        content.tree[OF_RUN][_OWN] = {"strategy": self._strategy.strategy_name, **self._metadata()}
        content.tree[OF_RUN]["left_behind"] = {"of": _OWN, "text": self._dropped_text()}
        return replace(content, tensors=tensors)

    def averaged(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of the means over replicas. A collective."""
        own = self._own()
        means = self._means.of(own) if self._own_state is None and not self._is_synced else own
        averaged = with_means(checkpoint, means, self._optimized(), self._canonical_names())
        return with_mean_states(averaged, self._strategy.optimizers, self._strategy._name_of(), self._means)

    def _canonical_names(self) -> dict[str, str]:
        module = self._strategy.lightning_module
        first = {id(p): name for name, p in module.named_parameters()}
        return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}

    def _of_this_rank(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's own state by key, given its parameters and buffers."""
        others = float_buffers(self._strategy.lightning_module, others=True)
        own, buffers = {**own, **others}, {**float_buffers(self._strategy.lightning_module), **others}
        weights = {f"{_BUFFER if name in buffers else _WEIGHT}{name}": tensor for name, tensor in own.items()}
        states = optimizer_tensors(self._strategy.optimizers, self._strategy._name_of())
        return {**weights, **{f"{_OPTIMIZER}{key}": value for key, value in states.items()}, **self._scale()}

    def _scale(self) -> dict[str, Tensor]:
        scaler = self._scaler()
        state = {} if scaler is None else scaler.state_dict()
        if not state:
            return {}
        return {_SCALER: torch.tensor([state["scale"], float(state["_growth_tracker"])], dtype=torch.float64)}

    def _remembered(self) -> dict[str, Tensor]:
        """Return the synchronization state of this rank only."""
        return {}

    def _common_boxes(self) -> dict[str, TensorParts]:
        """Return boxes of the state common to all replicas."""
        return {}

    def _metadata(self) -> dict[str, Any]:
        """Return metadata for resuming."""
        return {}

    @abstractmethod
    def _dropped_text(self) -> str:
        """Return what another strategy loses of a state, as a clause."""

    def knows(self, of: str) -> bool:
        """See the base class."""
        return of == _OWN

    def opened(self, state: RunState | SnapshotReader) -> None:
        """See the base class."""
        self._source = state if self._strategy.state.is_fitting() else None

    def restore(self) -> None:
        """See the base class."""
        source, self._source = self._source, None
        self._own_state, self._is_synced = None, False
        self._reset()
        if source is None:
            return
        of_run = source.tree.get(OF_RUN, {})
        saved = of_run.get(_OWN)
        if saved is None:
            return
        lost = self._restore_common(source, saved)
        lost += self._restore_own(source, Layout(**of_run["layout"]))
        if isinstance(source, SnapshotReader):
            if is_transferred(source):
                self._start_from_common()
        elif lost:
            rank_zero_warn(f"{source.path} was written with strategy={saved['strategy']}: {'; '.join(lost)}.")
        self._publish_all()

    def _reset(self) -> None:
        """Reset synchronization state; loaded weights are those of all replicas."""

    def _restore_common(self, source: RunState | SnapshotReader, saved: Mapping[str, Any]) -> list[str]:
        """Restore the common state; returns what was dropped."""
        return ["the state of its outer optimizer is left out"] if saved.get("has_outer") else []

    def _start_from_common(self) -> None:
        """Start a replica that joins from the common parameters, if there are any."""

    def _restore_own(self, source: RunState | SnapshotReader, saved: Layout) -> list[str]:
        """Restore this rank's own state; returns what was dropped."""
        if isinstance(source, SnapshotReader):
            if not is_transferred(source):
                read_inner(source, inner_keys(source, None), self._remembered())
            return []
        strategy = self._strategy
        if saved != strategy.layout:
            return [f"its layout was {saved}, not {strategy.layout}, so all resume from the mean weights and states"]
        own = self._of_this_rank(self._own())
        read_inner(source, inner_keys(source, strategy.global_rank), {**own, **self._remembered()})
        scaler = self._scaler()
        if scaler is not None and _SCALER in own:
            value, growth = own[_SCALER].tolist()
            scaler.load_state_dict({**scaler.state_dict(), "scale": value, "_growth_tracker": int(growth)})
        return []


def attach_replicas(strategy: HybridStrategy, replicas: LocalReplicas) -> None:
    """Set the replicas of a strategy."""
    strategy.replicas = replicas
    strategy._parts.append(replicas)
    strategy._ranks_agree = False


def _any_of(group: dist.ProcessGroup | None, flag: Tensor) -> Tensor:
    """Return whether a flag is set on any rank of ``group``; ``None``: no other ranks."""
    if group is not None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag
