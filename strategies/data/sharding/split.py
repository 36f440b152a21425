"""Sharding of a module by FSDP2, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from trainwright.core.lightning_internals import _update_properties
from trainwright.strategies.base.parameter_memory import apply_beside, keep_in_place
from trainwright.strategies.contract.precision import autocast_dtype, named_dtype
from trainwright.strategies.data.sharding.float8 import Scales, float8_layers, gather_in_float8
from trainwright.strategies.data.sharding.gathered_writes import GatheredWrites
from trainwright.strategies.data.sharding.gathering import all_parameter_groups
from trainwright.strategies.data.sharding.gradient_hooks import hooks_of, run_when_gathered
from trainwright.strategies.data.sharding.rounded import exchanged_rounded, gather_rounded
from trainwright.strategies.data.sharding.step import GatherOnCall, Step, existing_step
from trainwright.strategies.plan.deferred import deferred_pieces, is_deferred
from trainwright.strategies.state.wholes import shard_weights_on_load


class Splitter:
    """Shards a module by FSDP2, one block at a time, so that at most one block is whole.

    Args:
        strategy: of the module.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def split(self, trainer: Trainer) -> Step:
        """Shard the module of a run and the copies that callbacks made of it.

        Raises:
            ValueError: if it is sharded already or gained parameters since an earlier run, or if blocks share some.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        earlier = existing_step(module)
        if earlier is not None:  # another run with an already sharded module
            _refuse_new(module, earlier.whole)
            move = move_whole if strategy.options.offload == "parameters" else nn.Module.to
            if any(each.device != strategy.root_device for each in earlier.parameters()):
                move(earlier, strategy.root_device)  # from the host, where the earlier run has left it
            _update_properties(earlier, device=strategy.root_device)
            return earlier
        if any(isinstance(p, DTensor) for p in module.parameters()):
            raise ValueError("The parameters are DTensors: leave sharding to the strategy, or build the module anew.")
        blocks = strategy._find_blocks()
        if not blocks:
            _warn_without_blocks(type(module).__name__)
        strategy._blocks.prepare(module, blocks)
        step = self._split_module(module, blocks)
        for average in averaged_copies(trainer):
            # Sharded alike, averages are updated shard by shard.
            self._split_module(average, {name: average.get_submodule(name) for name in blocks})
        return step

    def _split_module(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> Step:
        strategy = self._strategy
        pieces = deferred_pieces(module) if is_deferred(module) else []
        seed = strategy._agreed_seed() if pieces else 0
        real: dict[Tensor, Tensor] = {}
        options = self._options(module)
        _refuse_shared(blocks)
        keep_in_place(module)
        for name, block in blocks.items():
            strategy._fill([piece for piece in pieces if piece.overlaps(name)], seed, real)
            pieces = [piece for piece in pieces if not piece.overlaps(name)]
            _place(strategy, block)
            hooks = hooks_of(_whole_in(block))
            self._split_block(block, _alike(block, options))
            run_when_gathered(block, hooks)
        strategy._fill(pieces, seed, real)
        step = Step(module)
        _place(strategy, step)
        hooks = hooks_of(_whole_in(step))
        fully_shard(step, **{**_alike(step, options), "reshard_after_forward": False})
        step.whole = {p for p in module.parameters() if not isinstance(p, DTensor)}
        _update_properties(step, device=strategy.root_device)
        for each in (each for group in all_parameter_groups(step) for each in group.fsdp_params):
            # It would take the whole weights that a hook of the user loads for the shards.
            each._post_load_hook_handle.remove()
        run_when_gathered(step, hooks)
        step.writes = GatheredWrites(step._get_fsdp_state())
        step.scales = Scales.of(step)
        shard_weights_on_load(module)
        GatherOnCall(step, module, blocks.values())
        object.__setattr__(module, "_trainwright_step", step)
        return step

    def _split_block(self, block: nn.Module, options: Mapping[str, Any]) -> None:
        dtype = autocast_dtype(self._strategy.precision_plugin)
        float8 = float8_layers(block)
        rounded = exchanged_rounded(block, self._strategy.options.param_dtype) if dtype else {}
        rounded = {name: p for name, p in rounded.items() if name not in float8}
        if rounded:
            # FSDP2 would reduce gradients of rounded weights in 16 bit.
            stored = next((p.dtype for p in block.parameters() if p.requires_grad), torch.float32)
            options = {**options, "mp_policy": self._policy(stored)}
        self._split_within(block, options)
        fully_shard(block, **options)
        if rounded and dtype:
            gather_rounded(block, rounded, dtype)
        gather_in_float8(block, float8)

    def _policy(self, reduced_in: torch.dtype | None) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(reduce_dtype=named_dtype(self._strategy.options.reduce_dtype) or reduced_in)

    def _split_within(self, block: nn.Module, options: Mapping[str, Any]) -> None:
        """Shard modules of ``block`` that use other ranks than the rest: none in plain ZeRO."""

    def _options(self, module: nn.Module) -> dict[str, Any]:
        offloads, tables = self._strategy.options.offload == "parameters", self._strategy.tables
        return {
            "mesh": self._splitting(self._strategy.mesh),
            "mp_policy": self._policy(None),
            "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if offloads else OffloadPolicy(),
            # FSDP2 cannot shard a scalar; it stays whole and is averaged by the reducer.
            "ignored_params": {p for p in module.parameters() if p.dim() == 0 or tables.has(p)},
        }

    def _splitting(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return FSDP2's mesh: without replicas if their average is computed separately."""
        if not self._strategy.averaging.after_backward or mesh.ndim == 1:
            return mesh
        assert mesh.mesh_dim_names is not None
        return mesh[mesh.mesh_dim_names[-1]]


def averaged_copies(trainer: Trainer) -> Iterator[nn.Module]:
    """Yield the copies that averaging callbacks made of the whole module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average = callback._average_model
            if average is not None:
                yield average.module if isinstance(average, AveragedModel) else average


def _place(strategy: Any, module: nn.Module) -> None:
    """Convert, move and broadcast the parameters of ``module`` that are not sharded yet."""
    with torch.no_grad():
        strategy.precision_plugin.convert_module(module)
        move_whole(module, strategy.root_device)
    strategy._broadcast_from_first(module)


def move_whole(module: nn.Module, device: torch.device) -> None:
    """Move ``module`` to ``device``, except for parameters that are sharded already."""
    apply_beside(module, lambda tensor: tensor.to(device))


def _whole_in(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield owner and name of the parameters of ``module`` that are not sharded yet."""
    for owner in module.modules():
        yield from (
            (owner, name) for name, p in owner._parameters.items() if p is not None and not isinstance(p, DTensor)
        )


def _alike(module: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``fully_shard`` that leave trained parameters of another dtype than most whole.

    FSDP2 reduces the gradients of a module in one dtype. Those left whole are averaged by the reducer.
    """
    ignored: set[nn.Parameter] = options["ignored_params"]
    trained = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor) and p not in ignored]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in trained:
        sizes[parameter.dtype] += parameter.numel()
    most = [dtype for dtype, _ in sizes.most_common(1)]
    return {**options, "ignored_params": ignored | {p for p in trained if p.dtype not in most}}


def _refuse_new(module: nn.Module, whole: Set[nn.Parameter]) -> None:
    """Raise if a module gained parameters after it was sharded: they would not be averaged."""
    new = [n for n, p in module.named_parameters() if p.dim() and p not in whole and not isinstance(p, DTensor)]
    if new:
        raise ValueError(
            f"{', '.join(new[:4])}{' and others' if new[4:] else ''}: new since an earlier run split this module, and "
            "ZeRO-3 splits a module once. Build the module anew with these layers and load the weights of a checkpoint "
            "of the earlier run (init_from=..., strict=false), or use strategy=zero2."
        )


def _refuse_shared(blocks: Mapping[str, nn.Module]) -> None:
    """Raise if blocks share parameters: each block gathers and frees its own."""
    seen: dict[nn.Parameter, str] = {}
    for name, block in blocks.items():
        for key, parameter in block.named_parameters():
            other = seen.setdefault(parameter, name)
            if other != name:
                raise ValueError(
                    f"The blocks {other} and {name} share the parameter {key}, and ZeRO-3 gathers and frees each block "
                    "by itself. Use strategy=zero2, or name larger blocks that share nothing in strategy.blocks."
                )


def _warn_without_blocks(name: str) -> None:
    rank_zero_warn(
        f"{name} has no repeated blocks that ZeRO-3 could gather one by one, so all its parameters are gathered "
        "together: each rank holds the whole model during a step, and only gradients and optimizer state stay split. "
        "Name blocks with strategy.blocks=['model.layers.*'], or use strategy=zero2."
    )


def explain(exception: BaseException) -> None:
    """Add notes on what to type to errors caused by sharded parameters."""
    if "got mixed torch.Tensor and DTensor" in str(exception):
        exception.add_note(
            "ZeRO-3 keeps the parameters of a block split (as DTensors) except while the forward of that block "
            "runs, and all others except during a step or a call of the module; here one was used elsewhere. Use "
            "parameter.full_tensor() there, or take strategy=zero2, which keeps all parameters whole."
        )
    if isinstance(exception, RuntimeError) and any(name in str(exception) for name in ("BFloat16", "Half")):
        exception.add_note(
            "With bf16-mixed and 16-mixed, ZeRO-3 gathers weights of linear layers and convolutions in 16 bit, as "
            "autocast rounds them. Where a block turns autocast off and uses them, type strategy.param_dtype=fp32."
        )
    if "FSDP does not support deepcopy" in str(exception):
        exception.add_note(
            "Ranks hold parts of this module, and a copy would hold parts. Copy it before fit (in __init__ or "
            "configure_model), average with Lightning's EMAWeightAveraging, or take strategy=zero2."
        )
