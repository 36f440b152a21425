"""Calls of a ZeRO-3 module outside of a step: a sample shown between epochs, a test in a script after the fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn


class GatheredRoot(Protocol):
    """The root that ``fully_shard`` has split; blocks gather themselves."""

    running: bool

    def unshard(self) -> None:
        """Make the parameters outside of the blocks whole."""

    def reshard(self) -> None:
        """Split them again."""

    def _get_fsdp_state(self) -> Any: ...


class CallsOutside:
    """Gathers the parameters outside of the blocks for as long as a module is called outside of a step.

    FSDP2 gathers them when a step begins, which is the forward of its root. A user who calls the module between steps
    goes past that root. Such a call is a collective, to be made by all ranks, and gives no gradients.

    Args:
        root: what ``fully_shard`` has split.
        module: the user's module.
        blocks: modules that gather themselves.
    """

    def __init__(self, root: GatheredRoot, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._root = root
        self._depth = 0
        self._grad_enabled = True
        within = {sub for block in blocks for sub in block.modules()}
        for sub in module.modules():
            if sub not in within:
                sub.register_forward_pre_hook(self._enter)
                sub.register_forward_hook(self._leave, always_call=True)

    def _is_within_step(self) -> bool:
        # In backward only a recomputed forward calls a module, and the root still is gathered.
        return self._root.running or torch._C._current_graph_task_id() != -1

    def _enter(self, *_: Any) -> None:
        if self._is_within_step():
            return
        self._depth += 1
        if self._depth == 1:
            # Blocks that run with gradients note the order for the next backward, which this call has no part in.
            self._grad_enabled = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            self._root._get_fsdp_state()._lazy_init()
            self._root.unshard()

    def _leave(self, *_: Any) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._root.reshard()
            torch.set_grad_enabled(self._grad_enabled)
