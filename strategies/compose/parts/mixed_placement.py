"""Embedding tables on parameter servers, with the dense part under ZeRO."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.config.options import refuse
from trainwright.strategies.averaging.replica_averaging import ReplicaAveraging
from trainwright.strategies.compose.hybrid_options import HybridOptions
from trainwright.strategies.contract.gradients import clip_gradient_value, gradient_norm, local_tensor, refuse_nonfinite
from trainwright.strategies.contract.part import Host, Tables
from trainwright.strategies.contract.precision import AgreedGradScaler, before_update
from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.problems import (
    needs_interface,
    rank_problems,
    steps_are_served,
    tables_are_not_averaged,
)
from trainwright.strategies.parameter_server.run_checks import refuse_coupled
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.shard import refuse_unserved
from trainwright.strategies.parameter_server.tables.placement import served_names
from trainwright.strategies.parameter_server.tables.tables import ServedTables, find_tables, scale_gradients
from trainwright.strategies.parameter_server.worker.parameter_readers import gradient_hooks
from trainwright.strategies.plan.deferred import is_deferred


class Mixed(Host, Protocol):
    """Strategy as seen by its tables."""

    averaging: ReplicaAveraging

    @property
    def world_size(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    def barrier(self, name: str | None = None) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class ServedByRanks(Tables):
    """Embedding tables on parameter servers, stepped by all ranks together.

    Args:
        strategy: of the dense part.
        before_batch: functions that the strategy calls before every batch.
        options: with ``placement``, ``table_servers`` and ``interface``.
    """

    def __init__(self, strategy: Mixed, before_batch: list[Callable[[], None]], options: HybridOptions) -> None:
        self._strategy = strategy
        self._placed: Mapping[str, str] = options.placement or {}
        self._table_servers, self._interface = options.table_servers, options.interface
        self._tables: dict[str, nn.Parameter] = {}
        self._served: ServedTables | None = None
        before_batch.append(self._upload_if_outdated)

    @property
    def held(self) -> tuple[int, int]:  # type: ignore[override]
        """Bytes held by a server on this rank: tables and optimizer state."""
        return (0, 0) if self._served is None or self._served.server is None else self._served.server.shard.nbytes

    @property
    def served_keys(self) -> frozenset[str]:  # type: ignore[override]
        """See :attr:`Tables.served_keys`."""
        return frozenset(f"weights/{name}" for name in self._tables) if self._served is not None else frozenset()

    def has(self, parameter: nn.Parameter) -> bool:
        """See :meth:`Tables.has`."""
        return any(parameter is table for table in self._tables.values())

    # ---- setup ----------------------------------------------------------------------------------------------------

    def find(self, trainer: Trainer) -> None:
        """See :meth:`Tables.find`."""
        module = self._strategy.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_beside_tables(trainer, module)
        names = [name for name, _ in module.named_parameters()]
        self._tables = find_tables(module, served_names(self._placed, names))

    def _refuse_beside_tables(self, trainer: Trainer, module: LightningModule) -> None:
        nodes = self._strategy.num_nodes
        problems = rank_problems(self._table_servers, self._strategy.world_size, "table_servers")
        if not module.automatic_optimization:
            problems.append(
                f"placement with {type(module).__name__}, which optimizes manually (automatic_optimization=False): "
                "servers must know where a step ends; use automatic optimization, or leave placement out"
            )
        if is_deferred(module):
            problems.append(
                "placement with a module on the meta device: tables need values before they are sent to servers; build "
                "the module with memory (module.meta=false), or leave placement out"
            )
        if nodes > 1 and self._interface is None:
            problems.append(needs_interface(nodes))
        compression = self._strategy.averaging.compression
        if compression is not None and compression.needs_adam:
            problems.append(steps_are_served(compression.asked))
        if hooks := gradient_hooks(trainer):
            problems.append(
                f"placement with {' and '.join(hooks)}: hooks do not see the gradients of tables, which go to servers; "
                "leave placement out (a callback that does not use them may set looks_at_parameters = False)"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                problems.append(tables_are_not_averaged(f"the callback {type(callback).__name__}"))
        refuse(problems)

    def against_steps(self) -> Iterable[str]:
        """See :meth:`Tables.against_steps`."""
        return ["servers make the optimizer's step for tables"] if self._tables else []

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """See :meth:`Tables.take`."""
        if not self._tables:
            return
        if len(optimizers) != 1:
            raise ValueError(
                f"placement: configure_optimizers made {len(optimizers)} optimizers; servers step tables of one "
                "optimizer, with any number of parameter groups. Put the parameters into groups of one."
            )
        refuse_unserved(optimizers[0])
        refuse_coupled(optimizers[0], "Leave strategy.placement out")
        held = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
        missing = [name for name, table in self._tables.items() if id(table) not in held]
        if missing:
            raise ValueError(
                f"placement: {missing[0]} is in no parameter group of the optimizer, so servers cannot step it. Add it "
                "to a group in configure_optimizers, or leave it to the layout."
            )

    def attach(self, precision: Precision) -> None:
        """See :meth:`Tables.attach`."""
        plugin: Any = precision
        if hasattr(plugin, "clipper"):
            plugin.clipper = self if self._tables else None
        scaler = getattr(plugin, "scaler", None)
        if self._tables and isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees = True

    # ---- serving --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start servers and workers."""
        if not self._tables or self._served is not None:
            return
        strategy = self._strategy
        before_update(strategy.precision_plugin, self._step_tables)
        self._served = ServedTables(
            strategy.lightning_module,
            self._tables,
            strategy.optimizers[0],
            self._table_servers,
            Device(self._interface),
        )
        meeting = ServerRendezvous(default_store(), f"tables/{strategy.broadcast(uuid.uuid4().hex)}")
        self._served.start(strategy.global_rank, strategy.world_size, meeting, strategy.barrier)

    def _upload_if_outdated(self) -> None:
        """Upload restored tables before the next step."""
        if self._served is not None and self._served.outdated:
            self._served.upload(self._strategy.barrier)

    def conclude(self) -> None:
        """Fetch tables and their optimizer state, and stop the servers."""
        served, self._served = self._served, None
        if served is not None:
            served.retire(self._strategy.barrier)

    def end(self) -> None:
        """Conclude, if the Trainer did not."""
        self.conclude()

    def stop(self) -> None:
        """Close the connections, so that other ranks notice."""
        served, self._served = self._served, None
        if served is not None:
            served.stop()

    # ---- whole tables -----------------------------------------------------------------------------------------------

    def wholes(self) -> Mapping[str, torch.Tensor]:
        """See :meth:`Tables.wholes`."""
        return {} if self._served is None or self._served.outdated else self._served.wholes()

    def bring_back(self) -> None:
        """See :meth:`Tables.bring_back`."""
        if self._served is not None:
            self._served.bring_back()

    def weights_changed(self) -> None:
        """Mark the servers' tables outdated; they are uploaded before the next step."""
        if self._served is not None:
            self._served.outdated = True

    # ---- the step -------------------------------------------------------------------------------------------------

    def _step_tables(self, optimizer: Optimizer) -> None:
        """Step the tables, right before the dense part."""
        if self._served is None:
            return
        if self._overflows(optimizer):
            self._served.drop_gradients()
        else:
            self._served.step()

    def _overflows(self, optimizer: Optimizer) -> bool:
        """Return whether all ranks skip this step, since a scaled gradient of some rank is not finite."""
        scaler: Any = getattr(self._strategy.precision_plugin, "scaler", None)
        if scaler is None:
            return False
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        return any(bool(flag) for flag in found)

    def _dense(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        return (p for group in optimizer.param_groups for p in group["params"] if not self.has(p))

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
        # As in torch, NaN propagates.
        scale = max_norm / (norm + 1e-6)
        scale = scale if math.isnan(scale) else min(scale, 1.0)
        scale_gradients([local_tensor(p.grad) for p in dense], scale)  # type: ignore[arg-type]
        self._served.coefficient = scale

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp the averaged gradient; see :class:`~trainwright.strategies.contract.precision.GradientClipper`."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        clip_gradient_value(self._dense(optimizer), limit)
        if self._served is not None and not self._overflows(optimizer):
            self._served.clip_value = limit
