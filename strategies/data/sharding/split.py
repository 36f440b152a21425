"""How FSDP2 splits a module, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainwright.strategies.contract.part import Host
from trainwright.strategies.data.sharding.gathered_writes import GatheredWrites
from trainwright.strategies.data.sharding.gradient_hooks import hooks_of, run_when_gathered
from trainwright.strategies.data.sharding.step import CallsOutside, Step
from trainwright.strategies.plan.deferred import Piece, deferred_pieces, is_deferred
from trainwright.strategies.state.wholes import shard_weights_on_load


class Splits(Host, Protocol):
    """What a strategy says of how a module is split."""

    def _fsdp_options(self, module: nn.Module) -> dict[str, Any]: ...

    def _shard_within(self, block: nn.Module, options: Mapping[str, Any]) -> None: ...

    def _fill(self, pieces: Iterable[Piece], seed: int, real: dict[Tensor, Tensor]) -> None: ...

    def _agreed_seed(self) -> int: ...

    def _broadcast_from_first(self, module: nn.Module) -> None: ...


def split_module(strategy: Splits, module: nn.Module, blocks: Mapping[str, nn.Module]) -> Step:
    """Split a module by FSDP2, one block at a time, so that at most one block is ever whole here because of us.

    Args:
        strategy: see :class:`Splits`.
        module: the user's, or a copy of it.
        blocks: of the module by name, in order.
    """
    pieces = deferred_pieces(module) if is_deferred(module) else []
    seed = strategy._agreed_seed() if pieces else 0
    real: dict[Tensor, Tensor] = {}
    options = strategy._fsdp_options(module)
    _refuse_shared(blocks)
    for name, block in blocks.items():
        strategy._fill([piece for piece in pieces if piece.overlaps(name)], seed, real)
        pieces = [piece for piece in pieces if not piece.overlaps(name)]
        _place(strategy, block)
        hooks = hooks_of(_whole_in(block))
        strategy._shard_within(block, options)
        fully_shard(block, **options)
        run_when_gathered(block, hooks)
    strategy._fill(pieces, seed, real)
    step = Step(module)
    _place(strategy, step)
    hooks = hooks_of(_whole_in(step))
    fully_shard(step, **{**options, "reshard_after_forward": False})
    run_when_gathered(step, hooks)
    step.writes = GatheredWrites(step._get_fsdp_state())
    shard_weights_on_load(module)
    CallsOutside(step, module, blocks.values())
    object.__setattr__(module, "_trainwright_step", step)
    return step


def _place(strategy: Splits, module: nn.Module) -> None:
    """Convert, move and equalise what of ``module`` is not split yet."""
    with torch.no_grad():
        strategy.precision_plugin.convert_module(module)
        for sub in module.modules():
            for parameter in sub._parameters.values():
                if parameter is not None and not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(strategy.root_device)
            for name, buffer in sub._buffers.items():
                if buffer is not None:
                    sub._buffers[name] = buffer.to(strategy.root_device)
    strategy._broadcast_from_first(module)


def _whole_in(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where parameters of ``module`` are registered that are not split yet."""
    for owner in module.modules():
        yield from (
            (owner, name) for name, p in owner._parameters.items() if p is not None and not isinstance(p, DTensor)
        )


def _refuse_shared(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse parameters of several blocks: each block gathers and frees its own."""
    seen: dict[nn.Parameter, str] = {}
    for name, block in blocks.items():
        for key, parameter in block.named_parameters():
            other = seen.setdefault(parameter, name)
            if other != name:
                raise ValueError(
                    f"The blocks {other} and {name} share the parameter {key}, and ZeRO-3 gathers and frees each block "
                    "by itself. Use strategy=zero2, or name larger blocks that share nothing in strategy.blocks."
                )


def warn_without_blocks(name: str) -> None:
    """Warn that a module, of a class of this name, is gathered all at once."""
    rank_zero_warn(
        f"{name} has no repeated blocks that ZeRO-3 could gather one after the other, so all its parameters are "
        "gathered together: each rank holds the whole model during a step, and only gradients and optimizer state are "
        "split all the time. Name blocks with strategy.blocks=['model.layers.*'], or use strategy=zero2."
    )


def explain(exception: BaseException) -> None:
    """Say what to do when a split parameter was used where it is not gathered."""
    if "got mixed torch.Tensor and DTensor" in str(exception):
        exception.add_note(
            "ZeRO-3 keeps the parameters of a block split (as DTensors) except while the forward of that block "
            "runs, and all others except during a step or a call of the module; here one was used elsewhere. Use "
            "parameter.full_tensor() there, or take strategy=zero2, which keeps all parameters whole."
        )
    if "FSDP does not support deepcopy" in str(exception):
        exception.add_note(
            "Ranks hold parts of this module, and a copy would hold parts. Copy it before fit (in __init__ or "
            "configure_model), average with Lightning's EMAWeightAveraging, or take strategy=zero2."
        )
