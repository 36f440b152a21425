"""Base class of all strategies, and its interface for the Trainer and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.read.run_state import RunState, holds_run_state
from trainwright.checkpoint.store.storage import Folder, remove
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse, refuse_unknown_arguments
from trainwright.core.config.references import python_values
from trainwright.core.layout import Layout
from trainwright.core.processes.rendezvous import rendezvous
from trainwright.core.run.peers import Peers, Service
from trainwright.core.run.traits import Traits
from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.base.certificate.certificate import Certificate
from trainwright.strategies.base.certificate.certified import Certified
from trainwright.strategies.base.data_peers import DataPeers
from trainwright.strategies.base.deprecated_names import read_deprecated_name, refuse_deprecated_names
from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.notebook import fork_in_notebook, weights_of_ended_ranks
from trainwright.strategies.base.whole.view import end_view
from trainwright.strategies.contract import same_model
from trainwright.strategies.contract.collectives.data import forget_groups, gather_stacked
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.gradients import squares_by_block
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.contract.part import Part, Replicas
from trainwright.strategies.contract.precision import FullPrecision, adapt_precision
from trainwright.strategies.plan.blocks import Blocks, count_parameters
from trainwright.strategies.plan.deferred import Piece, deferred_pieces, fill, is_deferred
from trainwright.strategies.state.assemble import Assembly, StateOwners
from trainwright.strategies.state.checkpointing import RunStates
from trainwright.strategies.state.loading import patch_lightning
from trainwright.strategies.state.placement import Placement, trained_boxes
from trainwright.strategies.state.wholes import whole_tensor

patch_lightning()


class LayoutStrategy(Strategy):
    """Mixin, to be listed before one of Lightning's strategies.

    Args:
        init_from: initial weights, see ``RunStates``; ``None``: off.
        **kwargs: options of the strategy, see :attr:`options_class`; others are passed to Lightning's strategy.

    Raises:
        ValueError: if options are invalid.
    """

    strategy_name: str
    saves_one_file = False
    """Default of the option ``one_file``: whether every rank holds the whole state."""
    options_class: ClassVar[type[StrategyOptions]] = StrategyOptions
    """Options of the constructor."""
    passes_to: ClassVar[tuple[type, ...]] = ()
    """Classes that take further arguments of the constructor."""
    options: StrategyOptions
    traits = Traits()
    """Facts about how it trains, valid after setup."""
    peers: Peers
    """The other training ranks."""
    service = Service()
    """The parameter-server ranks."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_deprecated_names(cls)

    def __getattr__(self, name: str) -> Any:
        return read_deprecated_name(self, name)

    def __init__(self, *, init_from: str | Path | None = None, **kwargs: Any) -> None:
        refuse_unknown_arguments(type(self), kwargs, self.options_class, *self.passes_to)
        self.options, others = self.options_class.take(python_values(kwargs))
        refuse((each.replace("strategy.", "") for each in self.options.problems_of_call()), type(self).__name__)
        self._own_io = others.get("checkpoint_io") is not None
        super().__init__(**others)
        self.state = RunStates(self, init_from)
        self.averaging: Averaging = Averaging()
        self.replicas = Replicas()
        self._parts: list[Part] = []
        self._before_batch: list[Callable[[], None]] = []  # called before every batch
        self.ranks, self.peers = Ranks(self), DataPeers(self)
        self.measures = Measures(self)
        self.traits = replace(self.traits, averages_every_step=self.options.averages_every_step)
        self.certificate = Certificate(self.options.certificate)
        self.certified = Certified(self)
        self._blocks = Blocks(self.options)
        self._restores_after_setup: bool | None = None
        self._compares_weights = False  # in the next backward
        self._frozen: list[nn.Parameter] = []
        self.loss_factor = 1.0  # in manual optimization; set by the Trainer if ranks have unequal batches
        # Set by the Trainer if `backward_in_step`; otherwise it divides the loss. None: number of micro-batches.
        self.loss_divisor: float | None = None

    # ---- interface for the Trainer and callbacks --------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes of this run, closed."""
        return Layout(replicate=self.ranks.num_data_ranks)

    def conclude(self) -> None:
        """Synchronize trained weights across ranks. A collective, called after training, before its final hooks."""
        for part in self._parts:
            part.conclude()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unmodified module."""
        return count_parameters(self.lightning_module)

    def trained_boxes(self) -> dict[str, TensorParts]:
        """Return this rank's parameters and optimizer state as boxes of the whole, by key; views, no collective.

        Between two optimizer steps, ranks with the same box under the same key hold the same bytes.
        """
        module, optimizers = self.lightning_module, self.optimizers
        boxes = trained_boxes(module, optimizers, self.placement, self._name_of(), self._state_owners)
        return self.replicas.boxes(boxes)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and averaged gradient (a DTensor if sharded) of each parameter that has one."""
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of all blocks of the module in order, the same on every rank."""
        return self._blocks.names

    def squares_by_block(self, tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return this rank's contribution to the squared L2 norm of each block, and of the rest; no collective.

        The sum over all ranks is that of the whole module; if replicas differ, their mean.

        Args:
            tensors: parameters, or their averaged gradients, of this rank, by name.

        Returns:
            float64 (``widest``) of shape ``(blocks + 1,)``, the rest last, on this rank's device.
        """
        return squares_by_block(tensors, self.block_names, self._parts_of, self.root_device)

    def _parts_of(self, name: str) -> int:
        """Return the number of shards of a parameter, besides its DTensor's mesh; 0: another rank counts it."""
        return 1

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full value, on the CPU, of every parameter of the unmodified module.

        A collective: all ranks iterate to the end. Values are only valid on rank 0.
        """
        for name, parameter in self.lightning_module.named_parameters():
            yield name, self._whole(name, parameter)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full averaged gradient, on the CPU, of every parameter that has one.

        A collective like :meth:`whole_parameters`. Valid between backward and the next ``zero_grad``.
        """
        for name, gradient in self.named_gradients():
            yield name, self._whole(name, gradient)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a tensor that is sharded like the parameter ``name``, on the CPU."""
        return whole_tensor(tensor)

    def _optimized_parameters(self) -> Iterable[Tensor]:
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    # ---- Lightning's interface --------------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank: plain values, arrays, tensors and dataclasses of these.

        Raises:
            CheckpointError: on every rank, for other objects, whose pickles could execute code.
        """
        return broadcast_value(obj, src, device=self.root_device) if dist.is_initialized() else obj

    if TYPE_CHECKING:

        @property
        def lightning_module(self) -> LightningModule:
            """The user's module, after :meth:`connect`."""
    else:  # like Lightning's, which is read ten times a step, but faster
        lightning_module = property(attrgetter("_lightning_module"))

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin; Lightning's are replaced by versions for sharded gradients."""
        return self._precision_plugin or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = adapt_precision(plugin)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``."""
        module = self.lightning_module
        if module is not None and self.model is module and type(self._precision_plugin) is FullPrecision:
            return module.training_step(*args, **kwargs)  # skips contexts without effect
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward of one micro-batch, scaled by ``loss_factor``; ``on_after_backward`` sees averaged gradients."""
        if self.loss_factor != 1:
            closure_loss = closure_loss * self.loss_factor
        plugin, module = self.precision_plugin, self.lightning_module
        if self.certificate.is_on:
            self.certificate.patterns.see(closure_loss)
        if self._compares_weights:
            self._compares_weights = False
            same_model.refuse_varying_weights(self)
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.averaging.runs:
            self._complete_gradients()
            self.averaging.average()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _complete_gradients(self) -> None:
        """Move this replica's gradients to where the optimizer reads them, before averaging."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather tensors of ``group``, by default of all data ranks, stacked: ``(ranks, *tensor.shape)``.

        Raises:
            ValueError: on every rank, if shapes or dtypes differ between the ranks.
        """
        if getattr(self, "world_size", 1) == 1:
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[safe-super]
        is_even = getattr(self.lightning_module.trainer, "reads_evenly", False)
        return gather_stacked(tensor, group, sync_grads, is_even)

    def connect(self, model: LightningModule) -> None:
        """Set the module of a new run, with this rank's shards in place."""
        end_view(model)
        forget_groups(model)
        super().connect(model)
        self._restores_after_setup = None
        self.state.resumed_certificate = "", ()

    def setup_environment(self) -> None:
        """Create the process group.

        Raises:
            RuntimeError: if another program uses the port.
        """
        with rendezvous(getattr(self, "cluster_environment", None), getattr(self, "num_nodes", 1)):
            super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True if weights can be loaded only after setup."""
        # Cached: Lightning reads it before and after setup, which changes the result.
        if self._restores_after_setup is None:
            self._restores_after_setup = self._must_restore_after_setup()
        return self._restores_after_setup

    def _must_restore_after_setup(self) -> bool:
        return is_deferred(self.lightning_module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare a step: make a due certificate and include newly unfrozen parameters."""
        # Without super(): Lightning's does nothing.
        if self.certificate.is_on:
            self.certificate.before(self, batch, batch_idx)
        if batch_idx == 0 or self._frozen:
            unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
            if self._any_unfrozen(bool(unfrozen), batch_idx):
                self._record_frozen()
                self._include(unfrozen)
        for prepare in self._before_batch:
            prepare()

    def on_train_start(self) -> None:
        """Start training from the loaded state."""
        super().on_train_start()
        self._compares_weights = self.traits.steps_are_collective and not self.replicas.are_independent
        self.state.begin()
        for part in self._parts:
            part.start()

    def on_train_end(self) -> None:
        """End training."""
        super().on_train_end()
        self.peers.share()
        for part in self._parts:
            part.end()

    def _stop_parts(self) -> None:
        for part in self._parts:
            part.stop()

    def _weights_changed(self) -> None:
        for part in self._parts:
            part.weights_changed()

    def _any_unfrozen(self, on_this_rank: bool, batch_idx: int) -> bool:
        """Return whether parameters were unfrozen on any rank; here all ranks hold the same ones."""
        return on_this_rank

    def _record_frozen(self) -> None:
        """Record frozen parameters, at the end of setup, for strategies that depend on ``requires_grad``."""
        self._frozen = [parameter for parameter in self.lightning_module.parameters() if not parameter.requires_grad]

    def _include(self, unfrozen: Sequence[nn.Parameter]) -> None:
        """Average gradients of parameters that were frozen during setup, the same on all ranks."""

    # ---- checkpoints: run states, or ordinary ones with a custom CheckpointIO ---------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's checkpoint plugin, or Lightning's default, which then only removes files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._own_io = io is not None
        self._checkpoint_io = io

    @property
    def writes_run_states(self) -> bool:
        """True if ``save_checkpoint`` writes run states; not with a custom CheckpointIO."""
        return not self._own_io

    @property
    def placement(self) -> Placement:
        """Locations of the module's shards on the ranks of this layout."""
        return Placement(Assembly.of_whole(), self.is_global_zero, leads_stage=self.is_global_zero)

    @property
    def _state_owners(self) -> StateOwners | None:
        """Parameters whose whole optimizer state is on one rank; ``None``: state is sharded like parameters."""
        return None

    def _name_of(self) -> Callable[[Tensor], str]:
        """Return a function from an optimizer's parameter to its name."""
        names = {id(self._as_optimized(p)): name for name, p in self.lightning_module.named_parameters()}
        # An optimizer may hold tensors that are not in the module, in the same order on every rank.
        return lambda tensor: names.setdefault(id(tensor), f"unnamed/{len(names)}")

    def _as_optimized(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that represents a parameter in the optimizer."""
        return parameter

    def _whole_keys(self) -> list[str]:
        """Return the keys of the whole module's ``state_dict``."""
        return list(self.lightning_module.state_dict())

    @property
    def _rank(self) -> int:
        return int(getattr(self, "global_rank", 0))

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = fork_in_notebook(self, self._launcher)

    def teardown(self) -> None:
        """Release resources of this run."""
        self.state.forget()
        super().teardown()

    def run_state(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """See :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`."""
        return self.replicas.content(checkpoint, complete, self.state.content)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the run state to ``filepath``, a folder or (option ``one_file``) a file. A collective.

        Raises:
            CheckpointError: on every rank, if one failed; an existing checkpoint stays intact.
        """
        if (weights := weights_of_ended_ranks(self, checkpoint)) is not None:
            super().save_checkpoint(weights, filepath, storage_options)
        elif self._own_io:
            self._save_plain(self.replicas.averaged(checkpoint), filepath, storage_options)
        else:
            self.state.save(self.run_state(checkpoint), filepath, storage_options)

    def _save_plain(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write a whole ordinary checkpoint on rank 0, through the user's plugin."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint atomically."""
        if not self.is_global_zero:
            return
        if holds_run_state(str(filepath)) and not Folder(str(filepath)).is_file():
            remove(str(filepath))
        else:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a run state, or read an ordinary checkpoint file.

        Ranks share the verification of a run state's files against its manifest. Weights and optimizer states are read
        later, by shard, unless ``on_load_checkpoint`` is overridden, which may read them.

        Args:
            checkpoint_path: folder or file, or this rank's :class:`~trainwright.checkpoint.memory.snapshots.Snapshot`.
            weights_only: of a file; only ``False`` allows it to execute code.

        Raises:
            CheckpointError: on every rank, if it is invalid.
        """
        if isinstance(checkpoint_path, Snapshot):
            return self._opened(self._open_held(checkpoint_path))
        path = str(checkpoint_path)
        if not self.state.any_rank(holds_run_state(path)):
            if self._own_io:
                return super().load_checkpoint(checkpoint_path, weights_only)
            return load_pickled(path, trust=weights_only is False)
        return self._opened(self.state.open(path), weights_only is False)

    def _opened(self, state: RunState | SnapshotReader, trust: bool = False) -> dict[str, Any]:
        self.replicas.opened(state)
        return self.state.opened(state, trust)

    def _open_held(self, held: Snapshot) -> SnapshotReader:
        return self.state.open_held(held)

    def _knows_left_behind(self, of: str) -> bool:
        """Return whether this strategy can load the extra state of strategies of kind ``of``."""
        return self.replicas.knows(of)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, by name, into this rank's shards.

        Raises:
            CheckpointError: if names or shapes differ and ``strict`` is set.
        """
        self.state.load_model(checkpoint, strict, super().load_model_state_dict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the saved state into every optimizer.

        Raises:
            CheckpointError: if the saved optimizers differ in number, kind, groups or parameters.
        """
        self.state.load_optimizers(checkpoint)
        self.replicas.restore()

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load an ordinary file: whole tensors, parameters by position."""
        super().load_optimizer_state_dict(checkpoint)

    # ---- steps of setup ---------------------------------------------------------------------------------------------

    def _refuse_different_models(self) -> None:
        """Compare modules across ranks before sharding. A collective."""
        if getattr(self.lightning_module, "_trainwright_layout", None) is None:
            same_model.refuse_different_models(self.lightning_module, self.root_device)
        if self.ranks.num_data_ranks > 1 and not self.replicas.are_independent:
            same_model.refuse_rescaled_rows(self.lightning_module)

    def _find_blocks(self) -> dict[str, nn.Module]:
        return self._blocks.find(self.lightning_module)

    def _materialise(self) -> None:
        """Allocate and initialize a model built on the meta device."""
        if is_deferred(self.lightning_module):
            self._fill(deferred_pieces(self.lightning_module), self._agreed_seed(), {})

    def _fill(self, pieces: Iterable[Piece], seed: int, real: dict[Tensor, Tensor]) -> None:
        """Replace the meta tensors of ``pieces`` by real ones, recorded in ``real`` to preserve ties."""
        fill(pieces, seed, real, self._real)

    def _real(self, owner: nn.Module, name: str, meta: Tensor, value: Tensor) -> Tensor:
        """Return this rank's part of the tensor ``name`` of ``owner``, given its whole initial value."""
        tensor = value.to(device=self.root_device, dtype=meta.dtype)
        return nn.Parameter(tensor, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor

    def _agreed_seed(self) -> int:
        return int(self.broadcast(torch.initial_seed()))
