"""Tables of embeddings on parameter servers, the dense part under ZeRO, in one training step."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.core.config.options import refuse
from trainwright.strategies.averaging.compression.options import CompressionChoice
from trainwright.strategies.base.strategy import HeldBytes
from trainwright.strategies.compose.hybrid_options import HybridOptions
from trainwright.strategies.contract.gradients import clip_gradient_value, gradient_norm, local_tensor, refuse_nonfinite
from trainwright.strategies.contract.precision import AgreedGradScaler, before_update
from trainwright.strategies.data.zero import ZeroStrategy
from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.refusals import (
    needs_interface,
    rank_problems,
    steps_are_served,
    tables_are_not_averaged,
)
from trainwright.strategies.parameter_server.server.server import Meeting
from trainwright.strategies.parameter_server.server.shard import refuse_unserved
from trainwright.strategies.parameter_server.tables.placement import served_names
from trainwright.strategies.parameter_server.tables.tables import ServedTables, find_tables, scale_gradients
from trainwright.strategies.plan.deferred import is_deferred


class MixedPlacement(ZeroStrategy):
    """ZeRO, with some tables of embeddings on parameter servers, which all ranks step together.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.HybridOptions`.
    """

    options: HybridOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        options = self.options
        self._placed: Mapping[str, str] = options.placement or {}
        self._table_servers, self._interface = options.table_servers, options.interface
        self._tables: dict[str, nn.Parameter] = {}
        self._served: ServedTables | None = None

    # ---- what others may read -------------------------------------------------------------------------------------

    def held_bytes(self) -> HeldBytes:
        """Bytes that this rank holds now, its server's included."""
        held = super().held_bytes()
        if self._served is None or self._served.server is None:
            return held
        parameters, optimizer = self._served.server.shard.nbytes
        return HeldBytes(held.parameters + parameters, held.gradients, held.optimizer + optimizer)

    # ---- setup ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Find the tables, then as ZeRO.

        Raises:
            ValueError: for what cannot be served, on every rank.
        """
        module = self.lightning_module
        assert module is not None
        if self._placed:
            if trainer.state.fn == TrainerFn.FITTING:
                self._refuse_beside_tables(trainer, module)
            names = [name for name, _ in module.named_parameters()]
            self._tables = find_tables(module, served_names(self._placed, names))
        super().setup(trainer)

    def _refuse_beside_tables(self, trainer: Trainer, module: LightningModule) -> None:
        problems = rank_problems(self._table_servers, self.world_size, "table_servers")
        if not module.automatic_optimization:
            problems.append(
                f"placement with {type(module).__name__}, which optimizes manually (automatic_optimization=False): "
                "servers have to know where a step ends; use automatic optimization, or leave placement out"
            )
        if is_deferred(module):
            problems.append(
                "placement with a module on the meta device: tables need values before servers take them; build the "
                "module with memory (module.meta=false), or leave placement out"
            )
        if self.num_nodes > 1 and self._interface is None:
            problems.append(needs_interface(self.num_nodes))
        if self.compression is not None and self.compression.needs_adam:
            problems.append(steps_are_served(self.compression.asked))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                problems.append(tables_are_not_averaged(f"the callback {type(callback).__name__}"))
        refuse(problems)

    def _against_steps(self, choice: CompressionChoice) -> Iterator[str]:
        yield from super()._against_steps(choice)
        if self._tables:
            yield "servers make the optimizer's step for tables"

    def _is_elsewhere(self, parameter: nn.Parameter) -> bool:
        return any(parameter is table for table in self._tables.values())

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the user's optimizer.

        Raises:
            ValueError: if it cannot be split into what servers step and what ranks do.
        """
        super().setup_optimizers(trainer)
        if not self._tables or trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise ValueError(
                f"placement: configure_optimizers made {len(self.optimizers)} optimizers; servers step the tables of "
                "one, with as many parameter groups as you like. Put the parameters into groups of one."
            )
        refuse_unserved(self.optimizers[0])
        held = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
        missing = [name for name, table in self._tables.items() if id(table) not in held]
        if missing:
            raise ValueError(
                f"placement: {missing[0]} is in no parameter group of the optimizer, so servers have nothing to step. "
                "Add it to a group in configure_optimizers, or leave it to the layout."
            )

    def setup_precision_plugin(self) -> None:
        """Let clipping and overflows be decided on dense part and tables together."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        if hasattr(plugin, "clipper"):
            plugin.clipper = self if self._tables else None
        scaler = getattr(plugin, "scaler", None)
        if self._tables and isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees = True

    # ---- serving --------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start servers and workers."""
        super().on_train_start()
        if not self._tables or self._served is not None:
            return
        module = self.lightning_module
        assert module is not None
        before_update(self.precision_plugin, self._step_tables)
        self._served = ServedTables(
            module, self._tables, self.optimizers[0], self._table_servers, Device(self._interface)
        )
        meeting = Meeting(default_store(), f"tables/{self.broadcast(uuid.uuid4().hex)}")
        self._served.start(self.global_rank, self.world_size, meeting, self.barrier)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step: after a state was put back, the servers need it first."""
        super().on_train_batch_start(batch, batch_idx)
        if self._served is not None and self._served.outdated:
            self._served.upload(self.barrier)

    def conclude(self) -> None:
        """Keep tables and their optimizer's state here, and let the servers go."""
        super().conclude()
        if self._served is not None:
            served, self._served = self._served, None
            served.retire(self.barrier)

    def on_train_end(self) -> None:
        """As :meth:`conclude`, where no Trainer of this project has called it."""
        super().on_train_end()
        if self._served is not None:
            self.conclude()

    def _stop_serving(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served.stop()

    def on_exception(self, exception: BaseException) -> None:
        """Hang up, so that the others hear of it."""
        self._stop_serving()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave nothing behind."""
        self._stop_serving()
        super().teardown()

    # ---- the whole ------------------------------------------------------------------------------------------------

    def _wholes(self) -> dict[str, torch.Tensor]:
        """Tables that this rank does not hold now."""
        return {} if self._served is None or self._served.outdated else self._served.wholes()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights of all, tables pulled whole for it."""
        return {**super().lightning_module_state_dict(), **self._wholes()}

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.whole_parameters`."""
        wholes = self._wholes()
        for name, value in super().whole_parameters():
            yield name, wholes[name].cpu() if name in wholes else value

    def trained_boxes(self) -> dict[str, TensorParts]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.trained_boxes`; without what servers hold."""
        served = {f"weights/{name}" for name in self._tables} if self._served is not None else set()
        return {key: boxes for key, boxes in super().trained_boxes().items() if key not in served}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; tables into this rank's memory, from which servers take them."""
        if self._served is not None:
            self._served.bring_back()
        super().load_model_state_dict(checkpoint, strict)

    def _weights_changed(self) -> None:
        super()._weights_changed()
        if self._served is not None:
            self._served.outdated = True

    # ---- the step -------------------------------------------------------------------------------------------------

    def _step_tables(self, optimizer: Optimizer) -> None:
        """Right before the dense part is stepped."""
        if self._served is None:
            return
        if self._overflows(optimizer):
            self._served.drop_gradients()
        else:
            self._served.step()

    def _overflows(self, optimizer: Optimizer) -> bool:
        """Whether this step is skipped, on all ranks, because a scaled gradient of some rank is not finite."""
        scaler: Any = getattr(self.precision_plugin, "scaler", None)
        if scaler is None:
            return False
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        return any(bool(flag) for flag in found)

    def _dense(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        return (p for group in optimizer.param_groups for p in group["params"] if not self._is_elsewhere(p))

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Clip by the norm of the averaged gradient of dense part and tables.

        See :class:`~trainwright.strategies.contract.precision.GradientClipper`.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._served is None or self._overflows(optimizer):
            return
        dense = [p for p in self._dense(optimizer) if p.grad is not None]
        norm = math.sqrt(float(gradient_norm(dense)) ** 2 + self._served.squares())
        if error_if_nonfinite:
            refuse_nonfinite(norm, max_norm)
        # As torch does it: a NaN spreads.
        scale = max_norm / (norm + 1e-6)
        scale = scale if math.isnan(scale) else min(scale, 1.0)
        scale_gradients([local_tensor(p.grad) for p in dense], scale)  # type: ignore[arg-type]
        self._served.clip(scale)

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp the averaged gradient; see :class:`~trainwright.strategies.contract.precision.GradientClipper`."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        clip_gradient_value(self._dense(optimizer), limit)
        if self._served is not None and not self._overflows(optimizer):
            self._served.clip_value(limit)
