"""Replicas that step by themselves: how they are kept apart, shown as one and saved, whatever brings them together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.memory.transfer import TRANSFERRED
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
from trainwright.strategies.local_updates.options import (
    MANUAL_OPTIMIZATION,
    SYNC_BATCHNORM,
    averaging_callback_problem,
)
from trainwright.strategies.local_updates.schedule import UpdateSchedule
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
from trainwright.strategies.state.run_state import OPTIMIZERS

# What a run state says of this module's own part of it.
_OWN = "local_updates"
_BUFFER = "buffers/"
_WEIGHT = "weights/"
_OPTIMIZER = "optimizer/"
_SCALER = "scaler"


class LocalReplicas(Replicas):
    """Gradients are averaged within a replica alone; replicas are brought together every ``sync_every`` steps.

    A replica is whatever the layout makes of it: one rank, ranks that share its state by ZeRO, tensor, context or
    expert ranks, a pipeline. Between two synchronisations replicas differ, in parameters, running statistics and
    optimizer states. What others see of the run is the mean over the replicas: before a validation, and when training
    has ended, every replica shows the mean of the parameters and float buffers; after a validation each goes on from
    its own. The mean is what checkpoints hold under the names of the parameters; beside it they hold what each rank
    needs to go on from its own. So neither validations nor checkpoints change how a run goes on.

    Norms, clipping and the scale of ``16-mixed`` losses are those of a replica: a step that overflows is skipped by its
    replica alone.

    Args:
        strategy: of this replica.
        schedule: when replicas are brought together; with ``warmup_steps`` gradients are averaged at the beginning as
            in DDP (post-local SGD, arXiv:1808.07217).
    """

    are_independent = True
    mesh_axes = ()  # the ranks of one replica

    def __init__(self, strategy: HybridStrategy, schedule: UpdateSchedule) -> None:
        self._strategy, self._schedule = strategy, schedule
        self._mean: ReplicaMean | None = None
        self._is_alike = True
        self._aside: dict[str, Tensor] | None = None
        self._source: RunState | SnapshotReader | None = None

    def boxes(self, boxes: dict[str, TensorParts]) -> dict[str, TensorParts]:
        """See the base class; keys tell the replica, for only its ranks hold the same between two synchronisations."""
        place = self._strategy.layout.coordinates(self._strategy.global_rank)["replicate"]
        return {f"{key} [replica {place}]": parts for key, parts in boxes.items()}

    # ---- setup ----------------------------------------------------------------------------------------------------

    def prepare(self, trainer: Trainer) -> None:
        """See the base class."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_beside(self._strategy.lightning_module, trainer)
            self._let_go()

    def set_up(self, trainer: Trainer) -> None:
        """See the base class."""
        strategy, groups = self._strategy, self._strategy._groups
        assert groups is not None
        self._mean = ReplicaMean(groups.along("replicate"), strategy.root_device, self._alike, strategy._bucket_bytes)
        scaler = self._scaler()
        if isinstance(scaler, AgreedGradScaler):  # a replica decides by itself whether its step has overflown
            scaler.agree = partial(_any_of, groups.along("pipeline", "shard", "context", "tensor"))
        varying = varying_buffers(strategy.lightning_module)
        if varying and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(
                f"Statistics such as {varying[0]} differ from replica to replica while training; they are averaged "
                "whenever replicas are synchronised, for a validation, for a save and at the end."
            )

    def _refuse_beside(self, module: LightningModule, trainer: Trainer) -> None:
        """Refuse what cannot work while replicas differ."""
        problems = [] if module.automatic_optimization else [f"{type(module).__name__}: {MANUAL_OPTIMIZATION}"]
        problems += [SYNC_BATCHNORM] if self._strategy._layer_sync else []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                problems.append(averaging_callback_problem(type(callback).__name__))
        refuse(problems)

    def _alike(self, name: str) -> str:
        """See :data:`~trainwright.strategies.local_updates.mean.Alike`."""
        parameter = self._strategy._exchanges.named.get(name)
        # Every rank of the shard axis holds a scalar, beside other rows of the rest.
        return self._strategy._kin_of(name) + (" scalar" if parameter is not None and parameter.dim() == 0 else "")

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self._strategy.precision_plugin, "scaler", None)

    def _let_go(self) -> None:
        self._mean, self._aside = None, None
        self._is_alike = True

    def close(self) -> None:
        """See the base class; each replica keeps the weights that it shows, and a state can still be saved."""
        if self._aside is not None:
            self._aside, self._is_alike = None, True
        self._source = None

    # ---- what replicas have of their own ----------------------------------------------------------------------------

    def _optimized(self) -> dict[str, Tensor]:
        """What optimizers hold in place of the parameters that they step, by name."""
        stepped = {id(parameter) for parameter in self._strategy._optimized_parameters()}
        found = {
            name: self._strategy._as_optimized(p)
            for name, p in self._strategy._exchanges.named.items()
            if p.requires_grad
        }
        return {name: held for name, held in found.items() if id(held) in stepped}

    def _trained_parts(self) -> dict[str, Tensor]:
        """This rank's part of each of these; changed in place, they have to be published."""
        return {name: local_tensor(held).detach() for name, held in self._optimized().items()}

    def _own(self) -> dict[str, Tensor]:
        """Parts of parameters, and float buffers, by name."""
        return {**self._trained_parts(), **float_buffers(self._strategy.lightning_module)}

    def _publish_all(self) -> None:
        for optimizer in self._strategy.optimizers:
            self._strategy._publish(optimizer)

    @property
    def _means(self) -> ReplicaMean:
        assert self._mean is not None
        return self._mean

    # ---- the step -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin from what is loaded by now."""
        self._begin()

    def _begin(self) -> None:
        """Take the parameters as they are for those that all replicas have in common, if there is need of such."""

    def average_gradients(self) -> None:
        """See the base class; while it warms up."""
        if self._warms_up:
            self._average_over_replicas()

    @property
    def _warms_up(self) -> bool:
        """Whether this is a step with averaged gradients."""
        return int(self._strategy.lightning_module.trainer.global_step) < self._schedule.warmup_steps

    def _average_over_replicas(self) -> None:
        if self._means.group is None:
            return
        held = self._optimized()
        has = [float(each.grad is not None) for each in held.values()]
        flags = torch.tensor(has, device=self._strategy.root_device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._means.group)
        gradients = {}
        for (name, each), flag in zip(held.items(), flags.tolist(), strict=True):
            if flag and each.grad is None:
                each.grad = torch.zeros_like(each)  # another replica has one
            if flag:
                gradients[name] = local_tensor(each.grad)  # type: ignore[arg-type]
        self._means.take(gradients)

    def stepped(self) -> None:
        """See the base class."""
        self._is_alike = False
        # Not counted yet; one that a callback drops never comes here and is not counted either.
        self._stepped(int(self._strategy.lightning_module.trainer.global_step) + 1)

    @abstractmethod
    def _stepped(self, step: int) -> None:
        """Do what is due when ``step`` optimizer steps are done. A collective of all ranks."""

    def _average_buffers(self) -> None:
        self._means.take(float_buffers(self._strategy.lightning_module))

    # ---- what others see --------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Let every replica hold the means, and keep what it has of its own aside. A collective."""
        fits = self._strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if not fits or self._is_alike or self._aside is not None or self._means.group is None:
            return
        own = self._own()
        self._aside = {name: tensor.clone() for name, tensor in own.items()}
        self._means.take(own)
        self._publish_all()

    def take_back(self) -> None:
        """Let this replica go on from its own."""
        if self._aside is None:
            return
        aside, self._aside = self._aside, None
        for name, tensor in self._own().items():
            tensor.copy_(aside[name])
        self._publish_all()

    def conclude(self) -> None:
        """Show the means over the replicas for good; what each has of its own is kept until the last state is saved."""
        self.show()

    def end(self) -> None:
        """Keep the means."""
        self.show()  # under Lightning's own Trainer
        self._aside = None
        self._is_alike = True

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def content(self, checkpoint: Mapping[str, Any], complete: bool, make: Callable[..., Content]) -> Content:
        """See the base class: means under the names of parameters, and what each rank has of its own beside them."""
        with_own = OPTIMIZERS in checkpoint
        if complete:
            self.take_back()
            content = make(checkpoint, complete=True)
            own = self._remembered()
        else:
            content = make(self.averaged(checkpoint))
            own = {**self._of_this_rank(), **self._remembered()} if with_own else {}
        if not with_own:
            return content
        tensors = {**content.tensors, **self._common_boxes(), **inner_boxes(self._strategy.global_rank, own)}
        content.tree[OF_RUN][_OWN] = {"strategy": self._strategy.strategy_name, **self._told()}
        content.tree[OF_RUN]["left_behind"] = {"of": _OWN, "text": self._left_behind()}
        return Content(content.tree, tensors, content.about)

    def averaged(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint of the means over the replicas. A collective."""
        own = self._own()
        means = self._means.of(own) if self._aside is None and not self._is_alike else own
        canonical = self._canonical_names()
        averaged = with_means(checkpoint, means, self._optimized(), canonical)
        return with_mean_states(averaged, self._strategy.optimizers, self._strategy._name_of(), self._means)

    def _canonical_names(self) -> dict[str, str]:
        module = self._strategy.lightning_module
        first = {id(p): name for name, p in module.named_parameters()}
        return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}

    def _of_this_rank(self) -> dict[str, Tensor]:
        """What a file must hold of this rank beside the means."""
        own = self._own() if self._aside is None else self._aside
        buffers = self._buffer_names()
        weights = {f"{_BUFFER if name in buffers else _WEIGHT}{name}": tensor for name, tensor in own.items()}
        states = optimizer_tensors(self._strategy.optimizers, self._strategy._name_of())
        return {**weights, **{f"{_OPTIMIZER}{key}": value for key, value in states.items()}, **self._scale()}

    def _buffer_names(self) -> set[str]:
        return set(float_buffers(self._strategy.lightning_module))

    def _scale(self) -> dict[str, Tensor]:
        scaler = self._scaler()
        state = {} if scaler is None else scaler.state_dict()
        if not state:
            return {}
        return {_SCALER: torch.tensor([state["scale"], float(state["_growth_tracker"])], dtype=torch.float64)}

    def _remembered(self) -> dict[str, Tensor]:
        """What this rank remembers of synchronisations alone."""
        return {}

    def _common_boxes(self) -> dict[str, TensorParts]:
        """What all replicas have in common besides."""
        return {}

    def _told(self) -> dict[str, Any]:
        """Plain values that a run that goes on must know."""
        return {}

    @abstractmethod
    def _left_behind(self) -> str:
        """What is lost of a state under another strategy, as a sentence."""

    def own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """See the base class; those with a mean are among what each rank has of its own."""
        floats = {f"{_BUFFER}{name}" for name in self._buffer_names()}
        return {key: value for key, value in buffers.items() if key not in floats}

    def knows(self, of: str) -> bool:
        """See the base class."""
        return of == _OWN

    def opened(self, state: RunState | SnapshotReader) -> None:
        """See the base class."""
        self._source = state if self._strategy.state.is_fitting() else None

    def restore(self) -> None:
        """See the base class."""
        source, self._source = self._source, None
        self._aside, self._is_alike = None, False
        self._begin_anew()
        if source is None:
            return
        of_run = source.tree.get(OF_RUN, {})
        told = of_run.get(_OWN)
        if told is None:
            return
        lost = self._restore_common(source, told)
        lost += self._restore_own(source, Layout(**of_run["layout"]))
        if isinstance(source, SnapshotReader):
            if source.about.get(TRANSFERRED):
                self._begin_from_common()
        elif lost:
            rank_zero_warn(f"{source.path} was written with strategy={told['strategy']}: {'; '.join(lost)}.")
        self._publish_all()

    def _begin_anew(self) -> None:
        """Forget what was remembered of synchronisations; the weights that are loaded are those of all replicas."""

    def _restore_common(self, source: RunState | SnapshotReader, told: Mapping[str, Any]) -> list[str]:
        """Read what all replicas have in common; what of it is not taken, in words."""
        return ["the state of its outer optimizer is left out"] if told.get("has_outer") else []

    def _begin_from_common(self) -> None:
        """The state is that of another replica, which goes on from it: begin apart from it, where that is possible."""

    def _restore_own(self, source: RunState | SnapshotReader, saved: Layout) -> list[str]:
        """Read what this rank had of its own; what of it is not taken, in words."""
        if isinstance(source, SnapshotReader):
            if not source.about.get(TRANSFERRED):
                read_inner(source, inner_keys(source, None), self._remembered())
            return []
        strategy = self._strategy
        if saved != strategy.layout:
            return [
                f"its layout was {saved}, not {strategy.layout}, so all replicas go on from the mean of their weights "
                "and of their optimizer states"
            ]
        keys = inner_keys(source, strategy.global_rank)
        states = {f"{_OPTIMIZER}{k}": v for k, v in optimizer_tensors(strategy.optimizers, strategy._name_of()).items()}
        buffers = self._buffer_names()
        own = {f"{_BUFFER if name in buffers else _WEIGHT}{name}": t for name, t in self._own().items()}
        scale = self._scale()
        read_inner(source, keys, {**own, **states, **scale, **self._remembered()})
        scaler = self._scaler()
        if scaler is not None and scale:
            value, growth = scale[_SCALER].tolist()
            scaler.load_state_dict({**scaler.state_dict(), "scale": value, "_growth_tracker": int(growth)})
        return []


def keep_apart(strategy: HybridStrategy, replicas: LocalReplicas) -> None:
    """Have a strategy hold ``replicas``."""
    strategy.replicas = replicas
    strategy._parts.append(replicas)
    strategy._ranks_agree = False


def _any_of(group: dist.ProcessGroup | None, flag: Tensor) -> Tensor:
    """Whether a flag is set on any rank of ``group``; ``None``: there is no other rank."""
    if group is not None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag
