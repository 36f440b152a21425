"""What every strategy of this project shares, and what the Trainer and callbacks may read of it."""

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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import from_rank
from trainwright.checkpoint.foreign.ordinary import load_ordinary
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.held import HeldSource, HeldState
from trainwright.checkpoint.read.run_state import RunState, holds_run_state
from trainwright.checkpoint.store.storage import Folder, remove
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.core.run.peers import Peers, Service
from trainwright.core.run.traits import Traits
from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.base.blocks import Blocks, fill
from trainwright.strategies.base.certificate.certificate import Certificate
from trainwright.strategies.base.certificate.certified import Certified
from trainwright.strategies.base.former_names import read_former_name, refuse_former_names
from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.meeting import meeting
from trainwright.strategies.base.notebook import fork_in_notebook
from trainwright.strategies.base.whole.view import end_view
from trainwright.strategies.contract.collectives.data import forget_groups, gather_stacked
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.gradients import squares_by_block
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.contract.part import Part, Replicas
from trainwright.strategies.contract.precision import FullPrecision, adapt_precision
from trainwright.strategies.contract.same_model import refuse_other_models
from trainwright.strategies.plan.blocks import count_parameters
from trainwright.strategies.plan.deferred import Piece, deferred_pieces, is_deferred
from trainwright.strategies.state.assemble import Assembly, StateOwners
from trainwright.strategies.state.checkpointing import RunStates
from trainwright.strategies.state.loading import teach_lightning
from trainwright.strategies.state.placement import Placement, trained_boxes
from trainwright.strategies.state.wholes import whole_tensor

# Before anybody can have written a run state with a strategy.
teach_lightning()


class LayoutStrategy(Strategy):
    """Mixin before one of Lightning's strategies.

    Args:
        init_from: weights to begin from, see ``RunStates``; ``None`` is off.
        **kwargs: options of the strategy, see its :attr:`options_class`; the others are for Lightning's strategy.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name: str
    saves_one_file = False
    """Whether ``save_checkpoint`` writes a file that ``torch.load`` reads; ``run_state`` is the same either way."""

    options_class: ClassVar[type[StrategyOptions]] = StrategyOptions
    """The options that the constructor takes."""
    options: StrategyOptions
    traits = Traits()
    """Facts about how it trains, known once it is set up."""
    peers = Peers()
    """The ranks that train beside this one."""
    service = Service()
    """The ranks that only serve."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former_names(cls)

    def __getattr__(self, name: str) -> Any:
        return read_former_name(self, name)

    def __init__(self, *, init_from: str | Path | None = None, **kwargs: Any) -> None:
        self.options, others = self.options_class.take(kwargs)
        refuse(self.options.problems_of_call())
        self._own_io = others.get("checkpoint_io") is not None
        super().__init__(**others)
        self.state = RunStates(self, init_from)
        self.averaging: Averaging = Averaging()
        self.replicas = Replicas()
        self._parts: list[Part] = []
        self._before_batch: list[Callable[[], None]] = []  # called before every batch
        self.ranks = Ranks(self)
        self.measures = Measures(self)
        self.traits = replace(self.traits, averages_every_step=self.options.averages_every_step)
        self.certificate = Certificate(self.options.certificate)
        self.certified = Certified(self)
        self._blocks = Blocks(self.options)
        self._restores_late: bool | None = None
        self._frozen: list[nn.Parameter] = []
        self.loss_factor = 1.0  # in manual optimization; the Trainer sets it where ranks have unequal batches
        # Set by the Trainer where `backward_in_step`, else it divides the loss itself. None: accumulated micro-batches.
        self.loss_divisor: float | None = None

    # ---- what others may read ---------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes of this run, closed."""
        return Layout(replicate=self.ranks.num_data_ranks)

    def conclude(self) -> None:
        """Let every rank hold the trained weights, where ranks have trained by themselves; a collective.

        The Trainer calls it when training has ended, before the hooks that tell so.
        """
        for part in self._parts:
            part.conclude()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unmodified module."""
        return count_parameters(self.lightning_module)

    def trained_boxes(self) -> dict[str, TensorParts]:
        """What this rank holds of parameters and optimizer states, as boxes of the whole by key; views, no collective.

        Ranks that hold the same box under the same key must have the same bytes in it, between two optimizer steps.
        """
        module, optimizers = self.lightning_module, self.optimizers
        boxes = trained_boxes(module, optimizers, self.placement, self._name_of(), self._state_owners)
        return self.replicas.boxes(boxes)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and averaged gradient (a DTensor if sharded) of each parameter that has one, until ``zero_grad``."""
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the module's blocks in order, those that other ranks hold among them; the same on every rank."""
        return self._blocks.names

    def squares_by_block(self, tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return this rank's part of the squared L2 norm of each block, and of the rest; no collective.

        Added up over all ranks, it is the norm of the whole module. Where replicas differ, it is the mean of theirs.

        Args:
            tensors: names of parameters and, for each, it or its averaged gradient, as this rank holds it.

        Returns:
            float64 (``widest``) of shape ``(blocks + 1,)``, the rest last, on this rank's device.
        """
        return squares_by_block(tensors, self.block_names, self._parts_of, self.root_device)

    def _parts_of(self, name: str) -> int:
        """Over how many ranks a parameter is spread, besides the mesh of its DTensor; 0: another rank counts it."""
        return 1

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value on the CPU of every parameter of the unmodified module.

        A collective: all ranks iterate to the end. What other ranks than the first get is unspecified.
        """
        for name, parameter in self.lightning_module.named_parameters():
            yield name, self._whole(name, parameter)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole averaged gradient on the CPU of every parameter that has one.

        A collective, as :meth:`whole_parameters`. Valid between backward and the next ``zero_grad``.
        """
        for name, gradient in self.named_gradients():
            yield name, self._whole(name, gradient)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of what this rank holds a part of, under the name of a parameter; on the CPU."""
        tensor = tensor.detach()
        return whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor.to("cpu", copy=True)

    def _optimized_parameters(self) -> Iterable[Tensor]:
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    # ---- what Lightning calls ---------------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the rank ``src`` on every rank; plain values, arrays, tensors and records of these.

        Raises:
            CheckpointError: on every rank, if it is something else: a pickle could run code on the ranks that read it.
        """
        return from_rank(obj, src, device=self.root_device) if dist.is_initialized() else obj

    if TYPE_CHECKING:

        @property
        def lightning_module(self) -> LightningModule:
            """The user's module, once the run has begun (:meth:`connect`)."""
    else:  # Lightning's own, read ten times a step, without a frame of Python for each
        lightning_module = property(attrgetter("_lightning_module"))

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin; Lightning's own are exchanged for those that know of sharded gradients."""
        return super().precision_plugin if self._precision_plugin is None else self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = adapt_precision(plugin)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``."""
        module = self.lightning_module
        if module is not None and self.model is module and type(self._precision_plugin) is FullPrecision:
            return module.training_step(*args, **kwargs)  # without the contexts that would do nothing
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch, weighted by ``loss_factor``; ``on_after_backward`` sees averaged gradients."""
        if self.loss_factor != 1:
            closure_loss = closure_loss * self.loss_factor
        plugin, module = self.precision_plugin, self.lightning_module
        # As Lightning's, with the average in between.
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
        """Let gradients of this replica be where the optimizer sees them, before replicas are averaged."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks of ``group``, or of all data ranks, stacked: ``(ranks, *tensor.shape)``.

        Raises:
            ValueError: on every rank, if shapes or dtypes differ between the ranks.
        """
        if getattr(self, "world_size", 1) == 1:
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[safe-super]
        is_even = getattr(self.lightning_module.trainer, "reads_evenly", False)
        return gather_stacked(tensor, group, sync_grads, is_even)

    def connect(self, model: LightningModule) -> None:
        """Take the module of the run that begins, with this rank's parts in place."""
        end_view(model)
        forget_groups(model)
        super().connect(model)
        self._restores_late = None
        self.state.certified_before = ""

    def setup_environment(self) -> None:
        """Let the processes meet.

        Raises:
            RuntimeError: if the port at which they are to meet is taken by another program.
        """
        with meeting(getattr(self, "cluster_environment", None), getattr(self, "num_nodes", 1)):
            super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights can be loaded only once they have their final place."""
        # Asked once before and once after setup, which itself changes the answer: the first one counts for both.
        if self._restores_late is None:
            self._restores_late = self._must_restore_late()
        return self._restores_late

    def _must_restore_late(self) -> bool:
        return is_deferred(self.lightning_module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step: take up parameters that were frozen until now (a finetuning callback's)."""
        super().on_train_batch_start(batch, batch_idx)
        if self.certificate.is_due:
            self.certificate.make(self, batch, batch_idx)
        if batch_idx == 0 or self._frozen:
            thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
            if self._any_thawed(bool(thawed), batch_idx):
                self._know_frozen()
                self._take_up(thawed)
        for prepare in self._before_batch:
            prepare()

    def on_train_start(self) -> None:
        """Begin from what is loaded by now."""
        super().on_train_start()
        self.state.begin()
        for part in self._parts:
            part.start()

    def on_train_end(self) -> None:
        """Let what the strategy is made of end its work."""
        super().on_train_end()
        for part in self._parts:
            part.end()

    def _stop_parts(self) -> None:
        for part in self._parts:
            part.stop()

    def _weights_changed(self) -> None:
        for part in self._parts:
            part.weights_changed()

    def _any_thawed(self, here: bool, batch_idx: int) -> bool:
        """Whether parameters were thawed on any rank, known from those of this one where all hold the same."""
        return here

    def _know_frozen(self) -> None:
        """Remember what is not trained; at the end of setup, by strategies that look at ``requires_grad`` in it."""
        self._frozen = [parameter for parameter in self.lightning_module.parameters() if not parameter.requires_grad]

    def _take_up(self, thawed: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters too that were frozen when that was set up; all ranks thaw the same."""

    # ---- checkpoints: a run state, or what the user's own CheckpointIO makes of an ordinary one ---------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin for checkpoints, or Lightning's default, which then only removes files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._own_io = io is not None
        self._checkpoint_io = io

    @property
    def writes_run_states(self) -> bool:
        """Whether ``save_checkpoint`` writes run states; not where the user gave a plugin of his own."""
        return not self._own_io

    @property
    def placement(self) -> Placement:
        """How the ranks of this layout hold the module."""
        return Placement(Assembly.of_whole(), self.is_global_zero, leads_stage=self.is_global_zero)

    @property
    def _state_owners(self) -> StateOwners | None:
        """Of which parameters one rank has the whole optimizer state; ``None``: all states lie as parameters do."""
        return None

    def _name_of(self) -> Callable[[Tensor], str]:
        """A function from a parameter, as an optimizer holds it, to its name."""
        names = {id(self._as_optimized(p)): name for name, p in self.lightning_module.named_parameters()}
        # An optimizer may hold tensors that are no parameters of the module; every rank meets them in the same order.
        return lambda tensor: names.setdefault(id(tensor), f"unnamed/{len(names)}")

    def _as_optimized(self, parameter: nn.Parameter) -> Tensor:
        """What an optimizer holds in place of a parameter."""
        return parameter

    def _whole_keys(self) -> list[str]:
        """Keys of the ``state_dict`` of the whole module."""
        return list(self.lightning_module.state_dict())

    @property
    def _rank(self) -> int:
        return int(getattr(self, "global_rank", 0))

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = fork_in_notebook(self, self._launcher)

    def teardown(self) -> None:
        """Let go of what belongs to this run."""
        self.state.forget()
        super().teardown()

    def run_state(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """See :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`."""
        return self.replicas.content(checkpoint, complete, self.state.content)

    def _own_buffers(self) -> dict[str, Tensor]:
        return self.replicas.own_buffers(self.state.own_buffers())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the run state to ``filepath``, a folder or (:attr:`saves_one_file`) a file; all ranks together.

        Raises:
            CheckpointError: on every rank, if one failed; what was there before is untouched.
        """
        if self._own_io:
            self._save_plain(self.replicas.averaged(checkpoint), filepath, storage_options)
        else:
            self.state.save(self.run_state(checkpoint), filepath, storage_options)

    def _save_plain(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Let rank 0 write a whole ordinary state through the user's plugin."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, never so that half of it could be taken for a whole one."""
        if not self.is_global_zero:
            return
        if holds_run_state(str(filepath)) and not Folder(str(filepath)).is_file():
            remove(str(filepath))
        else:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a run state, or read an ordinary checkpoint file.

        Every file of a run state is held against the manifest first; the ranks share that work. Its weights and
        optimizer states are read later, by each rank what it holds, unless somebody overrides ``on_load_checkpoint``
        and so may want to see them.

        Args:
            checkpoint_path: folder or file, or this rank's :class:`~trainwright.checkpoint.memory.held.HeldState`.
            weights_only: of a file; ``False`` lets it execute code, and only that does.

        Raises:
            CheckpointError: if it cannot be used, on every rank.
        """
        if isinstance(checkpoint_path, HeldState):
            return self._opened(self._open_held(checkpoint_path))
        path = str(checkpoint_path)
        if not self.state.any_rank(holds_run_state(path)):
            if self._own_io:
                return super().load_checkpoint(checkpoint_path, weights_only)
            return load_ordinary(path, trust=weights_only is False)
        return self._opened(self.state.open(path))

    def _opened(self, state: RunState | HeldSource) -> dict[str, Any]:
        self.replicas.opened(state)
        return self.state.opened(state)

    def _open_held(self, held: HeldState) -> HeldSource:
        return self.state.open_held(held)

    def _knows_left_behind(self, of: str) -> bool:
        """Whether this strategy reads what another kind of strategy had saved beside what all read.

        Args:
            of: the kind; a state says in words what is lost without it.
        """
        return self.replicas.knows(of)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, by name, into what this rank holds of them.

        Raises:
            CheckpointError: if names or shapes differ and ``strict`` is set.
        """
        self.state.load_model(checkpoint, strict, super().load_model_state_dict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give every optimizer the part of the saved state that this rank holds.

        Raises:
            CheckpointError: if the saved optimizers were other ones, or had other groups or parameters.
        """
        self.state.load_optimizers(checkpoint)
        self.replicas.restore()

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """From an ordinary file: whole tensors, parameters by position."""
        super().load_optimizer_state_dict(checkpoint)

    # ---- steps of setup ---------------------------------------------------------------------------------------------

    def _refuse_other_models(self) -> None:
        """Have ranks hold their modules against each other, where each still has the whole; a collective."""
        if getattr(self.lightning_module, "_trainwright_layout", None) is None:
            refuse_other_models(self.lightning_module, self.root_device)

    def _find_blocks(self) -> dict[str, nn.Module]:
        return self._blocks.find(self.lightning_module)

    def _materialise(self) -> None:
        """Give a deferred model memory on this rank's device and its initial weights."""
        if is_deferred(self.lightning_module):
            self._fill(deferred_pieces(self.lightning_module), self._agreed_seed(), {})

    def _fill(self, pieces: Iterable[Piece], seed: int, real: dict[Tensor, Tensor]) -> None:
        """Exchange the meta tensors of ``pieces`` for real ones; ``real`` remembers them, so that ties are kept."""
        fill(pieces, seed, real, self._real)

    def _real(self, owner: nn.Module, name: str, meta: Tensor, value: Tensor) -> Tensor:
        """What this rank holds of the tensor ``name`` of ``owner``, whose whole initial value is ``value``."""
        tensor = value.to(device=self.root_device, dtype=meta.dtype)
        return nn.Parameter(tensor, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor

    def _agreed_seed(self) -> int:
        return int(self.broadcast(torch.initial_seed()))
