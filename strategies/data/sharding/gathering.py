"""Depth of FSDP2's parameter prefetch.

By itself, FSDP2 gathers the next block while one computes on CUDA, and waits for each on the CPU. A depth sets how many
blocks are gathered ahead, in both directions, on any device. Unused gathered parameters are dropped before weights
change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainwright.core.torch_internals import TrainingState
from trainwright.strategies.contract.communication.advice import BACKWARD_SHARE, MeasuredLink
from trainwright.strategies.contract.communication.prefetch_depth import MOST_AHEAD, BlockTimes, best_depth


def gather_ahead(root: nn.Module, depth: int) -> None:
    """Gather ``depth`` blocks ahead of the one that computes; may be called again between two steps.

    Args:
        root: split by ``fully_shard``, like its blocks and possibly modules within them. Forward is expected to run
            blocks in module order; another order costs time only.
        depth: 0 gathers each block when it is needed.
    """
    units = [_split_within(block) for block in split_blocks(root)]
    for index, unit in enumerate(units):
        following = [module for later in units[index + 1 : index + 1 + depth] for module in later]
        before = [module for earlier in reversed(units[max(index - depth, 0) : index]) for module in earlier]
        block, *within = unit
        block.set_modules_to_forward_prefetch(following)
        # An empty list would restore FSDP2's default order; an already gathered module is a no-op.
        block.set_modules_to_backward_prefetch([block, *(within if depth else []), *before])
        for module in within:
            module.set_modules_to_backward_prefetch([module])
    assert isinstance(root, FSDPModule)
    root.set_modules_to_forward_prefetch([module for unit in units[:depth] for module in unit])
    last = units[-1] if depth and units else []
    root.set_modules_to_backward_prefetch([root, *last])
    # On CUDA, a gather on its side stream already runs ahead, so depth 0 must gather on the compute stream; on the CPU
    # only asynchronous operations overlap.
    root._set_unshard_async_op(depth == 0 or computing_device(root).type == "cpu")


def computing_device(root: nn.Module) -> torch.device:
    """Return the device that gathers the parameters of ``root``; offloaded ones are in host memory meanwhile."""
    parameter = next(root.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def fastest_depth(root: nn.Module, link: MeasuredLink, compute: float, reduces: bool) -> tuple[int | None, str]:
    """Choose and set the prefetch depth with the least predicted wait. A collective.

    Args:
        root: split by ``fully_shard``.
        link: between the ranks that share parameters.
        compute: seconds of computing of a micro-batch.
        reduces: whether gradients are reduced in each micro-batch.

    Returns:
        The depth and its description; ``None`` and an empty string without blocks.
    """
    blocks = split_blocks(root)
    if not blocks:
        return None, ""
    device = computing_device(root)
    size, gathered = max(map(whole_bytes, blocks)), max(map(gathered_bytes, blocks))
    passes = compute / len(blocks)
    times = BlockTimes(
        blocks=len(blocks),
        forward=(1 - BACKWARD_SHARE) * passes,
        backward=BACKWARD_SHARE * passes,
        gather=link.seconds("all_gather", gathered),
        reduce=link.seconds("reduce_scatter", size) if reduces else 0.0,
    )
    room = torch.tensor(1 + int(min(_free_bytes(device) / gathered, MOST_AHEAD)), device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)  # ranks must gather in the same order
    depth = best_depth(times, int(room.item()))
    gather_ahead(root, depth)
    usual = times.waits(0 if device.type == "cpu" else 1)
    chosen = (
        f"communication=auto gathers {depth} block(s) ahead from now on: predicted waits per micro-batch are "
        f"{times.waits(depth) * 1e3:.3g} ms, {usual * 1e3:.3g} ms without."
    )
    rank_zero_info(chosen)
    return depth, chosen


def _free_bytes(device: torch.device) -> float:
    """Return the free memory of a device; infinite for host memory."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def split_blocks(root: nn.Module) -> list[FSDPModule]:
    """Return the outermost modules below ``root`` that are split by themselves, in module order."""
    found: list[FSDPModule] = []
    for child in root.children():
        found += [child] if isinstance(child, FSDPModule) else split_blocks(child)
    return found


def _split_within(block: FSDPModule) -> list[FSDPModule]:
    """Return the block and the modules within it that are split by themselves (experts)."""
    assert isinstance(block, nn.Module)
    return [module for module in block.modules() if isinstance(module, FSDPModule)]


def gathered_bytes(block: FSDPModule) -> int:
    """Return the bytes of a block's parameters as FSDP2 gathers them, some in 8 or 16 bit, including nested modules."""
    assert isinstance(block, nn.Module)
    parameters = [each for group in all_parameter_groups(block) for each in group.fsdp_params]
    return sum(each._orig_size.numel() * _gathered_dtype(each).itemsize for each in parameters)


def _gathered_dtype(parameter: Any) -> torch.dtype:
    found: torch.dtype = getattr(parameter, "gathered_dtype", parameter.param_dtype or parameter.orig_dtype)
    return found


def whole_bytes(block: FSDPModule) -> int:
    """Return the bytes of a block's parameters as stored, including nested modules."""
    assert isinstance(block, nn.Module)
    return sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())


def drop_prefetched(root: nn.Module) -> None:
    """Drop prefetched parameters of blocks that did not run, before weights change."""
    assert isinstance(root, FSDPModule)
    for group in all_parameter_groups(root):
        drop_gathered(group)


def shard_after_error(module: nn.Module) -> None:
    """Drop what a step that an error has ended left gathered, so that the state can be saved."""
    step = vars(module).get("_trainwright_step")
    if step is not None:
        shard_again(step)


def shard_again(root: Any) -> None:
    """Drop gathered parameters, and what a step that an error has ended left in FSDP2: the next one starts anew.

    More than ``reset_iter_state`` of torch 2.13, which leaves the gradients of gathered parameters.
    """
    root_state = root._get_fsdp_state()
    if root_state._is_root is None:
        return  # no step has begun
    root_state._comm_ctx.post_forward_order.clear()
    context = root_state._state_ctx
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    for state in context.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
    for group in all_parameter_groups(root):
        drop_gathered(group)
        group._training_state = TrainingState.IDLE  # in a forward, FSDP2 would keep them
        group._post_forward_indices.clear()
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it was gathered
                parameter._unsharded_param.grad = None
        group.reshard()


def drop_gathered(group: Any) -> None:
    """Drop the prefetched parameters of one FSDP2 parameter group."""
    gathered = group._all_gather_result
    if gathered is None:
        return
    if gathered.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(gathered.all_gather_event)
    if isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    group._all_gather_result = None


def all_parameter_groups(root: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of a module and its submodules."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from parameter_groups(module._get_fsdp_state())


def parameter_groups(state: Any) -> Sequence[Any]:
    """Return FSDP2's parameter groups of one module; torch 2.13 allows several."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several  # type: ignore[no-any-return]
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
