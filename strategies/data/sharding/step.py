"""FSDP2 root around the user's step, and calls of the module outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from contextlib import nullcontext, suppress
from functools import partial
from operator import call
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.lightning_internals import _update_properties
from trainwright.strategies.base.whole.watch import UseWatch, gathered, is_elementwise, mean_over, ranks_of
from trainwright.strategies.data.sharding.float8 import Scales
from trainwright.strategies.data.sharding.gathered_writes import (
    SET_DATA,
    GatheredWrites,
    forbidding_lost_updates,
    refuse_new_data,
)
from trainwright.strategies.data.sharding.gathering import shard_again
from trainwright.strategies.state.wholes import part_like

_GRAD: Any = Tensor.grad


class SplitUses(UseWatch):
    """Gathers split parameters, or what was computed from them, where the step uses them with whole tensors.

    Element-wise functions, and the strategy's own optimizer steps, compute on split tensors. Gradients of gathered
    values are averaged over the ranks, as those of the step's other uses are. In manual optimization, parameters
    outside of blocks, which are gathered, have the averaged and split gradients that the optimizer steps.

    Args:
        module: the user's.
        sharded: yields each gathered parameter outside of blocks, and its split form.
    """

    def __init__(self, module: nn.Module, sharded: Callable[[], Iterable[tuple[Tensor, DTensor]]]) -> None:
        super().__init__(module, "use strategy=zero2")
        self._pairs, self._sharded = sharded, WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class; raise if ``func`` assigns the data of a split parameter."""
        if func is SET_DATA and isinstance(args[0], DTensor) and isinstance(args[0], nn.Parameter):
            refuse_new_data(f"of shape {tuple(args[0].shape)}")
        return super().__torch_function__(func, types, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__self__", None) is _GRAD:
            return self._gradient(func, *args)
        return super()._run(func, args, kwargs)

    def _kind(self, tensor: Tensor) -> Hashable | None:
        return (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None

    def _gathered(self, tensor: Tensor) -> Tensor:
        return gathered(tensor) if isinstance(tensor, DTensor) else tensor

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if not is_elementwise(func):
            with suppress(NotImplementedError):  # DTensor supports some
                return func(*args, **kwargs)
        return super()._write(func, args, kwargs, tensors)

    def _part(self, whole: Tensor, target: Tensor) -> Tensor:
        return part_like(whole.expand(target.shape), cast(DTensor, target))

    def _gradient(self, func: Any, parameter: Tensor, *value: Tensor | None) -> Any:
        """Get, set or delete a gradient."""
        if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.is_leaf:
            if parameter not in self._sharded:
                self._sharded.update(self._pairs())
            parameter = self._sharded.get(parameter, parameter)
        if isinstance(parameter, DTensor):
            value = tuple(_split_like(parameter, each) for each in value)
        return func(parameter, *value)


def _split_like(parameter: DTensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that a step assigns, averaged over ranks and split."""
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    return part_like(mean_over(gradient, ranks_of(parameter)), parameter)


class Step(nn.Module):
    """Runs any method of the user's module as a ``forward`` inside FSDP2's root hooks.

    The user's module keeps its class; its own ``forward`` may be called any number of times within a step.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.running = False
        self.uses = SplitUses(module, lambda: self.writes.gathered())
        # Called inside the root's hooks; a pipeline ends a stage's part of the step there.
        self.guard: Callable[[Callable[[], Any]], Any] = call
        # Set once it is sharded.
        self.writes: GatheredWrites
        self.scales: Scales | None
        self.whole: Set[nn.Parameter]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the user's module: see :meth:`forward`."""
        if self.scales is not None:
            self.scales.compute()  # before the root's hooks gather
        return super().__call__(*args, **kwargs)

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.running = True
        self.writes.begin()
        try:
            with forbidding_lost_updates(), self.uses.watching(method):
                output = self.guard(partial(getattr(self.module, method), *args, **kwargs))
        finally:
            self.running = False
        self.writes.keep()
        return output

    def begin_backward(self, loss: Tensor) -> None:
        """Prepare a backward pass run by the user's step."""
        self.writes.keep()
        # FSDP2 detects backward by outputs of the root's forward, here the user's step, which has not returned yet.
        if loss.requires_grad:
            loss.register_hook(self._get_fsdp_state()._pre_backward)

    def gather_again(self, trained: Set[str]) -> None:
        """Gather the parameters outside of the blocks again for the rest of the user's step.

        Args:
            trained: names of trainable parameters.
        """
        self.unshard()
        self.writes.begin()
        for name, parameter in self.module.named_parameters():
            if name in trained and not isinstance(parameter, DTensor):
                # Gathered while another optimizer was toggled, it would stay frozen.
                parameter.requires_grad_(True)

    def leave(self, device: torch.device, failed: bool) -> None:
        """Reshard the module and move it from ``device`` to the host.

        Args:
            device: of this rank.
            failed: ignore errors of the move, since the traceback of a failed step holds tensors.
        """
        shard_again(self)
        if self.scales is not None:
            self.scales.forget()
        if device.type != "cpu":
            with suppress(RuntimeError) if failed else nullcontext():
                self.cpu()  # via the root, so that FSDP2 notices the new memory
                _update_properties(self, device=torch.device("cpu"))

    # Added by fully_shard.
    _get_fsdp_state: Callable[[], Any]
    reshard: Callable[[], None]
    unshard: Callable[[], None]
    set_requires_gradient_sync: Callable[[bool], None]
    set_requires_all_reduce: Callable[[bool], None]
    set_is_last_backward: Callable[[bool], None]
    set_reshard_after_backward: Callable[[bool], None]


class GatherOnCall:
    """Gathers the parameters outside of the blocks during calls of a module between steps.

    FSDP2 gathers them in the forward of its root, the step, which such calls (a sample between epochs, a test after
    fit) bypass. A call is a collective of all ranks and computes no gradients.

    Args:
        root: the ``fully_shard`` root.
        module: the user's module.
        blocks: modules that gather themselves.
    """

    def __init__(self, root: Step, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._root = root
        self._depth = 0
        self._grad_enabled = True
        within = {sub for block in blocks for sub in block.modules()}
        for sub in module.modules():
            # Others, such as metrics, may be copied.
            if sub not in within and any(True for _ in sub.parameters()):
                sub.register_forward_pre_hook(self._enter)
                sub.register_forward_hook(self._leave, always_call=True)

    def _is_within_step(self) -> bool:
        # In backward only recomputed forwards call modules, while the root is gathered.
        return self._root.running or torch._C._current_graph_task_id() != -1

    def _enter(self, *_: Any) -> None:
        if self._is_within_step():
            return
        self._depth += 1
        if self._depth == 1:
            # With gradients, blocks would record their order for the next backward.
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


def existing_step(module: nn.Module) -> Step | None:
    """Return the step of an already sharded module, or ``None``."""
    step = module.__dict__.get("_trainwright_step")
    return step if isinstance(step, FSDPModule) else None  # type: ignore[return-value]
