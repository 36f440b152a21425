"""Data parallelism by parameter servers: workers push gradients and pull parameters."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.failures.error_text import named_line
from trainwright.core.lightning_internals import _MockOptimizer
from trainwright.core.run.traits import Traits
from trainwright.strategies.base.parameter_memory import memory_problems
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.groups import destroy_groups
from trainwright.strategies.contract.same_model import broadcast_from_first
from trainwright.strategies.parameter_server.dedicated_ranks import FitSignals, split_world
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.peers import Servers, WorkerMeasures, Workers
from trainwright.strategies.parameter_server.problems import rank_problems
from trainwright.strategies.parameter_server.run_checks import (
    log_varying_statistics,
    refuse_optimizers,
    refuse_other_optimizers,
    setup_problems,
    warn_of_learning_rates,
)
from trainwright.strategies.parameter_server.server.clocks import Consistency
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.parameter_server.worker.factory import EndpointFactory
from trainwright.strategies.parameter_server.worker.optimizer import ServedOptimizer
from trainwright.strategies.parameter_server.worker.parameter_readers import may_use_gradients
from trainwright.strategies.parameter_server.worker.rejoining import (
    current_prefix,
    incarnation,
    init_single_process_group,
    keep_offering,
    publish_prefix,
    run_store,
    take,
)
from trainwright.strategies.parameter_server.worker.residuals import PUSHES, PushedAverages
from trainwright.strategies.state.checkpointing import OF_RUN


class ParameterServerStrategy(LayoutStrategy, LightningDDPStrategy):
    """Data-parallel workers whose parameters and optimizer are held and stepped by servers.

    Per step, each worker sends its gradients once and receives the parameters once, whatever the number of workers; a
    server does so for every worker. The module is unmodified. Servers run in threads of the first ranks, or on
    dedicated ranks (``server_ranks``).

    Args:
        consistency: ``"sync"``: all workers make each step together, equivalent to DDP, clipping included; ``"ssp"``:
            each steps independently, at most ``staleness`` steps ahead of the slowest (stale synchronous parallel, Ho
            et al., NIPS 2013); ``"async"``: each steps independently and waits only at the end of an epoch, a
            validation and a save.
        **kwargs: options, see :class:`~trainwright.strategies.parameter_server.options.ParameterServerOptions`;
            ``process_group_backend``, ``timeout``, ``parallel_devices``, ``cluster_environment`` as in Lightning's
            ``DDPStrategy``. On dedicated server ranks (``server_ranks="own"``) ``fit`` returns with nothing trained or
            logged and the module on the meta device, and ``validate``, ``test`` and ``predict`` return ``None`` at
            once; ``world_size`` counts the others. A compression residual is added to the next message; a resume with
            other workers or servers drops it.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "parameter_server"

    options_class = ParameterServerOptions
    options: ParameterServerOptions

    def __init__(self, consistency: Consistency | None = None, **kwargs: Any) -> None:
        super().__init__(consistency=consistency, **kwargs)
        options = self.options
        self.servers = options.servers
        # Number of dedicated server ranks, the last ones; 0 if servers run beside workers.
        self._server_ranks = options.serving_ranks
        self._factory = EndpointFactory(options)
        self.averaging: PushedAverages = PushedAverages(self, self._factory.compression)
        self.client: Client | None = None
        """This rank's client, while training."""
        self.server: Server | None = None
        """Server on this rank, while training."""
        self._is_independent = False  # within a step that other ranks need not make
        # Number of restarts of this rank; None: lost ranks are not restarted individually.
        self._incarnation = incarnation()
        self._store: dist.Store | None = None
        self._returns = 0  # of lost workers, at the creation of the process group
        self._fit: FitSignals | None = None  # with dedicated server ranks
        self._run_store: dist.Store | None = None  # with dedicated server ranks, of all ranks
        self._end_offers: Callable[[], None] = lambda: None
        self.peers, self.service, self.measures = Workers(self), Servers(self), WorkerMeasures(self)
        # Ranks are at the same step only if they step together and none may be lost.
        together = options.averages_every_step and self._incarnation is None
        self.traits = Traits(
            steps_are_collective=together,
            averages_every_step=together,
            holds_step_gradients=False,  # only servers have them
            leases_samples=None if options.leases == "none" else options.leases,
            joins=bool(self._incarnation),
        )

    # ---- read by others -------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks that train, without dedicated server ranks."""
        return super().world_size - self._server_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's samplers."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See ``whole_gradients``; averaged on demand."""
        for name, gradient in self.named_gradients():
            mean = gradient.detach().clone()
            dist.all_reduce(mean)
            yield name, (mean / self.world_size).cpu()

    # ---- setup ----------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Take the module of a new run.

        Raises:
            ValueError: if all ranks would only serve.
        """
        refuse(rank_problems(self.servers, super().world_size, own=True) if self._server_ranks else [])
        super().connect(model)

    def setup_environment(self) -> None:
        """Initialize the process group; a restarted rank is alone until the next meeting."""
        if self.traits.joins and not dist.is_initialized():
            init_single_process_group()
        super().setup_environment()
        if not self._server_ranks or self.traits.joins:
            return
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._fit = FitSignals(self._store_of_run(), self.global_rank)
            if self.service.serves:
                self._fit.wait_until_prepared()

    def setup_distributed(self) -> None:
        """Create the process group of the ranks that train."""
        if self._server_ranks and not self.traits.joins:
            self.set_world_ranks()
            assert self.cluster_environment is not None
            device = None if self.root_device.type == "cpu" else self.root_device
            backend = self._get_process_group_backend()
            ranks = self.global_rank, self.world_size, self._server_ranks
            store = split_world(self.cluster_environment, *ranks, backend, self._timeout, device)
            self._run_store = store or self._run_store
        super().setup_distributed()

    def _store_of_run(self) -> dist.Store:
        if self._run_store is None:
            self._run_store = run_store()
        return self._run_store

    def _must_restore_after_setup(self) -> bool:
        return self.traits.joins or super()._must_restore_after_setup()

    def setup(self, trainer: Trainer) -> None:
        """Materialize the model, prepare its blocks, then create the optimizer.

        Raises:
            ValueError: on every rank, for what servers do not support.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            how = f"consistency={self.options.consistency}"
            alone = how if self._incarnation is None else "launch.recovery=rejoin"
            refuse(list(setup_problems(trainer, self.options, None if self.traits.steps_are_collective else alone)))
            refuse(memory_problems(self.lightning_module))
        if self.service.serves:
            # The same code as on the other ranks, without memory and communication.
            self.precision_plugin.convert_module(self.lightning_module)
            self.setup_optimizers(trainer)
            return
        if self._fit is not None and self.is_global_zero:
            self._fit.prepare()
        self._refuse_different_models()
        self._materialise()
        self._blocks.prepare(self.lightning_module, self._find_blocks())
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        broadcast_from_first([*self.lightning_module.parameters(), *self.lightning_module.buffers()])
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.state.load_initial_weights()
        if fitting:
            warn_of_learning_rates(self.options, self.world_size, self.optimizers)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the user's optimizer and wrap it.

        Raises:
            ValueError: for an optimizer that servers cannot step.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in self.optimizers):
            return  # nothing is trained
        refuse_optimizers(self.optimizers, self.servers)
        in_step = self.options.averages_every_step
        self.optimizers = [ServedOptimizer(optimizer, in_step) for optimizer in self.optimizers]

    def setup_precision_plugin(self) -> None:
        """Set up precision, with overflow checks and clipping on the average of all workers if they step together."""
        super().setup_precision_plugin()
        if self._served is not None:
            self._served.attach(self.precision_plugin)

    @property
    def _served(self) -> ServedOptimizer | None:
        """The optimizer that servers step; ``None``: nothing is trained. Raises if user code has replaced it."""
        optimizer = self.optimizers[0] if self.optimizers else None
        if optimizer is None or isinstance(optimizer, _MockOptimizer):
            return None
        if not isinstance(optimizer, ServedOptimizer):
            raise RuntimeError(
                "trainer.optimizers was assigned in fit, but parameter servers step the optimizer that "
                "configure_optimizers returned. Return the new one there, or use strategy=ddp."
            )
        return optimizer

    # ---- serving --------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start servers and workers from the first rank's parameters."""
        super().on_train_start()
        served = self._served
        if served is None:
            return
        if self.client is not None:  # the servers' parameters are those of the loaded state or newer
            served.forget_state()
            self.client.pull()
            return
        plan = self._plan(served)
        refuse_other_optimizers(self.state.all_gather_values(plan.digest))
        if self.world_size > 1:
            log_varying_statistics(self.lightning_module)
        meeting = self._meeting()
        self._store = meeting.store
        if self._fit is not None:
            self._fit.wait_for_servers(self.servers)
        elif self.global_rank < self.servers:
            self._start_server(self.global_rank, plan, meeting)
        self.averaging.take_up(self._connect(served, plan, meeting))
        self._upload()
        if self._incarnation is not None and self.is_global_zero:
            publish_prefix(self._store, meeting.prefix)
            self._make_offers()

    def _meeting(self) -> ServerRendezvous:
        if self._fit is not None:
            return ServerRendezvous(self._store_of_run(), self._fit.prefix)
        store = default_store() if self._incarnation is None else run_store()
        return ServerRendezvous(store, f"parameter_server/{self.broadcast(uuid.uuid4().hex)}")

    def _start_server(self, number: int, plan: ShardPlan, meeting: ServerRendezvous) -> None:
        self.server = self._factory.server(number, plan, meeting, self.world_size, self._incarnation is not None)

    def _serve(self) -> None:
        served, fit, module = self._served, self._fit, self.lightning_module
        assert fit is not None
        if served is not None:
            plan = self._plan(served)
            self.optimizers, self.lr_scheduler_configs = [], []
            module.to("meta")
            self._start_server(self._server_number, plan, self._meeting())
        fit.be_ready(self._server_number)
        server = self.server
        fit.wait_for_end(lambda: server is not None and server.services.is_deserted)

    @property
    def _server_number(self) -> int:
        return self.global_rank - self.world_size

    def _plan(self, served: ServedOptimizer) -> ShardPlan:
        return self._factory.plan(self.lightning_module, served)

    def _connect(self, served: ServedOptimizer, plan: ShardPlan, meeting: ServerRendezvous) -> Client:
        client = self.client = self._factory.client(self.lightning_module, self.global_rank, served, plan, meeting)
        client.connect()
        served.serve(client, plan, self._factory.written(client, self.lightning_module.trainer))
        together = self.traits.steps_are_collective and self.world_size > 1
        served.shows_averages = together and may_use_gradients(self.lightning_module.trainer)
        return client

    def _upload(self) -> None:
        """Send the first rank's parameters to the servers, at the start and after a restore."""
        assert self._served is not None
        assert self.client is not None
        if self.is_global_zero:
            self._served.upload()
        self._served.forget_state()
        self.barrier()  # no meeting before the servers have them
        self.client.meet()

    # ---- rejoining workers ------------------------------------------------------------------------------------------

    def _open_held(self, held: Snapshot) -> SnapshotReader:
        # A joining worker resumes from the first rank's current offer, not from its start arguments.
        return super()._open_held(self._join() if self.traits.joins and self.client is None else held)

    def _join(self) -> Snapshot:
        """Connect this worker to the servers and receive the state of the run."""
        assert self._served is not None
        self._store = run_store()
        meeting = ServerRendezvous(self._store, current_prefix(self._store))
        self._connect(self._served, self._plan(self._served), meeting)
        return take(meeting, self.global_rank, self._factory.device)

    def _make_offers(self) -> None:
        trainer: Any = self.lightning_module.trainer
        if hasattr(trainer, "phases"):
            keeper = self.client if self.server is None else self.server.services
            hear = keep_offering(trainer, keeper, lambda: self._own_state(trainer))
            self._end_offers = trainer.phases.listen(hear)

    def _own_state(self, trainer: Any) -> Content:
        """Return this rank's state of the run, without requests to servers."""
        assert self._served is not None
        with with_attributes(self.peers, is_apart=True), with_attributes(self._served, skips_state=True):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            return self.run_state(checkpoint, complete=True)

    def _rebuild_process_group(self, returns: int) -> None:
        """Rebuild the process group if a worker has rejoined since it was created."""
        if returns == self._returns:
            return
        assert self._store is not None
        assert self.client is not None
        self._returns = returns
        destroy_groups()
        store = dist.PrefixStore(f"{self.client.prefix}/world/{returns}", self._store)
        backend = self._get_process_group_backend()
        dist.init_process_group(
            backend, store=store, rank=self.global_rank, world_size=self.world_size, timeout=self._timeout
        )

    # ---- steps and the end ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a step; uploads a restored state first."""
        super().on_train_batch_start(batch, batch_idx)
        if self._served is not None and self._served.outdated and self.client is not None:
            self._upload()

    def on_train_end(self) -> None:
        """Meet a last time, fetch the optimizer's state, and stop the servers."""
        super().on_train_end()
        if self.client is None or self._served is None:
            return
        self._end_offers()
        self.peers.meet()
        self._served.retire()
        self.barrier()  # no rank leaves before all have what they need
        self.client.leave()
        if self.server is not None:
            self.server.close()
        self.client = self.server = None

    def _stop_at_once(self, problem: str = "", code: int | None = None) -> None:
        self._end_offers()
        fit, self._fit = self._fit, None
        if fit is not None and self.service.serves:
            with suppress(RuntimeError):  # the store is gone
                fit.be_ready(self._server_number, problem)
        elif fit is not None and self.is_global_zero:
            with suppress(RuntimeError):
                fit.end(problem, code)
        client, server = self.client, self.server
        self.client = self.server = None
        for optimizer in self.optimizers:
            if isinstance(optimizer, ServedOptimizer):
                optimizer.leave()
        if client is not None:
            client.drop()
        if server is not None:
            server.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the connections, so that other ranks notice."""
        code = exception.code if isinstance(exception, SystemExit) else None
        self._stop_at_once(named_line(exception), code if isinstance(code, int) else None)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Release all resources."""
        self._stop_at_once()
        if self.service.serves:
            assert self.accelerator is not None
            self.accelerator.teardown()  # the module is on the meta device, and nothing else was started
            return
        super().teardown()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the last micro-batch of a step, and step; a scaler runs it before the optimizer's step."""
        with with_attributes(self._served, ends_step=True):
            return super().optimizer_step(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; where ranks step independently, collectives inside raise."""
        independent = with_attributes(self, _is_independent=not self.traits.steps_are_collective)
        with independent, nullcontext() if self.client is None else self.client.watched():
            return super().training_step(*args, **kwargs)

    def _settle(self) -> None:
        """Wait for pending pulls."""
        if self.client is not None:
            self.client.settle()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.whole_parameters`."""
        self._settle()
        yield from super().whole_parameters()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce as Lightning does.

        Raises:
            RuntimeError: in a training step that other ranks need not make at the same time.
        """
        self._refuse_collective("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Gather as Lightning does; raises as :meth:`reduce`."""
        self._refuse_collective("all_gather")
        return super().all_gather(*args, **kwargs)

    def _refuse_collective(self, what: str) -> None:
        if self._is_independent:
            raise RuntimeError(
                f"training_step called a collective ({what}), but with consistency={self.options.consistency} ranks "
                "step independently and would wait for each other at every step. Log with on_step=False (self.log(..., "
                "on_step=False, on_epoch=True, sync_dist=True)), or use strategy.consistency=sync."
            )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; while training, ranks meet for it."""
        self._settle()
        if not self.peers.is_apart:
            self.peers.meet()
        return super().lightning_module_state_dict()

    def run_state(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """See :class:`~trainwright.strategies.state.checkpointing.RunStates`; records what other strategies drop."""
        self._settle()
        content = super().run_state(checkpoint, complete=complete)
        left_behind = self.averaging.left_behind
        if left_behind is not None and not self.peers.is_apart and OF_RUN in content.tree:
            content.tree[OF_RUN]["left_behind"] = left_behind
        return content

    def _knows_left_behind(self, of: str) -> bool:
        return of == PUSHES

    def _weights_changed(self) -> None:
        super()._weights_changed()
        if self._served is not None:
            self._served.outdated = True
