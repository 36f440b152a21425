"""Embedding tables on parameter servers, beside a dense part trained by the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.services import ShardServices
from trainwright.strategies.parameter_server.server.shard import ShardPlan, put_states, states_of
from trainwright.strategies.parameter_server.worker.client import Client


def find_tables(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of these names.

    Raises:
        ValueError: if one is not the weight of an embedding, or is shared with another module.
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
                f"placement: {name} is no table of an nn.Embedding or nn.EmbeddingBag, and in a hybrid layout servers "
                "hold only such tables. Choose a pattern that matches tables only, or strategy=parameter_server."
            )
        tied = [other for other, p in parameters.items() if p is parameters[name] and other != name]
        if tied:
            raise ValueError(
                f"placement: {name} is tied to {tied[0]}, which computes with all of its rows in every step. Leave it "
                "to the layout, or do not tie them."
            )
        if not has_standard_forward(embeddings[name]):
            raise ValueError(
                f"placement: {name} is the table of a {type(embeddings[name]).__name__}, whose custom forward may use "
                "all rows. Leave it to the layout, or use nn.Embedding or nn.EmbeddingBag."
            )
        if embeddings[name].max_norm is not None:
            raise ValueError(
                f"placement: {name} has max_norm={embeddings[name].max_norm}, which changes rows locally in each "
                "rank's forward. Leave max_norm out, or leave the table to the layout."
            )
    return {name: parameters[name] for name in names}


class ServedTables:
    """Parameters of a module on parameter servers, stepped synchronously with all ranks.

    The user's optimizer sees no gradients of served parameters and skips them; servers step them by an optimizer of the
    same class and options, which are sent with each push. Its ``state_dict`` includes the servers' states.

    While training no rank holds a table: before the forward of an embedding it pulls the rows of the batch, and pushes
    their gradients in the step. A parameter keeps its shape, and its memory is a single NaN.

    Args:
        module: the user's.
        tables: name -> parameter.
        optimizer: the user's, with these parameters in its groups.
        servers: number of servers, one on each of the first ranks.
        device: of links.
    """

    def __init__(
        self, module: nn.Module, tables: Mapping[str, nn.Parameter], optimizer: Optimizer, servers: int, device: Device
    ) -> None:
        self.optimizer = optimizer
        self.server: Server | None = None
        """Server on this rank, if any."""
        self.outdated = False
        """True if loaded values must be uploaded to servers."""
        names = {id(parameter): name for name, parameter in tables.items()}
        self.plan = ShardPlan.of(optimizer, names, servers, only=names)
        self.parameters = [tables[name] for name in self.plan.names]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._lookups = Lookups(module, self.parameters)
        self._device = device
        self._client: Client | None = None
        self.coefficient: float | None = None
        """Scales the gradients pushed by :meth:`squares` in the next step."""
        self.clip_value = 0.0
        """Clamps the elements of the averaged gradient in the next step; 0: off."""
        self._hooks = ExitStack()
        self._hooks.enter_context(optimizer.register_state_dict_pre_hook(lambda _: self._fetch()))
        self._hooks.enter_context(optimizer.register_state_dict_post_hook(lambda *_: self._forget()))
        self._hooks.enter_context(optimizer.register_load_state_dict_post_hook(lambda _: self._reloaded()))

    # ---- beginning and end ------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """This rank's client."""
        assert self._client is not None
        return self._client

    def start(self, rank: int, workers: int, meeting: ServerRendezvous, barrier: Callable[[], Any]) -> None:
        """Start servers and workers with the first rank's tables."""
        if rank < len(self.plan.held):
            services = ShardServices(rank, self.plan, ParameterServerOptions(), workers)
            self.server = Server(services, meeting, self._device)
            self.server.start()
        tables = range(len(self.parameters))
        self._client = Client(rank, self.plan, self.parameters, meeting, self._device, tables=tables)
        self._client.connect()
        self.upload(barrier)

    def upload(self, barrier: Callable[[], Any]) -> None:
        """Send the first rank's tables and loaded states to the servers. A collective."""
        if self.client.worker == 0:
            self.client.load(states_of(self.optimizer, self.parameters))
        self.outdated = False
        self._forget()
        barrier()  # no pull before the servers have them
        self.client.free()
        self._lookups.begin(self._look_up)

    def retire(self, barrier: Callable[[], Any]) -> None:
        """Fetch tables and states, and stop the servers. A collective."""
        self.bring_back()
        self._fetch()
        self._hooks.close()
        barrier()  # no rank leaves before all have what they need
        self.client.leave()
        if self.server is not None:
            self.server.close()
        self._client = self.server = None

    def stop(self) -> None:
        """Disconnect at once; other ranks notice."""
        self._hooks.close()
        self._lookups.end()
        client, server = self._client, self.server
        self._client = self.server = None
        if client is not None:
            client.drop()
        if server is not None:
            server.close()

    # ---- states -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        if self._client is not None and not self.outdated:
            put_states(self.optimizer, self.parameters, self._client.state())

    def _forget(self) -> None:
        if self._client is not None and not self.outdated:
            for parameter in self.parameters:
                self.optimizer.state.pop(parameter, None)

    def _reloaded(self) -> None:
        self.bring_back()
        self.outdated = True

    def wholes(self) -> dict[str, Tensor]:
        """Return the whole tables by name, as copies on this rank's device."""
        found = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.parameters]
        self.client.pull(found)
        self.client.free()
        return dict(zip(self.plan.names, found, strict=True))

    def bring_back(self) -> None:
        """Let the module hold its tables until the next :meth:`upload`."""
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
        """Push gradients; returns the squared norm of their average over ranks."""
        return float(self.client.push(self.plan.hyper.read(self.optimizer.param_groups)).double().square().sum())

    def step(self) -> None:
        """Let servers step the tables; the user's optimizer sees no gradients of them."""
        clip_value, self.clip_value = self.clip_value, 0.0
        coefficient, self.coefficient = self.coefficient, None
        self.client.step(self.plan.hyper.read(self.optimizer.param_groups), clip_value, coefficient, pulls=False)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Clear gradients, so that the user's optimizer skips the tables."""
        for parameter in self.parameters:
            parameter.grad = None


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Scale gradients in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)


# ---- embeddings that fetch the rows of a batch from a remote table --------------------------------------------------

Embedding = nn.Embedding | nn.EmbeddingBag
# Returns rows ``(k, dim)`` of a table, given ascending row indices, int64 ``(k,)``.
Source = Callable[[nn.Parameter, Tensor], Tensor]


def has_standard_forward(part: Embedding) -> bool:
    """Return whether an embedding has torch's forward, which reads the rows of its input only."""
    return type(part).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)


class Lookups:
    """Embeddings of some tables.

    Args:
        module: that has them.
        tables: their weights.
    """

    def __init__(self, module: nn.Module, tables: Sequence[nn.Parameter]) -> None:
        ids = {id(table) for table in tables}
        self._parts = [p for p in module.modules() if isinstance(p, Embedding) and id(p.weight) in ids]
        self.running = False
        """True if rows come from a source."""

    def begin(self, source: Source) -> None:
        """Free the tables and fetch rows from ``source``; gradients become sparse."""
        for part in self._parts:
            table: Any = part.weight
            # NaN, so that other reads are noticed.
            table.data = torch.full((), torch.nan, dtype=table.dtype, device=table.device).expand(table.shape)
            part.__dict__["forward"] = partial(_forward, part, source)
        self.running = True

    def end(self) -> None:
        """Read local tables again."""
        for part in self._parts:
            part.__dict__.pop("forward", None)
        self.running = False


@torch.compiler.disable
def _forward(part: Embedding, source: Source, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    table: Any = part.weight
    numbers, places = torch.unique(ids, return_inverse=True)
    numbers = numbers.long()
    if numbers.numel() and not 0 <= int(numbers[0]) <= int(numbers[-1]) < part.num_embeddings:
        raise IndexError(
            f"index out of range: rows {int(numbers[0])} to {int(numbers[-1])} of a table of {part.num_embeddings}"
        )
    rows = source(table, numbers)
    if torch.is_grad_enabled() and table.requires_grad:
        rows.requires_grad_()
        rows.register_post_accumulate_grad_hook(partial(_hand_over, table, numbers))
    return _look_up(part, rows, places, _place_of(numbers, part.padding_idx), *args, **kwargs)


def _look_up(
    part: Embedding,
    rows: Tensor,
    places: Tensor,
    padding: int | None,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    by_frequency = part.scale_grad_by_freq
    if isinstance(part, nn.Embedding):
        return F.embedding(places, rows, padding, scale_grad_by_freq=by_frequency)
    return F.embedding_bag(
        places,
        rows,
        offsets,
        scale_grad_by_freq=by_frequency,
        mode=part.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=part.include_last_offset,
        padding_idx=padding,
    )


def _place_of(numbers: Tensor, row: int | None) -> int | None:
    """Return the position of a row among the fetched ones, or ``None``."""
    if row is None:
        return None
    found = (numbers == row).nonzero()
    return int(found[0]) if len(found) else None


def _hand_over(table: nn.Parameter, numbers: Tensor, rows: Tensor) -> None:
    """Add the gradient of rows to that of their table, as a sparse tensor."""
    assert rows.grad is not None
    gradient = torch.sparse_coo_tensor(numbers[None], rows.grad, table.shape, is_coalesced=True)
    rows.grad = None
    table.grad = gradient if table.grad is None else (table.grad + gradient).coalesce()
