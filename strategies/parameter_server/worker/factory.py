"""Construction of servers and clients from a strategy's options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.averaging.compression.names import codec_of
from trainwright.strategies.averaging.compression.options import choose_compression
from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.services import ShardServices
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.parameter_server.worker.optimizer import ServedOptimizer, WrittenParameters
from trainwright.strategies.parameter_server.worker.parameter_readers import may_read_parameters, may_write_parameters


class EndpointFactory:
    """Factory of servers and clients.

    Args:
        options: of the strategy.

    Attributes:
        compression: of pushes; ``None``: off.
    """

    def __init__(self, options: ParameterServerOptions) -> None:
        self._options = options
        self.compression = choose_compression(options.compression)

    @cached_property
    def device(self) -> Device:
        """Network interface of all links of this process."""
        return Device(self._options.interface)

    @property
    def codec(self) -> Codec | None:
        """Codec of pushes; ``None``: uncompressed."""
        choice = self.compression
        return None if choice is None else codec_of(choice)

    def plan(self, module: nn.Module, served: ServedOptimizer) -> ShardPlan:
        """Return the plan of a module's parameters."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        plan = ShardPlan.of(served.optimizer, names, self._options.servers)
        return plan.in_parts(_tables(module, served.parameters)) if self._options.overlap else plan

    def server(self, number: int, plan: ShardPlan, meeting: ServerRendezvous, workers: int, replaces: bool) -> Server:
        """Create and start a server."""
        services = ShardServices(number, plan, self._options, workers, self.codec, replaces)
        server = Server(services, meeting, self.device)
        server.start()
        return server

    def client(
        self, module: LightningModule, worker: int, served: ServedOptimizer, plan: ShardPlan, meeting: ServerRendezvous
    ) -> Client:
        """Create a client, not yet connected."""
        trainer = module.trainer
        # Compiled code reads parameters unobserved.
        pulls_late = self._options.overlap and not self._options.compile and not may_read_parameters(trainer)
        parameters, late = served.parameters, module if pulls_late else None
        tables = _tables(module, parameters)
        client = Client(worker, plan, parameters, meeting, self.device, self.codec, tables, late)
        # Workers that step independently clip by the norm of all their gradients.
        client.pushes_early = self._options.averages_every_step or trainer.gradient_clip_val is None
        return client

    def written(self, client: Client, trainer: Any) -> WrittenParameters:
        """Create the watch over parameters that user code writes."""
        return WrittenParameters(client, self._options.averages_every_step, may_write_parameters(trainer))


def _tables(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the indices of embedding tables among the parameters."""
    parts = module.modules()
    embeddings = {id(each.weight) for each in parts if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    return [index for index, parameter in enumerate(parameters) if id(parameter) in embeddings]
