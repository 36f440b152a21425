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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.handing_over import HANDED_OVER
from trainwright.checkpoint.memory.held import HeldSource
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.strategies.base.strategy import HeldBytes
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.contract.same_model import varying_buffers
from trainwright.strategies.local_updates.mean import ReplicaMean
from trainwright.strategies.local_updates.options import (
    MANUAL_OPTIMIZATION,
    SYNC_BATCHNORM,
    LocalUpdateOptions,
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


class LocalUpdateStrategy(HybridStrategy):
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
        **kwargs: options, see :class:`~trainwright.strategies.local_updates.options.LocalUpdateOptions`; with
            ``warmup_steps`` gradients are averaged at the beginning as in DDP (post-local SGD, arXiv:1808.07217).

    Raises:
        ValueError: if the options contradict each other.
    """

    options: LocalUpdateOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._schedule = UpdateSchedule(self.options.sync_every, warmup_steps=self.options.warmup_steps)
        self._mean: ReplicaMean | None = None
        self._is_alike = True
        self._aside: dict[str, Tensor] | None = None
        self._source: RunState | HeldSource | None = None

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def averages_every_step(self) -> bool:
        """Replicas step by themselves."""
        return False

    @property
    def forward_is_collective(self) -> bool:
        """Only ranks of one replica need each other."""
        return self.is_cut or (self.stage == 3 and self.layout.state_ranks > 1)

    def held_bytes(self) -> HeldBytes:
        """Bytes that this rank holds now; what the outer optimizer holds counts as an optimizer's."""
        held = super().held_bytes()
        return HeldBytes(held.parameters, held.gradients, held.optimizer + self._outer_bytes())

    def _outer_bytes(self) -> int:
        return 0

    def trained_boxes(self) -> dict[str, TensorParts]:
        """As of any strategy; keys tell the replica, for only its ranks hold the same between two synchronisations."""
        place = self.layout.coordinates(self.global_rank)["replicate"]
        return {f"{key} [replica {place}]": boxes for key, boxes in super().trained_boxes().items()}

    # ---- setup ----------------------------------------------------------------------------------------------------

    _ranks_agree = False

    def _mesh_over(self, groups: LayoutGroups, *axes: str) -> DeviceMesh:
        return groups.mesh(axes)  # the ranks of one replica

    @property
    def _splits_parameters(self) -> bool:
        return super()._splits_parameters and self.mesh.size() > 1

    def _is_trained_alone(self, parameter: nn.Parameter) -> bool:
        return self._mesh_of(parameter).size() == 1

    def setup(self, trainer: Trainer) -> None:
        """Set up each replica, and what brings them together."""
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_beside(module, trainer)
        self._let_go()
        super().setup(trainer)
        assert self._groups is not None
        self._mean = ReplicaMean(self._groups.along("replicate"), self.root_device, self._alike, self._bucket_bytes)
        varying = varying_buffers(module)
        if varying and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(
                f"Statistics such as {varying[0]} differ from replica to replica while training; they are averaged "
                "whenever replicas are synchronised, for a validation, for a save and at the end."
            )

    def _refuse_beside(self, module: LightningModule, trainer: Trainer) -> None:
        """Refuse what cannot work while replicas differ."""
        problems = [] if module.automatic_optimization else [f"{type(module).__name__}: {MANUAL_OPTIMIZATION}"]
        problems += [SYNC_BATCHNORM] if self._layer_sync else []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                problems.append(averaging_callback_problem(type(callback).__name__))
        refuse(problems)

    def _alike(self, name: str) -> str:
        """See :data:`~trainwright.strategies.local_updates.mean.Alike`."""
        parameter = self._named.get(name)
        # Every rank of the shard axis holds a scalar, beside other rows of the rest.
        return self._kin_of(name) + (" scalar" if parameter is not None and parameter.dim() == 0 else "")

    def setup_precision_plugin(self) -> None:
        """Let a replica decide by itself whether its step has overflown."""
        super().setup_precision_plugin()
        scaler = self._scaler()
        if isinstance(scaler, AgreedGradScaler):
            assert self._groups is not None
            group = self._groups.along("pipeline", "shard", "context", "tensor")
            scaler.agree = partial(_any_of, group)

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.precision_plugin, "scaler", None)

    def _let_go(self) -> None:
        self._mean, self._aside = None, None
        self._is_alike = True

    def teardown(self) -> None:
        """Let go of what brought replicas together; each keeps the weights that it shows."""
        self._let_go()
        self._source = None
        super().teardown()

    # ---- what replicas have of their own ----------------------------------------------------------------------------

    def _optimized(self) -> dict[str, Tensor]:
        """What optimizers hold in place of the parameters that they step, by name."""
        stepped = {id(parameter) for parameter in self._optimized_parameters()}
        found = {name: self._as_optimized(p) for name, p in self._named.items() if p.requires_grad}
        return {name: held for name, held in found.items() if id(held) in stepped}

    def _trained_parts(self) -> dict[str, Tensor]:
        """This rank's part of each of these; changed in place, they have to be published."""
        return {name: local_tensor(held).detach() for name, held in self._optimized().items()}

    def _own(self) -> dict[str, Tensor]:
        """Parts of parameters, and float buffers, by name."""
        return {**self._trained_parts(), **float_buffers(self.lightning_module)}

    def _publish_all(self) -> None:
        for optimizer in self.optimizers:
            self._publish(optimizer)

    @property
    def _means(self) -> ReplicaMean:
        assert self._mean is not None
        return self._mean

    # ---- the step -------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Begin from what is loaded by now."""
        super().on_train_start()
        self._begin()

    def _begin(self) -> None:
        """Take the parameters as they are for those that all replicas have in common, if there is need of such."""

    def _sum_shared_gradients(self) -> None:
        super()._sum_shared_gradients()
        if self._warms_up and not self._accumulates_gradients:
            self._average_over_replicas()

    @property
    def _warms_up(self) -> bool:
        """Whether this is a step with averaged gradients."""
        return int(self.lightning_module.trainer.global_step) < self._schedule.warmup_steps

    def _average_over_replicas(self) -> None:
        if self._means.group is None:
            return
        held = self._optimized()
        flags = torch.tensor([float(each.grad is not None) for each in held.values()], device=self.root_device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._means.group)
        gradients = {}
        for (name, each), flag in zip(held.items(), flags.tolist(), strict=True):
            if flag and each.grad is None:
                each.grad = torch.zeros_like(each)  # another replica has one
            if flag:
                gradients[name] = local_tensor(each.grad)  # type: ignore[arg-type]
        self._means.take(gradients)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step this replica, and bring replicas together where it is time."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._is_alike = False
        # Not counted yet; one that a callback drops never comes here and is not counted either.
        self._stepped(int(self.lightning_module.trainer.global_step) + 1)
        return output

    @abstractmethod
    def _stepped(self, step: int) -> None:
        """Do what is due when ``step`` optimizer steps are done. A collective of all ranks."""

    def _average_buffers(self) -> None:
        self._means.take(float_buffers(self.lightning_module))

    # ---- what others see --------------------------------------------------------------------------------------------

    def _show_means(self) -> None:
        """Let every replica hold the means, and keep what it has of its own aside. A collective."""
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if not fits or self._is_alike or self._aside is not None or self._means.group is None:
            return
        own = self._own()
        self._aside = {name: tensor.clone() for name, tensor in own.items()}
        self._means.take(own)
        self._publish_all()

    def _take_back(self) -> None:
        """Let this replica go on from its own."""
        if self._aside is None:
            return
        aside, self._aside = self._aside, None
        for name, tensor in self._own().items():
            tensor.copy_(aside[name])
        self._publish_all()

    def on_validation_start(self) -> None:
        """Show the means over the replicas."""
        super().on_validation_start()
        self._show_means()

    def on_validation_end(self) -> None:
        """Go on from each replica's own."""
        self._take_back()
        super().on_validation_end()

    def conclude(self) -> None:
        """Show the means over the replicas for good; what each has of its own is kept until the last state is saved."""
        self._show_means()

    def on_train_end(self) -> None:
        """Keep the means."""
        self._show_means()  # under Lightning's own Trainer
        self._aside = None
        self._is_alike = True
        super().on_train_end()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def run_state(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """As of any strategy: means under the names of parameters, and what each rank has of its own beside them.

        Args:
            checkpoint: Lightning's dict of the run.
            complete: the weights are this rank's own instead; see
                :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`.
        """
        with_own = OPTIMIZERS in checkpoint
        if complete:
            self._take_back()
            content = super().run_state(checkpoint, complete=True)
            own = self._remembered()
        else:
            content = super().run_state(self._averaged(checkpoint))
            own = {**self._of_this_rank(), **self._remembered()} if with_own else {}
        if not with_own:
            return content
        tensors = {**content.tensors, **self._common_boxes(), **inner_boxes(self._rank, own)}
        content.tree[OF_RUN][_OWN] = {"strategy": self.strategy_name, **self._told()}
        content.tree[OF_RUN]["left_behind"] = {"of": _OWN, "text": self._left_behind()}
        return Content(content.tree, tensors, content.about)

    def _averaged(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint of the means over the replicas. A collective."""
        own = self._own()
        means = self._means.of(own) if self._aside is None and not self._is_alike else own
        canonical = self._canonical_names()
        averaged = with_means(checkpoint, means, self._optimized(), canonical)
        return with_mean_states(averaged, self.optimizers, self._name_of(), self._means)

    def _canonical_names(self) -> dict[str, str]:
        first = {id(p): name for name, p in self.lightning_module.named_parameters()}
        return {name: first[id(p)] for name, p in self.lightning_module.named_parameters(remove_duplicate=False)}

    def _of_this_rank(self) -> dict[str, Tensor]:
        """What a file must hold of this rank beside the means."""
        own = self._own() if self._aside is None else self._aside
        buffers = self._buffer_names()
        weights = {f"{_BUFFER if name in buffers else _WEIGHT}{name}": tensor for name, tensor in own.items()}
        states = optimizer_tensors(self.optimizers, self._name_of())
        return {**weights, **{f"{_OPTIMIZER}{key}": value for key, value in states.items()}, **self._scale()}

    def _buffer_names(self) -> set[str]:
        return set(float_buffers(self.lightning_module))

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

    def _own_buffers(self) -> dict[str, Tensor]:
        # Those with a mean are among what each rank has of its own.
        floats = {f"{_BUFFER}{name}" for name in self._buffer_names()}
        return {key: value for key, value in super()._own_buffers().items() if key not in floats}

    def _save_plain(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Let the user's plugin write the means."""
        super()._save_plain(self._averaged(checkpoint), filepath, storage_options)

    def _knows_left_behind(self, of: str) -> bool:
        return of == _OWN

    def _opened(self, state: RunState | HeldSource) -> dict[str, Any]:
        self._source = state if self.state.is_fitting() else None
        return super()._opened(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states, then what this rank had of its own.

        Raises:
            CheckpointError: if the saved optimizers were other ones, or had other groups or parameters.
        """
        super().load_optimizer_state_dict(checkpoint)
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
        if isinstance(source, HeldSource):
            if source.about.get(HANDED_OVER):
                self._begin_from_common()
        elif lost:
            rank_zero_warn(f"{source.path} was written with strategy={told['strategy']}: {'; '.join(lost)}.")
        self._publish_all()

    def _begin_anew(self) -> None:
        """Forget what was remembered of synchronisations; the weights that are loaded are those of all replicas."""

    def _restore_common(self, source: RunState | HeldSource, told: Mapping[str, Any]) -> list[str]:
        """Read what all replicas have in common; what of it is not taken, in words."""
        return ["the state of its outer optimizer is left out"] if told.get("has_outer") else []

    def _begin_from_common(self) -> None:
        """The state is that of another replica, which goes on from it: begin apart from it, where that is possible."""

    def _restore_own(self, source: RunState | HeldSource, saved: Layout) -> list[str]:
        """Read what this rank had of its own; what of it is not taken, in words."""
        if isinstance(source, HeldSource):
            if not source.about.get(HANDED_OVER):
                read_inner(source, inner_keys(source, None), self._remembered())
            return []
        if saved != self.layout:
            return [
                f"its layout was {saved}, not {self.layout}, so all replicas go on from the mean of their weights and "
                "of their optimizer states"
            ]
        keys = inner_keys(source, self._rank)
        states = {f"{_OPTIMIZER}{k}": v for k, v in optimizer_tensors(self.optimizers, self._name_of()).items()}
        buffers = self._buffer_names()
        own = {f"{_BUFFER if name in buffers else _WEIGHT}{name}": t for name, t in self._own().items()}
        scale = self._scale()
        read_inner(source, keys, {**own, **states, **scale, **self._remembered()})
        scaler = self._scaler()
        if scaler is not None and scale:
            value, growth = scale[_SCALER].tolist()
            scaler.load_state_dict({**scaler.state_dict(), "scale": value, "_growth_tracker": int(growth)})
        return []


def _any_of(group: dist.ProcessGroup | None, flag: Tensor) -> Tensor:
    """Whether a flag is set on any rank of ``group``; ``None``: there is no other rank."""
    if group is not None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag
