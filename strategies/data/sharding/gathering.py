"""How far ahead of a block's computing FSDP2 gathers the parameters of those that follow it.

FSDP2 by itself begins with the next block while one computes, on CUDA; on the CPU it waits for each. A depth says how
many blocks ahead are asked for, in both directions, whatever the device. What was gathered and not used is let go of
before weights change.
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

from trainwright.strategies.contract.communication.advice import BACKWARD_SHARE, MeasuredLink
from trainwright.strategies.contract.communication.prefetch_depth import MOST_AHEAD, BlockTimes, best_depth


def gather_ahead(root: nn.Module, depth: int) -> None:
    """Let ``depth`` blocks be gathered ahead of the one that computes; may be called again between two steps.

    Args:
        root: split by ``fully_shard``, like each of its blocks and perhaps modules within them. Forward is taken to
            run blocks in the order of the module; another one costs time, no exactness.
        depth: 0 gathers each when it is needed.
    """
    units = [_split_within(block) for block in split_blocks(root)]
    for index, unit in enumerate(units):
        following = [module for later in units[index + 1 : index + 1 + depth] for module in later]
        before = [module for earlier in reversed(units[max(index - depth, 0) : index]) for module in earlier]
        block, *within = unit
        block.set_modules_to_forward_prefetch(following)
        # An empty list would mean FSDP2's own order; one that is gathered already means nothing more.
        block.set_modules_to_backward_prefetch([block, *(within if depth else []), *before])
        for module in within:
            module.set_modules_to_backward_prefetch([module])
    assert isinstance(root, FSDPModule)
    root.set_modules_to_forward_prefetch([module for unit in units[:depth] for module in unit])
    last = units[-1] if depth and units else []
    root.set_modules_to_backward_prefetch([root, *last])
    # On CUDA, gathering in a stream of its own already is ahead: only asked for in the stream that computes it is not.
    # On the CPU nothing goes on beside computing unless it is asynchronous.
    device = next(root.parameters()).device
    root._set_unshard_async_op(depth == 0 or device.type == "cpu")


def fastest_depth(root: nn.Module, link: MeasuredLink, compute: float, reduces: bool) -> tuple[int | None, str]:
    """Find how far ahead to gather so that a micro-batch waits least, and begin. A collective.

    Args:
        root: split by ``fully_shard``.
        link: between the ranks that share parameters.
        compute: seconds of computing of a micro-batch.
        reduces: whether gradients are reduced in each micro-batch.

    Returns:
        The depth and a sentence about it; ``None`` and nothing without blocks.
    """
    blocks = split_blocks(root)
    if not blocks:
        return None, ""
    device = next(root.parameters()).device
    size, gathered = max(whole_bytes(block) for block in blocks), max(gathered_bytes(block) for block in blocks)
    passes = compute / len(blocks)
    times = BlockTimes(
        blocks=len(blocks),
        forward=(1 - BACKWARD_SHARE) * passes,
        backward=BACKWARD_SHARE * passes,
        gather=link.seconds("all_gather", gathered),
        reduce=link.seconds("reduce_scatter", size) if reduces else 0.0,
    )
    room = torch.tensor(1 + int(min(_free_bytes(device) / gathered, MOST_AHEAD)), device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)  # all ranks must gather in the same order
    depth = best_depth(times, int(room.item()))
    gather_ahead(root, depth)
    usual = times.waits(0 if device.type == "cpu" else 1)
    chosen = (
        f"communication=auto gathers {depth} block(s) ahead from here on: a micro-batch is predicted to wait "
        f"{times.waits(depth) * 1e3:.3g} ms of it, {usual * 1e3:.3g} ms without."
    )
    rank_zero_info(chosen)
    return depth, chosen


def _free_bytes(device: torch.device) -> float:
    """Memory of a device that nobody has taken; of a host nothing is known, and little would be wanted."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def split_blocks(root: nn.Module) -> list[FSDPModule]:
    """The outermost modules below ``root`` that are split by themselves, in the order of the module."""
    found: list[FSDPModule] = []
    for child in root.children():
        found += [child] if isinstance(child, FSDPModule) else split_blocks(child)
    return found


def _split_within(block: FSDPModule) -> list[FSDPModule]:
    """The block itself, and what within it is split by itself (experts)."""
    assert isinstance(block, nn.Module)
    return [module for module in block.modules() if isinstance(module, FSDPModule)]


def gathered_bytes(block: FSDPModule) -> int:
    """Of the parameters of a block as FSDP2 gathers them, some in 16 bit; modules split within it included."""
    assert isinstance(block, nn.Module)
    parameters = [each for group in all_parameter_groups(block) for each in group.fsdp_params]
    return sum(each._orig_size.numel() * (each.param_dtype or each.orig_dtype).itemsize for each in parameters)


def whole_bytes(block: FSDPModule) -> int:
    """Of the parameters of a block as they are stored, those of modules that are split within it included."""
    assert isinstance(block, nn.Module)
    return sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())


def let_go_of_gathered(root: nn.Module) -> None:
    """Drop what was gathered ahead for blocks that then did not run: their weights may be about to change."""
    assert isinstance(root, FSDPModule)
    for group in all_parameter_groups(root):
        drop_gathered(group)


def drop_gathered(group: Any) -> None:
    """Drop what was gathered ahead for a parameter group of FSDP2, if anything was."""
    gathered = group._all_gather_result
    if gathered is None:
        return
    if gathered.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(gathered.all_gather_event)
    if isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    group._all_gather_result = None


def all_parameter_groups(root: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of a module and all within it."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from parameter_groups(module._get_fsdp_state())


def parameter_groups(state: Any) -> Sequence[Any]:
    """FSDP2's parameter groups of one module; torch 2.13 allows several."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several  # type: ignore[no-any-return]
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
