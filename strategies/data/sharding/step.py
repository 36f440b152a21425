"""The step of a module that is split, as FSDP2's root, and calls of the module outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainwright.strategies.data.sharding.gathered_writes import GatheredWrites, refusing_what_is_lost


class Step(nn.Module):
    """Runs any method of the user's module as a ``forward``, so that FSDP2's root hooks surround it.

    The user's module itself keeps its class; its own ``forward`` may be called within a step as often as it likes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.running = False
        self._is_new = True
        # Surrounds the call within the root's hooks; a pipeline ends a stage's part of it there.
        self.guard: Callable[[Callable[[], Any]], Any] = _call
        self.writes: GatheredWrites  # once it is split

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.running = True
        self.writes.begin()
        try:
            with self._watch():
                output = self.guard(partial(getattr(self.module, method), *args, **kwargs))
        finally:
            self.running = False
        self.writes.keep()
        return output

    def _watch(self) -> AbstractContextManager[Any]:
        """In the first step alone, and not where code is compiled, which would be traced with it."""
        is_new, self._is_new = self._is_new, False
        if not is_new or any(module._compiled_call_impl is not None for module in self.module.modules()):
            return nullcontext()
        return refusing_what_is_lost()

    def begin_backward(self, loss: Tensor) -> None:
        """Before a backward pass that the user's step itself runs."""
        self.writes.keep()
        # FSDP2 learns from outputs of a forward that backward has come. The root's forward, the user's step, has none
        # yet: where no block had a part in the loss either, nothing would be averaged.
        if loss.requires_grad:
            loss.register_hook(self._get_fsdp_state()._pre_backward)

    def gather_again(self, trained: Set[str]) -> None:
        """Make the parameters outside of the blocks whole again for the rest of the user's step.

        Args:
            trained: names of the parameters that are trained.
        """
        self.unshard()
        self.writes.begin()
        for name, parameter in self.module.named_parameters():
            if name in trained and not isinstance(parameter, DTensor):
                # Gathered while another optimizer was toggled, it would stay frozen for its own turn.
                parameter.requires_grad_(True)

    def leave(self, device: torch.device, failed: bool) -> None:
        """Split the module again, and take it from ``device`` to the host.

        Args:
            device: of this rank.
            failed: the traceback of a step that failed holds tensors that cannot be moved; its error must not be lost.
        """
        self.reshard()
        if device.type != "cpu":
            with suppress(RuntimeError) if failed else nullcontext():
                self.cpu()  # through the root, so that FSDP2 takes note of the new memory

    # Added by fully_shard.
    _get_fsdp_state: Callable[[], Any]
    reshard: Callable[[], None]
    unshard: Callable[[], None]
    set_requires_gradient_sync: Callable[[bool], None]
    set_requires_all_reduce: Callable[[bool], None]
    set_is_last_backward: Callable[[bool], None]
    set_reshard_after_backward: Callable[[bool], None]


class CallsOutside:
    """Gathers the parameters outside of the blocks for as long as a module is called outside of a step.

    FSDP2 gathers them when a step begins, which is the forward of its root. A sample shown between epochs, a test in a
    script after the fit: a user who calls the module between steps
    goes past that root. Such a call is a collective, to be made by all ranks, and gives no gradients.

    Args:
        root: what ``fully_shard`` has split.
        module: the user's module.
        blocks: modules that gather themselves.
    """

    def __init__(self, root: Step, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
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


def earlier_step(module: nn.Module) -> Step | None:
    """Return the step of a module that is split already; ``None``: it is not."""
    step = module.__dict__.get("_trainwright_step")
    return step if isinstance(step, FSDPModule) else None  # type: ignore[return-value]


def _call(function: Callable[[], Any]) -> Any:
    return function()
