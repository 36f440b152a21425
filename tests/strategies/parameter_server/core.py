"""Servers and workers without Lightning, on a small model."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server import sharder
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.services import ShardServices
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.worker.client import Client

PREFIX = "parameter_server"


def make_model() -> nn.Module:
    """Create a network of two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def make_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Create an optimizer with two groups of different options."""
    first, second = list(model[0].parameters()), list(model[2].parameters())  # type: ignore[index]
    groups: list[dict[str, Any]] = [{"params": first}, {"params": second, "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a worker's step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(4, 5, generator=generator)
    return inputs, inputs[:, :2] * 2


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    """Return the mean squared error of a worker's batch."""
    inputs, targets = batch(worker, step)
    return nn.functional.mse_loss(model(inputs), targets)


class Peer:
    """A rank with a worker and, on the first ranks, a server.

    Args:
        rank: of the worker.
        workers: how many.
        servers: how many, on the first ranks.
        kind: of optimizer.
        codec: of pushes.
        store: for the rendezvous; ``None``: that of the default process group.
        serves: whether the first ranks run servers.
        least_numel: least elements of a part; ``None``: no parts.
        **rules: see :class:`ParameterServerOptions`.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        servers: int = 1,
        kind: str = "adamw",
        codec: Any = None,
        store: Any = None,
        serves: bool = True,
        least_numel: int | None = None,
        **rules: Any,
    ) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model, kind)
        self.plan = _plan(self.model, self.optimizer, servers)
        if least_numel is not None:
            with patch.object(sharder, "LEAST_NUMEL", least_numel):
                self.plan = self.plan.in_parts()
        meeting = ServerRendezvous(store or dist.distributed_c10d._get_default_store(), PREFIX)
        device = Device()
        self.server: Server | None = None
        if serves and rank < servers:
            services = ShardServices(rank, self.plan, ParameterServerOptions(**rules), workers, codec)
            self.server = Server(services, meeting, device)
            self.server.start()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        module = None if least_numel is None else self.model
        self.client = Client(rank, self.plan, parameters, meeting, device, codec, module=module)
        self.clock = self.client.connect()

    @staticmethod
    def plan_of(servers: int = 1, kind: str = "adamw") -> ShardPlan:
        """Return the plan of the peers."""
        model = make_model()
        return _plan(model, make_optimizer(model, kind), servers)

    def begin(self) -> None:
        """Start from the first worker's parameters."""
        if self.client.worker == 0:
            self.client.load([{} for _ in self.plan.names])
        self.client.meet()

    def step(
        self, number: int, clip_norm: float | None = None, then: Callable[[nn.Module], None] = lambda _: None
    ) -> float:
        """Make one step of this worker; returns its loss. ``then`` is called after backward."""
        self.model.zero_grad()
        with self.client.watched():
            loss = loss_of(self.model, self.client.worker, number)
        self.client.begin()
        loss.backward()
        then(self.model)
        hyper = self.plan.hyper.read(self.optimizer.param_groups)
        norm = 0.0 if clip_norm is None else float(self.client.push(hyper).norm())
        self.client.step(hyper, coefficient=None if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6)))
        return loss.item()

    def end(self) -> Tensor:
        """Meet a last time, leave, and close the server; returns the parameters."""
        self.client.meet()
        self.client.leave()
        if self.server is not None:
            self.server.close()
        return flat(self.model)


def _plan(model: nn.Module, optimizer: torch.optim.Optimizer, servers: int) -> ShardPlan:
    return ShardPlan.of(optimizer, {id(p): name for name, p in model.named_parameters()}, servers)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def reference(workers: int, steps: int, kind: str = "adamw", clip_norm: float | None = None) -> Tensor:
    """Return the parameters of one process that averages the losses of all workers."""
    model = make_model()
    optimizer = make_optimizer(model, kind)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, worker, step) for worker in range(workers)) / workers).backward()  # type: ignore[union-attr]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return flat(model)
