"""Tables of embeddings that parameter servers hold and step, beside a dense part that the ranks train themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.server.clocks import Rules
from trainwright.strategies.parameter_server.server.meeting import ServerMeeting
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.tables.lookups import Lookups, looks_up_alone
from trainwright.strategies.parameter_server.worker.client import Client


def find_tables(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters of these names.

    Raises:
        ValueError: if one is no weight of an embedding, or is used by another module, too.
    """
    embeddings = {
        f"{path}.weight" if path else "weight": part
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in embeddings:
            raise ValueError(
                f"placement: {name} is no table of an nn.Embedding or nn.EmbeddingBag, and servers hold such tables "
                "only in a hybrid layout. Choose a pattern that matches tables alone, or strategy=parameter_server, "
                "which serves all parameters."
            )
        tied = [other for other, p in parameters.items() if p is parameters[name] and other != name]
        if tied:
            raise ValueError(
                f"placement: {name} is {tied[0]} as well, which computes with all of its rows in every step. Leave it "
                "to the layout, or do not tie them."
            )
        if not looks_up_alone(embeddings[name]):
            raise ValueError(
                f"placement: {name} is the table of a {type(embeddings[name]).__name__}, whose forward is its own and "
                "may use all rows. Leave it to the layout, or use nn.Embedding or nn.EmbeddingBag."
            )
        if embeddings[name].max_norm is not None:
            raise ValueError(
                f"placement: {name} has max_norm={embeddings[name].max_norm}, which changes rows in the forward of "
                "each rank for itself. Leave max_norm out, or leave the table to the layout."
            )
    return {name: parameters[name] for name in names}


class ServedTables:
    """Some parameters of a module on parameter servers, in step with all ranks.

    The user's optimizer is kept: of what is served it sees no gradients, so it passes these parameters over; servers
    step them by an optimizer of the same class with the same options, which travel with each push. Its ``state_dict``
    holds the servers' states while it is made.

    While training a rank holds no table: before the forward of an embedding it pulls the rows of the batch, and pushes
    their gradients in the step. A parameter keeps its shape, and its memory is a single NaN.

    Args:
        module: the user's.
        tables: name -> parameter.
        optimizer: the user's, with these parameters among its groups.
        servers: how many; the first ranks hold one each.
        device: to make links over.
    """

    def __init__(
        self, module: nn.Module, tables: Mapping[str, nn.Parameter], optimizer: Optimizer, servers: int, device: Device
    ) -> None:
        self.optimizer = optimizer
        self.server: Server | None = None
        """The server that this rank holds, if it does."""
        self.outdated = False
        """Whether servers have yet to be given what was loaded."""
        names = {id(parameter): name for name, parameter in tables.items()}
        self.plan = ShardPlan.of(optimizer, names, servers, only=names)
        by_name = dict(tables)
        self.parameters = [by_name[name] for name in self.plan.names]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._lookups = Lookups(module, self.parameters)
        self._device = device
        self._client: Client | None = None
        self._coefficient: float | None = None  # of gradients that are pushed, but not stepped
        self._clip_value = 0.0
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._fetch()),
            optimizer.register_state_dict_post_hook(lambda *_: self._forget()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._reloaded()),
        ]

    # ---- beginning and end ------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """This rank's worker."""
        assert self._client is not None
        return self._client

    def start(self, rank: int, workers: int, meeting: ServerMeeting, barrier: Callable[[], Any]) -> None:
        """Start servers and workers; tables are those of the first rank."""
        if rank < len(self.plan.held):
            self.server = Server(rank, self.plan, Rules("sync"), meeting, workers, self._device)
            self.server.start()
        tables = range(len(self.parameters))
        self._client = Client(rank, self.plan, self.parameters, meeting, self._device, tables=tables)
        self._client.connect()
        self.upload(barrier)

    def upload(self, barrier: Callable[[], Any]) -> None:
        """Give the servers the first rank's tables and the states that were loaded. A collective."""
        if self.client.worker == 0:
            self.client.load([dict(self.optimizer.state.get(parameter, {})) for parameter in self.parameters])
        self.outdated = False
        self._forget()
        barrier()  # nobody pulls before the servers have it
        self.client.free()
        self._lookups.begin(self._look_up)

    def retire(self, barrier: Callable[[], Any]) -> None:
        """Keep tables and states here, and let the servers go. A collective."""
        self.bring_back()
        self._fetch()
        self._remove_hooks()
        barrier()  # nobody leaves before all have what they need
        self.client.leave()
        if self.server is not None:
            self.server.close()
        self._client = self.server = None

    def stop(self) -> None:
        """Hang up at once; the others hear of it."""
        self._remove_hooks()
        self._lookups.end()
        client, server = self._client, self.server
        self._client = self.server = None
        if client is not None:
            client.drop()
        if server is not None:
            server.close()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- states -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        if self._client is None or self.outdated:
            return
        for parameter, state in zip(self.parameters, self._client.state(), strict=True):
            if state:
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in state.items()
                }

    def _forget(self) -> None:
        if self.outdated or self._client is None:
            return
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)

    def _reloaded(self) -> None:
        self.bring_back()
        self.outdated = True

    def wholes(self) -> dict[str, Tensor]:
        """The tables by name, whole, in memory of their own on the device of this rank."""
        found = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.parameters]
        self.client.pull(found)
        self.client.free()
        return dict(zip(self.plan.names, found, strict=True))

    def bring_back(self) -> None:
        """Let the module hold its tables itself until the next :meth:`upload`."""
        if self._client is None or not self._lookups.running:
            return
        wholes = self.wholes()
        self._lookups.end()
        for name, parameter in zip(self.plan.names, self.parameters, strict=True):
            parameter.data = wholes[name]

    def _look_up(self, parameter: nn.Parameter, numbers: Tensor) -> Tensor:
        index = self._index[id(parameter)]
        return self.client.pull_rows(index, numbers.cpu()).to(parameter.device, parameter.dtype)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def squares(self) -> float:
        """Push gradients, and hear the squared norm of their average over all ranks."""
        return float(self.client.push(self.plan.hyper.read(self.optimizer.param_groups)).double().square().sum())

    def clip(self, coefficient: float) -> None:
        """Scale what :meth:`squares` has pushed in the coming step."""
        self._coefficient = coefficient

    def clip_value(self, limit: float) -> None:
        """Clamp the elements of the averaged gradient in the coming step."""
        self._clip_value = limit

    def step(self) -> None:
        """Let servers make their step, unless nothing is to be made of the gradients; the optimizer sees none."""
        clip_value, self._clip_value = self._clip_value, 0.0
        coefficient, self._coefficient = self._coefficient, None
        self.client.step(self.plan.hyper.read(self.optimizer.param_groups), clip_value, coefficient, pulls=False)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Let the user's optimizer pass the tables over."""
        for parameter in self.parameters:
            parameter.grad = None


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
