"""How the servers and workers of a strategy are made of its options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.averaging.compression.names import choose_compression, codec_of
from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.clocks import Rules
from trainwright.strategies.parameter_server.server.meeting import ServerMeeting
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.parameter_server.worker.onlookers import has_onlookers
from trainwright.strategies.parameter_server.worker.optimizer import ServedOptimizer


class Linking:
    """Makes servers and workers.

    Args:
        options: of the strategy.

    Attributes:
        compression: of pushes; ``None``: none.
        rules: of servers.
    """

    def __init__(self, options: ParameterServerOptions) -> None:
        self._options = options
        self.compression = choose_compression(options.compression)
        how: Any = options.consistency
        self.rules = Rules(how, options.bound, options.delay_compensation, options.scale_by_staleness)

    @cached_property
    def device(self) -> Device:
        """Of all links of this process."""
        return Device(self._options.interface)

    @property
    def codec(self) -> Codec | None:
        """How pushes are written; ``None``: as they are."""
        choice = self.compression
        return None if choice is None else codec_of(choice.name, **choice.options)

    def plan(self, module: nn.Module, served: ServedOptimizer) -> ShardPlan:
        """What servers hold of a module."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        plan = ShardPlan.of(served.inner, names, self._options.servers)
        return plan.in_parts(_tables(module, served.parameters)) if self._options.overlap else plan

    def server(self, number: int, plan: ShardPlan, meeting: ServerMeeting, workers: int, replaces: bool) -> Server:
        """A server that has begun."""
        server = Server(number, plan, self.rules, meeting, workers, self.device, self.codec, replaces)
        server.start()
        return server

    def client(
        self, module: LightningModule, worker: int, served: ServedOptimizer, plan: ShardPlan, meeting: ServerMeeting
    ) -> Client:
        """A worker, to be connected."""
        trainer = module.trainer
        # What is compiled reads parameters where nobody sees it.
        pulls_late = self._options.overlap and not self._options.compile and not has_onlookers(trainer)
        parameters, late = served.parameters, module if pulls_late else None
        tables = _tables(module, parameters)
        client = Client(worker, plan, parameters, meeting, self.device, self.codec, tables, late)
        # A worker that steps alone clips by the norm of all its gradients.
        client.pushes_early = self.rules.consistency == "sync" or trainer.gradient_clip_val is None
        return client


def _tables(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Which of the parameters are tables of embeddings, of which a batch touches few rows."""
    parts = module.modules()
    embeddings = {id(each.weight) for each in parts if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    return [index for index, parameter in enumerate(parameters) if id(parameter) in embeddings]
