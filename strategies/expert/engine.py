"""Expert parallelism: each rank holds some experts of every mixture-of-experts layer, and tokens are sent to them.

One call of an experts module, on every rank of the group (GShard, arXiv:2006.16668, without capacities: no tokens are
dropped or padded):

1. all-gather of token counts by destination rank and by expert (a few integers, also used for statistics),
2. two all-to-alls of tokens, expert indices and routing weights to the ranks of the experts; a token is sent to a rank
   once, however many of its experts are there,
3. the module's own forward, with one expert per row,
4. one all-to-all of each token's sums over a rank's experts, which are added up.

Backward mirrors this. The gradients of experts sum over the losses of the whole group, all others are of one rank's
loss. Experts' gradients are therefore divided by the group size, so that averaging over the ranks with the same
parameter is right for all.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.differentiable import LinearMap, all_to_all, linear, same
from trainwright.strategies.contract.collectives.flat import gather_parts
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import starred

_HALF = (torch.float16, torch.bfloat16)


def validate_experts(module: nn.Module, plan: ModelPlan, size: int) -> list[str]:
    """Return the problems of splitting the experts of ``module`` over ``size`` ranks.

    Needs no process group; the module may be on the meta device.

    Args:
        module: the LightningModule.
        plan: with the modules of experts.
        size: of the expert axis.
    """
    problems = []
    for name, style in plan.experts.items():
        if style == "listed":
            problems.append(
                f"expert={size} with experts in a list of modules ({starred(name)}); allowed are experts stacked in "
                "parameters with one row each, as in Hugging Face models and recipe=moe. Stack them, or use expert=1"
            )
            continue
        try:
            layer = _describe(module, name)
        except ValueError as error:
            problems.append(str(error))
            continue
        if layer.experts % size:
            sizes = [n for n in range(1, layer.experts + 1) if layer.experts % n == 0]
            problems.append(
                f"expert={size}, but {starred(name)} has {layer.experts} experts "
                f"(possible: {', '.join(map(str, sizes))})"
            )
    return list(dict.fromkeys(problems))


class ExpertParallel:
    """Expert parallelism of a module over a process group.

    Requires modules called as ``experts(tokens, index, weights)``: tokens ``(N, D)``, the experts of each ``(N, K)``
    (integers from 0), their weights ``(N, K)``; returning ``(N, D)`` in the dtype of the tokens. This is the interface
    of Hugging Face transformers 5 and of the recipe ``moe``. A row's result may depend only on the row, its expert and
    its weight, and must be additive over the experts of a token.

    Every rank of the group must call every layer equally often and in the same order, with any number of tokens, zero
    included. Experts without tokens get zero gradients, as in a stack on one process. Summation order is deterministic
    only under ``torch.use_deterministic_algorithms`` (CUDA's ``index_add``).

    Args:
        module: the LightningModule, or any module with the plan's names.
        plan: its ``experts`` name the modules; accepted by :func:`validate_experts`.
        group: ranks that share the experts, in the order of the experts.

    Attributes:
        cuts: parameter name -> its split, of which the strategy keeps this rank's part.
        dispatchers: of all layers, once applied.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, group: dist.ProcessGroup) -> None:
        self._group = group
        self._layers = [_describe(module, name) for name in plan.experts]
        self.cuts: dict[str, Cut] = {name: Cut(group, dim=0) for layer in self._layers for name in layer.parameters}
        self.dispatchers: tuple[Dispatcher, ...] = ()

    def apply(self) -> None:
        """Wrap the forward of every experts module in an exchange of tokens; idempotent."""
        if self.dispatchers:
            return
        self.dispatchers = tuple(Dispatcher(layer, self._group) for layer in self._layers)
        for dispatcher in self.dispatchers:
            dispatcher.layer.caller.forward = dispatcher

    def statistics(self) -> dict[str, float]:
        """Return the load balance of the group's training steps since the last call; empty if there were none.

        Equal on every rank of the group, without a collective. Recomputed activations count twice, which does not
        affect ratios.

        Returns:
            ``expert_imbalance``: tokens of the busiest expert over the mean; ``rank_imbalance``: the same for ranks;
            both averaged over layers and calls, 1 at best. ``busiest_expert``: the largest share of a layer's tokens
            that one expert got.
        """
        seen = [found for d in self.dispatchers if (found := d.loads.take()) is not None]
        if not seen:
            return {}
        # One transfer for all layers.
        expert, rank, busiest = torch.stack(seen).T
        values = torch.stack((expert.mean(), rank.mean(), busiest.max())).tolist()
        return dict(zip(("expert_imbalance", "rank_imbalance", "busiest_expert"), values, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Layers


@dataclass(frozen=True)
class _Layer:
    """A module of experts, whose parameters have one row per expert.

    Args:
        caller: the module whose forward takes tokens, index and weights.
        experts: number of experts in the whole model.
        parameters: fully qualified names.
        counters: names of integer attributes of ``caller`` that hold the number of experts.
    """

    caller: nn.Module
    experts: int
    parameters: tuple[str, ...]
    counters: tuple[str, ...]


def _describe(module: nn.Module, name: str) -> _Layer:
    holder = module.get_submodule(name)
    rows = {key: p.shape[0] if p.dim() else 0 for key, p in holder.named_parameters()}
    counters = _counters(holder)
    experts = max(counters.values(), default=next(iter(rows.values()), 0))
    odd = [f"{key} of shape {tuple(p.shape)}" for key, p in holder.named_parameters() if rows[key] != experts]
    if not rows or odd:
        lacks = f"{', '.join(odd)} does not have one row for each of {experts} experts"
        raise ValueError(
            f"{name} cannot be split by expert: {lacks if odd else 'it has no parameters'} (leave it out of "
            "plan.experts, or expert=1)"
        )
    _check_forward(holder, name)
    return _Layer(holder, experts, tuple(f"{name}.{key}" for key in rows), tuple(counters))


def _counters(holder: nn.Module) -> dict[str, int]:
    """Return integer attributes such as ``num_experts``."""
    return {
        key: value
        for key, value in vars(holder).items()
        if key in ("num_experts", "n_experts", "num_local_experts", "n_routed_experts") and isinstance(value, int)
    }


def _check_forward(caller: nn.Module, name: str) -> None:
    parameters = list(inspect.signature(type(caller).forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(positional) < 3 or len(needed) > 3:
        raise ValueError(
            f"{name} cannot be split by expert: its forward takes ({', '.join(p.name for p in parameters)}), but "
            "experts must be called with (tokens, index, weights) (write such a module around them, leave it out of "
            "plan.experts, or expert=1)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The exchange


@dataclass
class _Loads:
    """Load statistics of one layer, kept on the device to avoid synchronization."""

    ranks: int
    calls: int = 0
    tokens: Tensor | None = None
    peaks: Tensor | None = None

    @torch.no_grad()
    def add(self, tokens_E: Tensor) -> None:  # noqa: N803
        """Add a call with ``tokens_E`` tokens per expert."""
        total = tokens_E.sum().clamp(min=1).float()
        by_rank = tokens_E.view(self.ranks, -1).sum(1)
        peaks = torch.stack((tokens_E.max() * (len(tokens_E) / total), by_rank.max() * (self.ranks / total)))
        self.tokens = tokens_E if self.tokens is None else self.tokens + tokens_E
        self.peaks = peaks if self.peaks is None else self.peaks + peaks
        self.calls += 1

    def take(self) -> Tensor | None:
        """Return mean imbalance of experts and of ranks and the share of the busiest expert, and reset."""
        if self.tokens is None or self.peaks is None:
            return None
        share = self.tokens.max() / self.tokens.sum().clamp(min=1)
        found = torch.cat((self.peaks / self.calls, share[None]))
        self.tokens, self.peaks, self.calls = None, None, 0
        return found


@dataclass(frozen=True)
class TokenRoutes:
    """Destinations of this rank's tokens.

    Args:
        token: index of the token of each row to send, ``(R,)``, ordered by destination.
        destination: rank of each row, ``(R,)``.
        send: number of rows to each rank.
        receive: number of rows from each rank.
    """

    token: Tensor
    destination: Tensor
    send: list[int]
    receive: list[int]


@dataclass
class Dispatcher:
    """Forward of an experts module whose experts are distributed over ranks.

    Only :meth:`agree` and :meth:`places` depend on values, and can be replaced through ``answers``.

    Args:
        layer: description of the module.
        group: ranks that share its experts.

    Attributes:
        size: of the group.
        rank: in the group.
        per_rank: experts per rank.
        answers: object whose ``agree`` and ``places`` are used; by default itself.
    """

    layer: _Layer
    group: dist.ProcessGroup
    loads: _Loads = field(init=False)

    def __post_init__(self) -> None:
        forward = self.layer.caller.forward
        # An earlier run's dispatcher that was not removed must not send tokens again.
        self.compute: Callable[..., Tensor] = forward.compute if isinstance(forward, Dispatcher) else forward
        self._signature = inspect.signature(self.compute)
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.per_rank = self.layer.experts // self.size
        self.loads = _Loads(self.size)
        self.answers: Any = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Copy everything except the process group, so that a copied module uses its own parameters."""
        copied = memo[id(self)] = object.__new__(Dispatcher)
        for key, value in vars(self).items():
            setattr(copied, key, value if key == "group" else copy.deepcopy(value, memo))
        return copied

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Send tokens to their experts, compute the received ones, and return the results."""
        tokens, index, weights = self._arguments(args, kwargs)
        tokens_ND = tokens.reshape(-1, tokens.shape[-1])  # noqa: N806
        index_NK = index.reshape(-1, index.shape[-1])  # noqa: N806
        weights_NK = weights.reshape(-1, weights.shape[-1])  # noqa: N806
        routes: TokenRoutes = self.answers.agree(index_NK)
        exchange = (self.group, routes.send, routes.receive)
        # Their order fixes that of their backwards on every rank: autograd runs the last created first.
        routing = all_to_all(self._pack(index_NK, weights_NK, routes), *exchange)
        arrived_MD = all_to_all(tokens_ND[routes.token], *exchange)  # noqa: N806
        # Between these two factors, gradients are those of the group's mean loss.
        results_MD = self._compute_arrived(  # noqa: N806
            _scale_gradient(arrived_MD, self.size), _scale_gradient(routing, self.size), weights.dtype
        )
        results_MD = _scale_gradient(results_MD.to(tokens.dtype), 1 / self.size)  # noqa: N806
        returned = all_to_all(results_MD, self.group, routes.receive, routes.send)
        out_ND = _sum_rows(returned, routes.token, len(tokens_ND))  # noqa: N806
        # FSDP2 warns about modules that return a view.
        return out_ND if tokens.dim() == 2 else out_ND.view(tokens.shape)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        given = self._signature.bind(*args, **kwargs).arguments
        tokens, index, weights, *more = given.values()
        if more:
            raise TypeError(
                f"{type(self.layer.caller).__name__} was called with {', '.join(given)}; under expert parallelism it "
                "takes tokens, index and weights only."
            )
        return tokens, index, weights

    def agree(self, index_NK: Tensor) -> TokenRoutes:  # noqa: N803
        """Compute routes and exchange their counts with all ranks.

        Args:
            index_NK: experts of each of this rank's tokens, ``(N, K)``.
        """
        experts = self.layer.experts
        goes = index_NK.new_zeros(len(index_NK), self.size, dtype=torch.bool)
        goes.scatter_(1, index_NK // self.per_rank, True)
        flat = index_NK.flatten()
        tokens_E = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))  # noqa: N806
        own = torch.cat((goes.sum(0), tokens_E))
        table = gather_parts(own, self.group)
        tokens_E = table[:, self.size :].sum(0)  # noqa: N806
        if self.layer.caller.training:
            self.loads.add(tokens_E)
        # The only device synchronization of the exchange: all counts at once.
        send, receive = torch.stack((table[self.rank, : self.size], table[:, self.rank])).tolist()
        destination, token = goes.T.nonzero(as_tuple=True)
        return TokenRoutes(token, destination, send, receive)

    def _pack(self, index_NK: Tensor, weights_NK: Tensor, routes: TokenRoutes) -> Tensor:  # noqa: N803
        """Return weights and local experts of each row to send, ``(R, 2K)``; experts of other ranks are -1."""
        index_RK = index_NK[routes.token]  # noqa: N806
        is_there = index_RK // self.per_rank == routes.destination[:, None]
        # One tensor saves a collective; float32 is exact for indices up to 2^24.
        dtype = torch.promote_types(weights_NK.dtype, torch.float32)
        local_RK = (index_RK % self.per_rank).where(is_there, -1)  # noqa: N806
        weights_RK = weights_NK[routes.token].to(dtype).where(is_there, 0.0)  # noqa: N806
        return torch.cat((weights_RK, local_RK.to(dtype)), 1)

    def _compute_arrived(self, rows_MD: Tensor, routing: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: N803
        """Return the sum over this rank's experts for each received row, ``(M, D)``."""
        if not len(rows_MD):
            # Parameters and the exchange still need a gradient, or other ranks hang.
            return _connect(torch.zeros_like(rows_MD), (rows_MD, routing, *self.layer.caller.parameters()))
        weights_MK, local_MK = routing.chunk(2, 1)  # noqa: N806
        row, choice, index = self.answers.places(local_MK.detach())
        weights = weights_MK[row, choice].to(dtype)
        once = len(row) == len(rows_MD)  # each row has one expert on this rank: no gather needed
        results = self._call_local(rows_MD if once else rows_MD[row], index[:, None], weights[:, None])
        return results if once else _sum_rows(results, row, len(rows_MD))

    def places(self, local_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
        """Return the pairs of received rows and experts of this rank.

        Args:
            local_MK: this rank's experts of each row, ``(M, K)``; -1 for those of other ranks.

        Returns:
            For each pair: the row, the index of the expert among the row's choices, the local expert.
        """
        row, choice = (local_MK >= 0).nonzero(as_tuple=True)
        return row, choice, local_MK[row, choice].long()

    def _call_local(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Call the module's own forward with only this rank's experts."""
        with with_attributes(self.layer.caller, **dict.fromkeys(self.layer.counters, self.per_rank)):
            return self.compute(rows, index, weights)


def _sum_rows(rows: Tensor, target: Tensor, count: int) -> Tensor:
    """Add every row of ``rows`` to row ``target`` of zeros ``(count, D)``, in float32 at least."""
    dtype = torch.float32 if rows.dtype in _HALF else rows.dtype
    total = rows.new_zeros(count, rows.shape[1], dtype=dtype)
    return total.index_add(0, target, rows.to(dtype)).to(rows.dtype)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    return linear(x, same, lambda gradient: gradient * factor)


def _connect(x: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Return ``x`` and give the others zero gradients (multiplying by zero would turn inf into NaN)."""
    if not any(other.requires_grad for other in others):
        return x
    # Not the tensors, since FSDP2 frees gathered parameters until backward.
    forms = [(other.shape, other.dtype, other.device) for other in others]

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in forms)

    return cast(Tensor, LinearMap.apply(lambda x, *_: same(x), backward, x, *others))
