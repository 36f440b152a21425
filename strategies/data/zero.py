"""ZeRO: optimizer state, gradients and parameters sharded over data-parallel ranks (arXiv:1910.02054)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.core.lightning_internals import _optimizers_to_device
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.replica_averaging import ReplicaAveraging
from trainwright.strategies.base.certificate.certified import Certified
from trainwright.strategies.base.parameter_memory import check_memory, own_elements
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.base.whole.parts import ModuleParts, Share
from trainwright.strategies.base.whole.strategy import Wholes
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.part import Tables
from trainwright.strategies.contract.same_model import broadcast_from_first
from trainwright.strategies.data.batch_norm import adapt_layer_sync
from trainwright.strategies.data.optimizers.owners import Owners, load_states, with_whole_states
from trainwright.strategies.data.optimizers.shared import SharedOptimizers
from trainwright.strategies.data.options import ZeroOptions
from trainwright.strategies.data.sharding.certified import CertifiedShards
from trainwright.strategies.data.sharding.exchanges import Exchanges
from trainwright.strategies.data.sharding.gathering import drop_prefetched, fastest_depth, gather_ahead
from trainwright.strategies.data.sharding.gradient_hooks import refuse_accumulation_hooks
from trainwright.strategies.data.sharding.originals import Originals
from trainwright.strategies.data.sharding.split import Splitter, explain
from trainwright.strategies.data.sharding.step import Step
from trainwright.strategies.plan.slots import find_slots
from trainwright.strategies.state.shards import ParameterShard, gradient_problems
from trainwright.strategies.state.wholes import gather_tree


class ZeroStrategy(LayoutStrategy, LightningDDPStrategy):
    """Data parallelism whose ranks share one copy of the training state.

    Bytes per rank for P parameters in fp32 with Adam, N = size of the shard axis, and traffic per step in parameters:

    | stage | sharded         | bytes      | traffic |
    |-------|-----------------|------------|---------|
    | 1     | optimizer state | 8P + 8P/N  | 2P      |
    | 2     | and gradients   | 4P + 12P/N | 2P      |
    | 3     | and parameters  | 16P/N      | 3P      |

    Stages 1 and 2 keep the module whole and step this rank's rows of every parameter; stage 3 is torch's
    ``fully_shard`` (FSDP2). With accumulation, stage 1 communicates once per step; stages 2 and 3 reduce every
    micro-batch, so that no whole gradients are held (see ``no_sync_accumulation``).

    Args:
        stage: 1, 2 or 3.
        **kwargs: options, see ``ZeroOptions``; ``process_group_backend``, ``timeout``, ``parallel_devices``,
            ``cluster_environment`` as in Lightning's ``DDPStrategy``.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "zero"
    _ranks_agree = True  # all ranks run the same user code; not where replicas differ

    options_class = ZeroOptions
    options: ZeroOptions

    def __init__(self, stage: Literal[1, 2, 3] | None = None, **kwargs: Any) -> None:
        super().__init__(stage=stage, **kwargs)
        options = self.options
        self.averaging: ReplicaAveraging = ReplicaAveraging(
            self, options, choose=self._choose_prefetch, against_steps=lambda: self.tables.against_steps()
        )
        self.traits = replace(self.traits, forward_is_collective=options.stage == 3)
        self.certified: Certified = CertifiedShards(self)
        self.tables = Tables()
        self._wholes = Wholes(self)
        self._accumulates_gradients = False  # in micro-batches before the last of a step
        self.stage = options.stage
        self._open_layout = options.layout()
        self._holds_whole_gradients = options.stage == 1 or options.no_sync_accumulation
        self._bucket_bytes = int((options.bucket_mib or 25.0) * 2**20)
        self._prefetch = options.prefetch
        self._mesh: DeviceMesh | None = None
        self._step: Step | None = None
        self._in_training_step = False
        self._failed = False
        self._set_aside: dict[Tensor, Tensor | None] = {}
        self._exchanges = Exchanges(self._bucket_bytes, options)
        self._splitter = Splitter(self)
        self._sharing = SharedOptimizers(self)

    # ---- read by others -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout, closed for this world size."""
        return self._open_layout.resolve(self.world_size)

    @property
    def mesh(self) -> DeviceMesh:
        """Device mesh with axes ``(replicate, shard)``, or ``(shard,)`` without replicas.

        Raises:
            RuntimeError: before processes are set up.
        """
        if self._mesh is None:
            raise RuntimeError("The device mesh exists once trainer.fit (or another verb) has set up the processes.")
        return self._mesh

    def trained_boxes(self) -> dict[str, TensorParts]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.trained_boxes`; without tables on servers."""
        return {key: boxes for key, boxes in super().trained_boxes().items() if key not in self.tables.served_keys}

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.whole_parameters`."""
        wholes = self.tables.wholes()
        for name, value in super().whole_parameters():
            yield name, wholes[name].cpu() if name in wholes else value

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and averaged gradient (a DTensor) of each parameter that has one."""
        for name, parameter in self._exchanges.named.items():
            gradient = self._exchanges.optimized(parameter).grad
            if gradient is not None:
                yield name, gradient

    # ---- setup ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Initialize the process group and the device mesh."""
        super().setup_environment()
        self._mesh = self._make_mesh()

    def _make_mesh(self) -> DeviceMesh:
        layout = self.layout
        refuse(self.options.layout_problems(layout) if self._open_layout.is_open else [])
        sizes = {"replicate": layout.replicate} if layout.replicate > 1 else {}
        sizes["shard"] = layout.shard
        return init_device_mesh(self.root_device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _mesh_of(self, parameter: nn.Parameter) -> DeviceMesh:
        """Return the mesh of ranks that train ``parameter`` on different samples."""
        return self.mesh

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then build optimizers on this rank's part."""
        assert self.accelerator is not None
        refuse(self.options.precision_problems(str(self.precision_plugin.precision)))
        self.accelerator.setup(trainer)
        self._failed = False
        self.tables.find(trainer)
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        own_elements(module)
        self._refuse_different_models()
        if fitting:
            self._layer_sync = adapt_layer_sync(self._layer_sync, self.root_device)
            self.model = self._layer_sync.apply(module) if self._layer_sync else self.model
            check_memory(module)
        self.certificate.begin(module, fitting and self.world_size > 1)
        self._exchanges.release()
        if fitting:
            refuse(gradient_problems(module, self._splits_gradient, self.stage, self._sharing.typed_layout))
            refuse_accumulation_hooks(module)
            self.averaging.check_nodes()
            self._choose_way()
        originals = Originals(module)
        self._cut_module()
        if self._splits_parameters:
            self._split_parameters(trainer)
            if self._prefetch is not None and self._step is not None:
                gather_ahead(self._step, self._prefetch)
        else:
            self._replicate_parameters()
        if fitting:
            self._choose_shards()
            self._sharing.set_up(trainer, partial(self.setup_optimizers, trainer), originals)
            self.tables.take(self.optimizers)
        self.setup_precision_plugin()
        if fitting and self.options.offload == "none":
            _optimizers_to_device(self.optimizers, self.root_device)
        if fitting:
            self.averaging.set_up(plain_after_backward=True)
            self._record_frozen()
        if self._step is not None:
            self._step._get_fsdp_state()._lazy_init()  # adds hooks, otherwise in the first step
        self.certificate.set_up(self)
        self.state.load_initial_weights()
        self._wholes.show_in_hooks(trainer)
        originals.retire(module, self._as_optimized)

    def setup_precision_plugin(self) -> None:
        """Set up the precision plugin as Lightning does; clipping and overflow checks cover all trained parameters."""
        super().setup_precision_plugin()
        self.tables.attach(self.precision_plugin)

    @property
    def _splits_parameters(self) -> bool:
        return self.stage == 3

    def _choose_way(self) -> None:
        """Choose the fastest way to average replicas with ``communication="auto"``."""
        averaging = self.averaging
        is_free = averaging.asked is None and averaging.compression is None and averaging.has_replicas
        if averaging.communication == "auto" and is_free and not self._splits_parameters:
            averaging.choose_fastest(4.0 * self.num_parameters / (self.world_size // self.layout.replicate))

    def _choose_prefetch(self, links: list[MeasuredLink], compute: float, accumulation: int) -> str:
        """Choose the prefetch depth with ``communication="auto"``."""
        link = next((link for link in links if link.axis == "shard"), None)
        if self._prefetch is not None or self._step is None or self.traits.backward_in_step or link is None:
            return ""
        reduces = not (self._holds_whole_gradients and accumulation > 1)
        self._prefetch, chosen = fastest_depth(self._step, link, compute / accumulation, reduces)
        return chosen

    def _is_trained_alone(self, parameter: nn.Parameter) -> bool:
        """Return whether no other rank trains ``parameter``, so that it is optimized in place."""
        return False

    def _splits_gradient(self, parameter: nn.Parameter) -> bool:
        return not self.tables.has(parameter) and not self._is_trained_alone(parameter)

    def _cut_module(self) -> None:
        """Partition the module along other axes than replicate and shard: none in plain ZeRO."""

    def _replicate_parameters(self) -> None:
        module = self.lightning_module
        self._materialise()
        self._blocks.prepare(self.lightning_module, self._find_blocks())
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._broadcast_from_first(module)

    def _split_parameters(self, trainer: Trainer) -> None:
        self._step = self._splitter.split(trainer)

    def _broadcast_from_first(self, module: nn.Module) -> None:
        """Broadcast the weights of rank 0, since ranks may have built the module from different seeds."""
        broadcast_from_first(t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor))

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.lightning_module.to(self.root_device)

    def _choose_shards(self) -> None:
        """Choose the parameters that optimizers see through a :class:`ParameterShard`."""
        offload = self.options.offload == "optimizer"
        named = {name: p for name, p in self.lightning_module.named_parameters() if not self.tables.has(p)}
        whole = [p for p in named.values() if not isinstance(p, DTensor)]
        chosen = named.values() if offload else [p for p in whole if not self._is_trained_alone(p)]
        self._exchanges.choose(named, chosen, self._mesh_of, offload)
        self._make_exchanges()

    def _make_exchanges(self) -> None:
        """Create reducers and publishers of the trainable parameters."""
        self._exchanges.make(averages=not self.averaging.after_backward)

    def _include(self, unfrozen: Sequence[nn.Parameter]) -> None:
        super()._include(unfrozen)
        self._exchanges.unfreeze(unfrozen)
        self._sharing.exchange()
        self._make_exchanges()
        self._sharing.divide_anew()

    def teardown(self) -> None:
        """Detach from the module; its weights stay usable and appear whole."""
        self._stop_parts()
        self._sharing.hide_parameters()
        self._release_module()
        self._wholes.show_after_run()

    def _release_module(self) -> None:
        self._exchanges.detach()
        if self._step is None:
            super().teardown()
            return
        self._step.leave(self.root_device, self._failed)
        with with_attributes(self, _lightning_module=None):
            super().teardown()  # without the module, whose move would bypass FSDP2

    # ---- compression ----------------------------------------------------------------------------------------------

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        for name, parameter in self._exchanges.named.items():
            mesh = self._mesh_of(parameter)
            # Scalars are on every rank of the shard axis, beside different rows of the rest.
            tag = self._bucket_tag(name) + ("" if parameter.dim() else " scalar")
            if mesh.ndim > 1:
                yield ReplicaPart(name, self._as_optimized(parameter), mesh.get_group(0), tag)

    def _bucket_tag(self, name: str) -> str:
        """Return the tag of a parameter's buckets, see ``ReplicaPart``."""
        return ""

    def _complete_gradients(self) -> None:
        self._hand_over_gradients()

    # ---- the step -------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``; stage 3 gathers parameters on the way."""
        if self._step is None:
            output = super().training_step(*args, **kwargs)
            if self._exchanges.shards:
                self._exchanges.keep_memory()
            return output
        self._in_training_step = True
        try:
            with self.precision_plugin.train_step_context():
                return self._step("training_step", *args, **kwargs)
        finally:
            self._in_training_step = False
            if not self.lightning_module.automatic_optimization:
                # The optimizer may have stepped since the root's parameters were gathered.
                self._step.reshard()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``validation_step``."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``test_step``."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``predict_step``."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, *args, **kwargs)

    def _evaluate(self, method: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            if self._step is None:
                return getattr(self.lightning_module, method)(*args, **kwargs)
            try:
                return self._step(method, *args, **kwargs)
            finally:
                # No backward follows that would reshard the root.
                self._step.reshard()
                self._drop_prefetched()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip averaging inside: more micro-batches of the optimizer step follow."""
        step, whole = self._step, self._holds_whole_gradients
        before, self._accumulates_gradients = self._accumulates_gradients, True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_accumulates_gradients", before)
            stack.enter_context(self.averaging.accumulating())
            stack.enter_context(super().block_backward_sync())
            for reducer in self._exchanges.reducers:
                stack.enter_context(reducer.accumulate(shards_too=whole))
            if step is not None:
                set_sync = step.set_requires_gradient_sync if whole else step.set_requires_all_reduce
                set_sync(False)
                stack.callback(set_sync, True)
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Set aside the gradients of toggled-off optimizers."""
        if self._steps_within():
            assert self._step is not None
            # FSDP2 recorded requires_grad when it gathered the root, before the toggle.
            self._set_aside = {p: p.grad for p in self._optimized_parameters() if not p.requires_grad}
            self._step.begin_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Move gradients of split parameters to offloaded shards; gather the root again in manual optimization."""
        self._hand_over_gradients()
        if self._steps_within():
            for toggled_off, gradient in self._set_aside.items():
                toggled_off.grad = gradient
            self._set_aside = {}
            self._step.gather_again(self._exchanges.trained)  # type: ignore[union-attr]

    def _hand_over_gradients(self) -> None:
        for parameter, shard in self._exchanges.split.items():
            if parameter.grad is not None:
                shard.add_gradient(local_tensor(parameter.grad))
                parameter.grad = None

    def _steps_within(self) -> bool:
        """Return whether ``training_step`` runs backward and optimizer steps itself, on gathered parameters."""
        module = self.lightning_module
        is_manual = module is not None and not module.automatic_optimization
        return self._step is not None and self._in_training_step and is_manual

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step this rank's rows, then all-gather them."""
        if self._step is None and self._exchanges.shards:
            self._exchanges.keep_memory()
        with self._of_strategy():
            if self._steps_within():
                self._step.writes.keep()  # type: ignore[union-attr]
            output = super().optimizer_step(optimizer, *args, **kwargs)
            self._drop_prefetched()
            self._publish(optimizer)
            if self._steps_within():
                self._step.reshard()  # type: ignore[union-attr]
                self._step.gather_again(self._exchanges.trained)  # type: ignore[union-attr]
        return output

    def _of_strategy(self) -> AbstractContextManager[None]:
        """Suspend watches inside the user's manual optimization, where the strategy handles parts."""
        return nullcontext() if self._step is None else self._step.uses.paused()

    def _publish(self, optimizer: Optimizer) -> None:
        """Broadcast every rank's current rows."""
        for publisher in self._exchanges.publishers:
            publisher.publish(optimizer)
        for shard in self._exchanges.split.values():
            shard.publish()

    def on_exception(self, exception: BaseException) -> None:
        """Add notes to errors caused by sharded parameters."""
        self._stop_parts()
        self._failed = True
        self._sharing.restore()
        if self.stage == 3:
            explain(exception)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _must_restore_after_setup(self) -> bool:
        return self.stage == 3 or super()._must_restore_after_setup()

    def _as_optimized(self, parameter: nn.Parameter) -> Tensor:
        return self._exchanges.optimized(parameter)

    @property
    def _state_owners(self) -> Owners | None:
        return self._sharing.owners

    def _save_plain(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Gather every sharded tensor, one at a time, into the memory of rank 0."""
        whole = gather_tree(self._with_whole_states(checkpoint), keep=self.is_global_zero)
        super()._save_plain(whole, filepath, storage_options)

    def _with_whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Add optimizer states of other owners for a plain checkpoint. A collective."""
        return with_whole_states(checkpoint, self.optimizers, self._name_of(), self._state_owners)

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        load_states(checkpoint, self.optimizers, self._name_of(), self._state_owners)

    def _weights_changed(self) -> None:
        self._parameters_written()
        super()._weights_changed()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; tables into this rank's memory, for upload to servers."""
        self.tables.bring_back()
        super().load_model_state_dict(checkpoint, strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's weights and the tables on servers."""
        return self.tables.joined(super().lightning_module_state_dict())

    def _parameters_written(self) -> None:
        self._drop_prefetched()
        self._exchanges.reload()

    def _shard_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        return self._exchanges.shards.get(parameter)

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return parameter names by group, over all stages; a collective."""
        name_of = self._name_of()
        return [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]

    def _module_parts(self) -> ModuleParts | None:
        """Return this rank's part of the module; ``None``: there is one rank."""
        return None if self.world_size == 1 else ModuleParts(self._shares(), None, {}, self.root_device)

    def _shares(self) -> dict[str, Share]:
        module = self.lightning_module
        slots, named = find_slots(module), module.named_parameters()
        return {name: Share(slots[id(p)], p.shape, p) for name, p in named if not self.tables.has(p)}

    def _drop_prefetched(self) -> None:
        """Drop what was computed ahead from weights that may change: gathered blocks, scales."""
        if self._step is not None:
            if self._step.scales is not None:
                self._step.scales.forget()
            if self._prefetch:
                drop_prefetched(self._step)
