"""Data parallelism by parameter servers: workers push gradients and pull parameters, in step or on their own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.checkpoint.memory.held import HeldSource, HeldState
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.core.lightning_internals import _init_dist_connection, _MockOptimizer
from trainwright.core.run.traits import Traits
from trainwright.strategies.averaging.averaged import Averaging
from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.averaging.compression.names import choose_compression, codec_of
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.groups import leave_groups
from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.contract.same_model import take_from_first, varying_buffers
from trainwright.strategies.parameter_server.messages.wire import Device, Link
from trainwright.strategies.parameter_server.options import ParameterServerOptions, learning_rate_warning
from trainwright.strategies.parameter_server.own_ranks import ToldFit
from trainwright.strategies.parameter_server.peers import Servers, WorkerMeasures, Workers
from trainwright.strategies.parameter_server.refusals import needs_interface, rank_problems
from trainwright.strategies.parameter_server.server.clocks import Consistency
from trainwright.strategies.parameter_server.server.server import Rules, Server, ServerMeeting
from trainwright.strategies.parameter_server.server.shard import ShardPlan, refuse_unserved
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.parameter_server.worker.onlookers import has_onlookers
from trainwright.strategies.parameter_server.worker.optimizer import ServedOptimizer
from trainwright.strategies.parameter_server.worker.rejoining import (
    WorkerPace,
    incarnation,
    meet_alone,
    meet_anew,
    run_store,
    take,
    tell_place,
    told_place,
)
from trainwright.strategies.parameter_server.worker.residuals import PUSHES, PushResiduals
from trainwright.strategies.state.checkpointing import COMPRESSION, NOTHING_KEPT, OF_RUN, KeptBack, rank_of

# The name of the phase with which a micro-batch begins.
_STEP_BEGINS = "data"


class ParameterServerStrategy(LayoutStrategy, LightningDDPStrategy):
    """Every rank trains on its own samples; servers hold the parameters and the optimizer, and step it.

    Communication of a step: each worker sends its gradients once and receives the parameters once, whatever the number
    of workers; a server receives and sends that for every worker. The module is used as it is. Servers run in threads
    of the first ranks, one each, or on ranks of their own (``server_ranks``).

    Args:
        consistency: ``"sync"``: all workers make each step together, which is what DDP computes, clipping included;
            ``"ssp"``: each steps by itself, ``staleness`` steps ahead of the slowest at most (stale synchronous
            parallel, Ho et al., NIPS 2013); ``"async"``: each steps by itself and never waits but at the end of an
            epoch, a validation and a save.
        **kwargs: options, see :class:`~trainwright.strategies.parameter_server.options.ParameterServerOptions`;
            ``process_group_backend``, ``timeout``, ``parallel_devices``, ``cluster_environment`` as in Lightning's
            ``DDPStrategy``. On ranks that only serve (``server_ranks="own"``) ``fit`` returns with nothing trained or
            logged and the module on the meta device, and ``validate``, ``test`` and ``predict`` return ``None`` at
            once; the others are the world (``world_size``). What a message lacks goes with the next one; a run that is
            resumed with other workers or servers drops it.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "parameter_server"

    options_class = ParameterServerOptions
    options: ParameterServerOptions

    def __init__(self, consistency: Consistency | None = None, **kwargs: Any) -> None:
        super().__init__(consistency=consistency, **kwargs)
        options = self.options
        self.averaging = _Pushes(self._kept_back, self._keep_back)
        self.servers = options.servers
        # Ranks that only serve, the last ones of the run; 0 where servers are beside workers.
        self._server_ranks = options.serving_ranks
        how: Any = options.consistency
        self._rules = Rules(how, options.bound, options.delay_compensation, options.scale_by_staleness)
        self._compression = choose_compression(options.compression)
        self._residuals = PushResiduals(self._compression)
        self._interface = options.interface
        self._overlap = options.overlap
        self._client: Client | None = None
        self._server: Server | None = None
        self._alone = False  # within a step that other ranks need not make
        # How often this rank was started before; None: lost ranks are not started anew.
        self._incarnation = incarnation()
        self._store: dist.Store | None = None
        self._returns = 0  # of lost workers, known when the process group of all ranks was made
        self._fit: ToldFit | None = None  # where servers have ranks of their own
        self._run_store: dist.Store | None = None  # there, of all ranks
        self._end_offers: Callable[[], None] = lambda: None
        self.peers, self.service, self.measures = Workers(self), Servers(self), WorkerMeasures(self)
        # Only in step are all workers at the same one, unless some may be lost meanwhile.
        together = self._in_step and self._incarnation is None
        self.traits = Traits(
            steps_are_collective=together,
            averages_every_step=together,
            holds_step_gradients=False,  # the servers alone have them
            leases_samples=None if options.leases == "none" else options.leases,
            joins=bool(self._incarnation),
        )

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks that train: all but those that only serve."""
        return super().world_size - self._server_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Of Lightning's own samplers."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _in_step(self) -> bool:
        return self._rules.consistency == "sync"

    @property
    def server(self) -> Server | None:
        """The server that this rank holds while it trains, if it does."""
        return self._server

    @property
    def client(self) -> Client | None:
        """This rank's worker, while it trains."""
        return self._client

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See ``whole_gradients``; averaged for the occasion."""
        for name, gradient in self.named_gradients():
            mean = gradient.detach().clone()
            dist.all_reduce(mean)
            yield name, (mean / self.world_size).cpu()

    # ---- setup ----------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Take the module of the run that begins.

        Raises:
            ValueError: if all ranks would only serve.
        """
        refuse(rank_problems(self.servers, super().world_size, own=True) if self._server_ranks else [])
        super().connect(model)

    def setup_environment(self) -> None:
        """Let the ranks meet; one that was started anew is alone until the others meet again."""
        if self.traits.joins and not dist.is_initialized():
            meet_alone()
        super().setup_environment()
        if not self._server_ranks or self.traits.joins:
            return
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._fit = ToldFit(self._store_of_run(), self.global_rank)
            if self.service.serves:
                self._fit.wait_until_prepared()

    def setup_distributed(self) -> None:
        """Make the process group: of the ranks that train, without those that only serve."""
        if self._server_ranks and not self.traits.joins:
            self.set_world_ranks()
            self._part()
        super().setup_distributed()

    def _part(self) -> None:
        assert self.cluster_environment is not None
        backend = self._get_process_group_backend()
        everyone = self.world_size + self._server_ranks
        if dist.is_initialized() and dist.get_world_size() == everyone:  # made by others, of all ranks
            self._run_store = default_store()
            workers = dist.PrefixStore("parameter_server/workers", self._run_store)
            leave_groups()
            if not self.service.serves:
                dist.init_process_group(
                    backend, store=workers, rank=self.global_rank, world_size=self.world_size, timeout=self._timeout
                )
        if self.service.serves:
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            if not dist.is_initialized():
                meet_alone()
            return
        device = None if self.root_device.type == "cpu" else self.root_device
        _init_dist_connection(
            self.cluster_environment, backend, world_size=self.world_size, timeout=self._timeout, device_id=device
        )

    def _store_of_run(self) -> dist.Store:
        if self._run_store is None:
            self._run_store = run_store()
        return self._run_store

    def _must_restore_late(self) -> bool:
        return self.traits.joins or super()._must_restore_late()

    def setup(self, trainer: Trainer) -> None:
        """Give the model memory, prepare its blocks, then the optimizer.

        Raises:
            ValueError: for what servers cannot do, on every rank.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._refuse_impossible(trainer)
        if self.service.serves:
            # By the same code as on the other ranks, but without memory and without any of them.
            self.precision_plugin.convert_module(self.lightning_module)
            self.setup_optimizers(trainer)
            return
        if self._fit is not None and self.is_global_zero:
            self._fit.prepare()
        self._refuse_other_models()
        self._materialise()
        self._blocks.prepare(self.lightning_module, self._find_blocks())
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        take_from_first([*self.lightning_module.parameters(), *self.lightning_module.buffers()])
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.state.begin_from_weights()
        if fitting and not self._in_step and self.world_size > 1 and not self._rules.scale_by_staleness:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            rank_zero_warn(learning_rate_warning(self._rules.consistency, self.world_size, groups))

    def _refuse_impossible(self, trainer: Trainer) -> None:
        module = self.lightning_module
        problems = [] if self._server_ranks else rank_problems(self.servers, self.world_size)
        if not module.automatic_optimization:
            problems.append(
                f"{type(module).__name__} optimizes manually (automatic_optimization=False), but servers have to know "
                "where a step ends; use automatic optimization, or strategy=ddp"
            )
        if self.num_nodes > 1 and self._interface is None:
            problems.append(needs_interface(self.num_nodes))
        if not self.traits.steps_are_collective:
            problems += self._tied_steps(trainer)
        refuse(problems)

    def _tied_steps(self, trainer: Trainer) -> Iterator[str]:
        """What would make ranks wait for each other at every step."""
        how = self._rules.consistency if self._incarnation is None else "launch.recovery=rejoin"
        ending = f"which ties ranks together at every step, but with {how} they step by themselves"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "needs_collective_steps", False) or isinstance(callback, Timer):
                yield f"the callback {type(callback).__name__}, {ending}; leave it out, or use consistency=sync"
        if self._layer_sync is not None:
            yield f"sync_batchnorm=True, {ending}; leave it out: statistics are averaged where ranks meet"

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the user's optimizer, and stand in for it.

        Raises:
            ValueError: for an optimizer that servers cannot step.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in self.optimizers):
            return  # the module has none: nothing is trained
        for optimizer in self.optimizers:
            refuse_unserved(optimizer)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"configure_optimizers made {len(self.optimizers)} optimizers; servers step one, with as many "
                "parameter groups as you like. Put the parameters into groups of one, or use strategy=ddp."
            )
        self.optimizers = [ServedOptimizer(optimizer) for optimizer in self.optimizers]

    def setup_precision_plugin(self) -> None:
        """Let overflows and clipping be decided on the average of all workers, where they step together."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        if hasattr(plugin, "clipper"):
            plugin.clipper = self if self._in_step else None
        scaler = getattr(plugin, "scaler", None)
        if isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees, scaler.agree = True, self._agree_on_overflow

    @property
    def _served(self) -> ServedOptimizer | None:
        optimizer = self.optimizers[0] if self.optimizers else None
        return optimizer if isinstance(optimizer, ServedOptimizer) else None

    # ---- serving --------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start servers and workers; all begin with the first rank's parameters."""
        super().on_train_start()
        served = self._served
        if served is None:
            return
        if self._client is not None:
            self._go_on_from_servers(served)
            return
        plan = self._plan(served)
        self._refuse_other_optimizers(plan)
        self._say_what_varies()
        meeting = self._meeting()
        self._store = meeting.store
        if self._fit is not None:
            self._fit.wait_for_servers(self.servers)
        elif self.global_rank < self.servers:
            self._start_server(self.global_rank, plan, meeting)
        self._residuals.take_up(self._connect(served, plan, meeting))
        self._upload()
        if self._incarnation is not None and self.is_global_zero:
            tell_place(self._store, meeting.prefix)
            self._make_offers()

    def _meeting(self) -> ServerMeeting:
        if self._fit is not None:
            return ServerMeeting(self._store_of_run(), self._fit.prefix)
        store = default_store() if self._incarnation is None else run_store()
        return ServerMeeting(store, f"parameter_server/{self.broadcast(uuid.uuid4().hex)}")

    def _start_server(self, number: int, plan: ShardPlan, meeting: ServerMeeting) -> None:
        replaces = self._incarnation is not None
        server = Server(number, plan, self._rules, meeting, self.world_size, self._device, self._codec, replaces)
        server.start()
        self._server = server

    def _serve(self) -> None:
        served, fit, module = self._served, self._fit, self.lightning_module
        assert fit is not None
        if served is not None:
            plan = self._plan(served)
            self.optimizers, self.lr_scheduler_configs = [], []
            module.to("meta")
            self._start_server(self._server_number, plan, self._meeting())
        fit.be_ready(self._server_number)
        server = self._server
        fit.wait_for_end(lambda: server is not None and server.is_deserted)

    @property
    def _server_number(self) -> int:
        return self.global_rank - self.world_size

    def _plan(self, served: ServedOptimizer) -> ShardPlan:
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        plan = ShardPlan.of(served.inner, names, self.servers)
        return plan.in_parts(self._tables(_of_groups(served))) if self._overlap else plan

    @property
    def _pushes_early(self) -> bool:
        # A worker that steps alone clips by the norm of all its gradients.
        return self._in_step or self.lightning_module.trainer.gradient_clip_val is None

    @property
    def _pulls_late(self) -> bool:
        # What is compiled reads parameters where nobody sees it.
        return self._overlap and not self.options.compile and not has_onlookers(self.lightning_module.trainer)

    @cached_property
    def _device(self) -> Device:
        return Device(self._interface)

    @property
    def _codec(self) -> Codec | None:
        choice = self._compression
        return None if choice is None else codec_of(choice.name, **choice.options)

    def _tables(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Which of the parameters are tables of embeddings, of which a batch touches few rows."""
        parts = self.lightning_module.modules()
        embeddings = {id(each.weight) for each in parts if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
        return [index for index, parameter in enumerate(parameters) if id(parameter) in embeddings]

    def _connect(self, served: ServedOptimizer, plan: ShardPlan, meeting: ServerMeeting) -> Client:
        parameters = _of_groups(served)
        tables = self._tables(parameters)
        module = self.lightning_module if self._pulls_late else None
        client = Client(self.global_rank, plan, parameters, meeting, self._device, self._codec, tables, module)
        self._client = client
        client.pushes_early = self._pushes_early
        client.connect()
        served.serve(client, plan)
        return client

    def _upload(self) -> None:
        """Give the servers what the first rank has: at the beginning, and after a state was put back."""
        assert self._served is not None
        assert self._client is not None
        if self.is_global_zero:
            self._served.upload()
        self._served.forget_state()
        self.barrier()  # nobody meets before the servers have it
        self._client.meet()

    def _refuse_other_optimizers(self, plan: ShardPlan) -> None:
        """Hold how every rank is to train its parameters against the first; a collective."""
        digests = self.state.of_all_ranks(plan.digest)
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise ValueError(
                f"Rank(s) {', '.join(map(str, other))} optimize otherwise than rank 0, so servers cannot step what "
                "they push: the optimizer, its groups or their options differ. Build the same one on every rank."
            )

    def _say_what_varies(self) -> None:
        varying = varying_buffers(self.lightning_module)
        if varying and self.world_size > 1:
            rank_zero_info(
                f"Statistics such as {varying[0]} differ from rank to rank while training; they are averaged where all "
                "ranks meet: before a validation, a save and the end of an epoch."
            )

    # ---- workers that come again ------------------------------------------------------------------------------------

    def _open_held(self, held: HeldState) -> HeldSource:
        # One that joins goes on from what the first rank offers now, not from what it was started with.
        return super()._open_held(self._join() if self.traits.joins and self._client is None else held)

    def _join(self) -> HeldState:
        """Link this worker to the servers and take the state of the run."""
        assert self._served is not None
        self._store = run_store()
        meeting = ServerMeeting(self._store, told_place(self._store))
        self._connect(self._served, self._plan(self._served), meeting)
        link = Link(meeting.client(), meeting.come(0, self.global_rank, wants_state=True), False, self._device)
        try:
            return take(link)
        finally:
            link.close()

    def _go_on_from_servers(self, served: ServedOptimizer) -> None:
        """What was loaded came from a rank whose servers have it, or newer parameters."""
        assert self._client is not None
        served.forget_state()
        self._client.pull()

    def _make_offers(self) -> None:
        """Keep a copy of this rank's state for workers that come again, from where steps begin."""
        trainer: Any = self.lightning_module.trainer
        pace, last = WorkerPace(), -1

        def hear(phase: str) -> None:
            nonlocal last
            keeper = self._client if self._server is None else self._server
            if phase != _STEP_BEGINS or trainer.global_step == last or keeper is None:
                return
            last = trainer.global_step
            if pace.is_due(keeper.wants_offer):
                begin = pace.now
                keeper.offer(self._own_state(trainer), trainer.global_step)
                pace.copied(begin)

        self._end_offers = trainer.phases.listen(hear) if hasattr(trainer, "phases") else self._end_offers

    def _own_state(self, trainer: Any) -> Content:
        """This rank's state of the run, without asking anybody for what servers have."""
        assert self._served is not None
        self.peers.is_apart = self._served.apart = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            return self.run_state(checkpoint, complete=True)
        finally:
            self.peers.is_apart = self._served.apart = False

    def _meet_anew(self, returns: int) -> None:
        """Make the process group of all ranks anew if somebody has come again since it was made."""
        if returns == self._returns:
            return
        assert self._store is not None
        assert self._client is not None
        self._returns = returns
        backend = self._get_process_group_backend()
        name = f"{self._client.prefix}/world/{returns}"
        meet_anew(self._store, name, self.global_rank, self.world_size, backend, self._timeout)

    # ---- steps and the end ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step: after a state was put back, the servers need it first."""
        super().on_train_batch_start(batch, batch_idx)
        if self._served is not None and self._served.outdated and self._client is not None:
            self._upload()

    def on_train_end(self) -> None:
        """Meet a last time, keep the optimizer's state here, and let the servers go."""
        super().on_train_end()
        if self._client is None or self._served is None:
            return
        self._end_offers()
        self.peers.meet()
        self._served.retire()
        self.barrier()  # nobody leaves before all have what they need
        self._client.leave()
        if self._server is not None:
            self._server.close()
        self._client = self._server = None

    def _stop_at_once(self, problem: str = "", code: int | None = None) -> None:
        self._end_offers()
        fit, self._fit = self._fit, None
        if fit is not None and self.service.serves:
            with suppress(RuntimeError):  # the store is gone
                fit.be_ready(self._server_number, problem)
        elif fit is not None and self.is_global_zero:
            with suppress(RuntimeError):
                fit.end(problem, code)
        client, server = self._client, self._server
        self._client = self._server = None
        if client is not None:
            client.drop()
        if server is not None:
            server.close()

    def on_exception(self, exception: BaseException) -> None:
        """Hang up, so that the others hear of it."""
        code = exception.code if isinstance(exception, SystemExit) else None
        problem = (str(exception).strip().splitlines() or [""])[0]
        self._stop_at_once(f"{type(exception).__name__}: {problem}", code if isinstance(code, int) else None)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave nothing behind."""
        self._stop_at_once()
        if self.service.serves:
            assert self.accelerator is not None
            self.accelerator.teardown()  # the module is on the meta device, and nothing else was begun
            return
        super().teardown()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; where ranks step by themselves, what needs the others is refused meanwhile."""
        self._alone = not self.traits.steps_are_collective
        try:
            with nullcontext() if self._client is None else self._client.watched():
                return super().training_step(*args, **kwargs)
        finally:
            self._alone = False

    def _settle(self) -> None:
        """Take the parameters that are on their way."""
        if self._client is not None:
            self._client.settle()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.whole_parameters`."""
        self._settle()
        yield from super().whole_parameters()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's.

        Raises:
            RuntimeError: within a training step that other ranks need not make at the same time.
        """
        self._refuse_alone("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's; raises as :meth:`reduce`."""
        self._refuse_alone("all_gather")
        return super().all_gather(*args, **kwargs)

    def _refuse_alone(self, what: str) -> None:
        if self._alone:
            raise RuntimeError(
                f"training_step asked for a value of all ranks ({what}), but with consistency="
                f"{self._rules.consistency} ranks step by themselves and would wait for each other at every step. Log "
                "with on_step=False (self.log(..., on_step=False, on_epoch=True, sync_dist=True)), or use "
                "strategy.consistency=sync."
            )

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Clip the averaged gradient; see :class:`~trainwright.strategies.contract.precision.GradientClipper`."""
        if self._served is not None and not self._overflows:
            self._served.clip_norm(max_norm, error_if_nonfinite)

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp the averaged gradient; see :class:`~trainwright.strategies.contract.precision.GradientClipper`."""
        if self._served is not None and not self._overflows:
            self._served.clip_value(limit)

    # Whether this step is skipped because a scaled gradient of some worker is not finite.
    _overflows = False

    def _agree_on_overflow(self, flag: Tensor) -> Tensor:
        """Whether any worker's gradients overflow, where all make the step; else whether this one's do."""
        assert self._client is not None
        if self._in_step:
            flag = flag.new_tensor(self._client.vote(float(flag)))
        self._overflows = bool(flag)
        return flag

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights of all; while training, the ranks meet for it."""
        self._settle()
        if not self.peers.is_apart:
            self.peers.meet()
        return super().lightning_module_state_dict()

    def run_state(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """See :class:`~trainwright.strategies.state.checkpointing.RunStates`; it says what others will lack."""
        self._settle()
        content = super().run_state(checkpoint, complete=complete)
        left_behind = self._residuals.left_behind
        if left_behind is not None and not self.peers.is_apart and OF_RUN in content.tree:
            content.tree[OF_RUN]["left_behind"] = left_behind
        return content

    def _knows_left_behind(self, of: str) -> bool:
        return of == PUSHES

    def _kept_back(self) -> KeptBack:
        return NOTHING_KEPT if self._client is None or self.peers.is_apart else self._residuals.kept_back(self._client)

    def _keep_back(self, state: RunState | HeldSource, of_run: Mapping[str, Any]) -> None:
        saved = of_run.get(COMPRESSION)
        if saved is None or self.traits.joins:
            return
        rank: int | None = None
        if Layout(**of_run["layout"]) == self.layout:
            rank = rank_of(state) if isinstance(state, HeldSource) else self._rank
        self._residuals.load(state, saved, rank)
        if self._client is not None:  # training goes back
            self._residuals.take_up(self._client)

    def _weights_changed(self) -> None:
        super()._weights_changed()
        if self._served is not None:
            self._served.outdated = True


class _Pushes(Averaging):
    """Servers average; what is left out of a push is kept back.

    Args:
        kept: what this rank keeps back.
        keep: takes over what a state has of it.
    """

    def __init__(
        self, kept: Callable[[], KeptBack], keep: Callable[[RunState | HeldSource, Mapping[str, Any]], None]
    ) -> None:
        self._kept, self._keep = kept, keep

    def kept_back(self, complete: bool) -> KeptBack:
        return self._kept()

    def keep_back(self, state: RunState | HeldSource, of_run: Mapping[str, Any]) -> None:
        self._keep(state, of_run)


def _of_groups(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
