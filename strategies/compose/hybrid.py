"""Any layout: pipeline, tensor, expert and context parallelism with ZeRO on the remaining ranks.

The order in which a module is partitioned is in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.core.config.options import refuse
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.watch import PartsWatch
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.compose.hybrid_options import HybridOptions
from trainwright.strategies.compose.parts.cut_optimizers import CutOptimizers
from trainwright.strategies.compose.parts.cutting import CertifiedParts, CutSplitter, LayoutMeasures, cut
from trainwright.strategies.compose.parts.mixed_placement import ServedByRanks
from trainwright.strategies.compose.parts.pipeline_steps import PipelineSteps
from trainwright.strategies.compose.rules import cuts_module, manual_optimization_problems
from trainwright.strategies.contract.collectives.data import DataCollectives
from trainwright.strategies.contract.gradients import sum_gradients
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.data.zero import ZeroStrategy
from trainwright.strategies.pipeline.zero_grad_first import optimize_after_zero_grad
from trainwright.strategies.plan.deferred import Piece
from trainwright.strategies.state.assemble import Assembly
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.run_state import CURRENT_WEIGHTS, OPTIMIZERS, WEIGHTS, is_stored, misfit, mismatch


class HybridStrategy(ZeroStrategy):
    """Any layout: the axes of :class:`~trainwright.core.layout.Layout` in any combination.

    The module stays unmodified, and parameter names never change. A
    :class:`~trainwright.strategies.plan.model_plan.ModelPlan` defines where it may be split.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.HybridOptions`, and arguments of
            :class:`~trainwright.strategies.data.zero.ZeroStrategy`.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "hybrid"
    options_class = HybridOptions
    options: HybridOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.options.placement:
            self.tables = ServedByRanks(self, self._before_batch, self.options)
            self._parts.append(self.tables)
        self.ranks: DataCollectives = DataCollectives(self)
        self.measures = LayoutMeasures(self)
        self.certified = CertifiedParts(self)
        collective = self.is_cut or self.traits.forward_is_collective  # all axes but replicate communicate in forward
        # A pipeline weighs the loss of each micro-batch by tokens, if configured.
        self.traits = replace(self.traits, forward_is_collective=collective, weighs_micro_batches=True)
        self._splitter = CutSplitter(self)
        self._sharing = CutOptimizers(self)
        self._groups: LayoutGroups | None = None
        self._engines = Engines()
        self._pipeline = PipelineSteps(self, super()._evaluate)
        self._watch: PartsWatch | None = None
        self._assembly = Assembly.of_whole()
        self._shared: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        self._expert_mesh: DeviceMesh | None = None

    # ---- read by others -------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments for Lightning's own Trainer: the data-parallel ranks, not all."""
        return {"num_replicas": self.ranks.num_data_ranks, "rank": self.ranks.data_rank}

    @property
    def is_cut(self) -> bool:
        """True if ranks hold different parts of the module along other axes than replicate and shard."""
        return cuts_module(self._open_layout)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters of the whole module."""
        return self._engines.num_parameters or super().num_parameters

    # ---- setup ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Partition the module, then build optimizers for this rank's part."""
        self.replicas.prepare(trainer)
        super().setup(trainer)
        self.replicas.set_up(trainer)

    def _make_mesh(self) -> DeviceMesh:
        if self._open_layout.is_open:
            refuse(self.options.layout_problems(self.layout))
        groups = self._groups = self.ranks.groups = LayoutGroups(self.layout, self.root_device.type)
        mesh = self._mesh_over(groups, "shard", "context")
        if self.layout.expert > 1:
            self._expert_mesh = self._mesh_over(groups, "expert_shard")
        return mesh

    def _mesh_over(self, groups: LayoutGroups, *axes: str) -> DeviceMesh:
        """Return the mesh of ranks that average gradients at every step; ranks of the last dim share one optimizer
        state.
        """
        return groups.mesh(*self.replicas.mesh_axes, axes)

    def _mesh_of(self, parameter: nn.Parameter) -> DeviceMesh:
        # Called per parameter: no lookup without experts.
        if self._expert_mesh is not None and parameter in self._engines.expert_parameters:
            return self._expert_mesh
        return self.mesh

    @property
    def _splits_parameters(self) -> bool:
        return super()._splits_parameters and (self.mesh.size() > 1 or self._averages_whole)

    def _is_trained_alone(self, parameter: nn.Parameter) -> bool:
        return self._mesh_of(parameter).size() == 1 and not self._averages_whole

    @property
    def _averages_whole(self) -> bool:
        """True if all ranks average gradients of the whole module at every step."""
        return not self.is_cut and not self.replicas.are_independent

    def _must_restore_after_setup(self) -> bool:
        return self.is_cut or super()._must_restore_after_setup()

    def _cut_module(self) -> None:
        module = self.lightning_module
        if not self.is_cut or self._engines.module is module:
            return
        assert self._groups is not None
        self._engines, self._assembly = cut(self, self._groups)
        self.traits = replace(self.traits, backward_in_step=self._engines.has_pipeline)

    def _broadcast_from_first(self, module: nn.Module) -> None:
        if not self._engines.is_cut:
            super()._broadcast_from_first(module)
        # Otherwise it was broadcast before partitioning.

    def _find_blocks(self) -> dict[str, nn.Module]:
        # An encoder and a decoder are no chain of blocks; then no rank lacks any.
        has_chain = self._engines.is_cut and bool(self._engines.plan.blocks)
        return self._engines.owned_blocks if has_chain else super()._find_blocks()

    def _fill(self, pieces: Iterable[Piece], seed: int, real: dict[Tensor, Tensor]) -> None:
        super()._fill([piece for piece in pieces if self._engines.holds(piece.name)], seed, real)

    def _real(self, owner: nn.Module, name: str, meta: Tensor, value: Tensor) -> Tensor:
        cut = self._engines.cut_of(owner, name)
        return super()._real(owner, name, meta, value if cut is None else cut.part(value))

    def _split_parameters(self, trainer: Any) -> None:
        super()._split_parameters(trainer)
        if self._step is not None:
            self._step.guard = self._engines.guard

    def _make_exchanges(self) -> None:
        super()._make_exchanges()
        self._shared = self._engines.shared_parameters()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a step; at the start of an epoch, account for frozen or unfrozen pipeline stages."""
        if "training" not in self.ranks.compared:
            self.ranks.compare_first("training", batch)
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._engines.refresh()

    def _any_unfrozen(self, on_this_rank: bool, batch_idx: int) -> bool:
        """See the base class; pipeline stages agree at the start of an epoch."""
        if not self._engines.has_pipeline:
            return on_this_rank
        if batch_idx == 0:
            return self.reduce_boolean_decision(on_this_rank, all=False)
        if on_this_rank:
            raise RuntimeError(
                f"Parameters were unfrozen before batch {batch_idx} of an epoch. Stages of a pipeline hold different "
                "parameters and detect changes when an epoch begins: unfreeze in on_train_epoch_start, or use "
                "pipeline=1."
            )
        return False

    def on_train_end(self) -> None:
        """Share the buffers of all stages."""
        super().on_train_end()
        self._engines.share_buffers()

    def setup_precision_plugin(self) -> None:
        """Set the ranks over which gradients are spread; then attach the pipeline."""
        super().setup_precision_plugin()
        self.ranks.sync_metrics(self._pipeline.take_metric if self.traits.backward_in_step else None)
        engines = self._engines
        if not engines.is_cut:
            return
        engines.complete()
        source = {id(shard.optimized): parameter for parameter, shard in self._exchanges.shards.items()}
        self.precision_plugin.scope = engines.gradient_scope(source)  # type: ignore[attr-defined]
        scaler = getattr(self.precision_plugin, "scaler", None)
        if isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees = True
        self._watch = engines.parts_watch()
        if engines.has_pipeline:
            self._pipeline.attach(engines)
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelSummary):
                    self._pipeline.relay_summary(callback)
            optimize_after_zero_grad(self.lightning_module.trainer)

    # ---- the step -------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``; in a pipeline, forward and backward of all micro-batches."""
        if not self.lightning_module.automatic_optimization:  # hooks may set it
            refuse(manual_optimization_problems(self.layout, self.options.sequence_parallel))
        with self._watching("training_step"):
            return self._training_step(args, kwargs)

    @contextmanager
    def _watching(self, method: str) -> Iterator[None]:
        """Watch uses of split parameters by a method of the module in a ``with`` block."""
        if self._watch is None:
            yield
            return
        module: Any = self.lightning_module
        attributes = module.__dict__
        users, watched = attributes.get(method), self._watch.around(method, getattr(module, method))
        attributes[method] = watched
        try:
            yield
        finally:
            if attributes[method] is watched:
                del attributes[method]
                if users is not None:
                    attributes[method] = users

    def _training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.traits.backward_in_step:
            return super().training_step(*args, **kwargs)
        output = self._pipeline.train(args, kwargs)
        self._hand_over_gradients()
        self._sum_shared_gradients()
        if self.averaging.runs:
            self.averaging.average()
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward of one micro-batch; a pipeline has run it already, and only hooks are called."""
        if not self.traits.backward_in_step:
            with self._of_strategy():
                return super().backward(closure_loss, *args, **kwargs)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step this rank's parameters."""
        output = super().optimizer_step(*args, **kwargs)
        if self.replicas.are_independent:
            self.replicas.stepped()
        return output

    @contextmanager
    def _of_strategy(self) -> Iterator[None]:
        with super()._of_strategy(), nullcontext() if self._watch is None else self._watch.paused():
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Sum gradients that several ranks hold parts of."""
        super().post_backward(closure_loss)
        if not self.averaging.after_backward:
            self._sum_shared_gradients()
        # Otherwise they were summed before averaging.

    def _complete_gradients(self) -> None:
        super()._complete_gradients()
        self._sum_shared_gradients()

    def _bucket_tag(self, name: str) -> str:
        return self._engines.bucket_tag(name)

    def _sum_shared_gradients(self) -> None:
        if self._accumulates_gradients:
            return
        for group, parameters in self._shared.items():
            sum_gradients([self._as_optimized(each) for each in parameters if each.requires_grad], group)
        if self.replicas.are_independent:
            self.replicas.average_gradients()

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the module's blocks in order, including those of other stages."""
        return tuple(self._engines.plan.blocks) or super().block_names

    def _parts_of(self, name: str) -> int:
        return self._engines.parts_of(name)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def _evaluate(self, method: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if method not in self.ranks.compared:
            self.ranks.compare_first(method, args[0] if args else kwargs)
        with self._watching(method):
            if not self.traits.backward_in_step:
                return super()._evaluate(method, context, *args, **kwargs)
            return self._pipeline.evaluate(partial(super()._evaluate, method, context, *args, **kwargs), method)

    def on_validation_start(self) -> None:
        """Show the means of replicas with local steps."""
        super().on_validation_start()
        self.replicas.show()

    def on_validation_end(self) -> None:
        """Free parameters of other stages."""
        self.replicas.take_back()
        super().on_validation_end()
        self._pipeline.end_evaluation()

    def on_test_end(self) -> None:
        """Free parameters of other stages."""
        super().on_test_end()
        self._pipeline.end_evaluation()

    def on_predict_end(self) -> None:
        """Free parameters of other stages."""
        super().on_predict_end()
        self._pipeline.end_evaluation()

    def teardown(self) -> None:
        """Detach from the module, which keeps the parameters of its rank."""
        self.replicas.close()
        self._pipeline.end_evaluation()
        self.ranks.leave(self.lightning_module)
        self._engines.detach()
        super().teardown()

    # ---- user-facing collectives, over the data-parallel ranks -------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks in place, unless ``group`` is not all ranks."""
        return self.ranks.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data-parallel ranks, unless ``group`` is not all ranks."""
        return super().all_gather(tensor, self.ranks.resolve_group(group), sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; where only data-parallel ranks run, for those."""
        if self.ranks.active_group is None:
            super().barrier(name)
        else:
            self.ranks.wait(self.ranks.active_group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of data-parallel rank ``src`` on every rank.

        Raises:
            ValueError: if there is no such rank.
        """
        first = self.ranks.source(src)
        if self.ranks.active_group is None:
            return super().broadcast(obj, first)
        return broadcast_value(obj, src, self.ranks.active_group, self.root_device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all (or any) ranks decided so."""
        return self.ranks.decide(decision, all)

    # ---- whole module -----------------------------------------------------------------------------------------------

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and gathered value of every parameter, on every rank; a collective."""
        if not self._engines.is_cut:
            yield from super().whole_parameters()
            return
        yield from self._assembly.wholes(dict(self.lightning_module.named_parameters()), self._assembly.names)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and gathered, averaged gradient of every parameter that has one, on every rank; a
        collective.
        """
        if not self._engines.is_cut:
            yield from super().whole_gradients()
            return
        yield from self._assembly.wholes(dict(self.named_gradients()), self._assembly.names)

    @property
    def placement(self) -> Placement:
        """Placement of the module on the ranks of this layout."""
        if not self._engines.is_cut:
            return super().placement
        place = self.layout.coordinates(self.global_rank)
        leads = all(index == 0 for axis, index in place.items() if axis != "pipeline")
        return Placement(self._assembly, self.is_global_zero, leads)

    def _module_parts(self) -> ModuleParts | None:
        if not self._engines.is_cut:
            return super()._module_parts()
        assembly, shares = self._assembly, super()._shares()
        return ModuleParts(
            self._engines.shares(shares, assembly.names), assembly.pipeline, assembly.owners, self.root_device
        )

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        return self._assembly.group_names(optimizer, self._name_of())

    def _whole_keys(self) -> list[str]:
        return list(self._assembly.keys) if self._engines.is_cut else super()._whole_keys()

    def _with_whole_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Gather module and optimizer states on rank 0."""
        checkpoint = super()._with_whole_states(checkpoint)
        if self._engines.is_cut:
            keep, assembly, owners = self.is_global_zero, self._assembly, self._state_owners
            for key in (WEIGHTS, CURRENT_WEIGHTS):
                if key in checkpoint:
                    checkpoint[key] = assembly.whole_state(checkpoint[key], keep)
            if OPTIMIZERS in checkpoint:
                checkpoint[OPTIMIZERS] = [
                    assembly.whole_optimizer(optimizer, state, self._name_of(), keep, owners)
                    for optimizer, state in zip(self.optimizers, checkpoint[OPTIMIZERS], strict=True)
                ]
        return checkpoint

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        if self._engines.is_cut:
            states = [
                self._assembly.optimizer_parts(optimizer, state, self._name_of(), self._state_owners)
                for optimizer, state in zip(self.optimizers, checkpoint[OPTIMIZERS], strict=True)
            ]
            checkpoint = {**checkpoint, OPTIMIZERS: states}
        super()._load_plain_optimizers(checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of whole saved weights, by name."""
        if self._engines.is_cut and strict and not is_stored(checkpoint[WEIGHTS]):
            unexpected = sorted(set(checkpoint[WEIGHTS]) - set(self._assembly.keys))
            if unexpected:  # each stage knows its own names only and ignores others
                raise misfit("The checkpoint", mismatch([], unexpected, []))
        super().load_model_state_dict(checkpoint, strict)
