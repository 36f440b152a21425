"""Uses of split parameters by the user's step outside of their blocks, under ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.kept_parameters import present
from trainwright.strategies.base.whole.gathered import gathered, is_write, mean_over, ranks_of
from trainwright.strategies.base.whole.watch import UseWatch, is_elementwise
from trainwright.strategies.data.sharding.gathered_writes import SET_DATA, refuse_new_data
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
        super().__init__(module)
        self._pairs, self._sharded = sharded, WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on split tensors if that is right, else on whole ones; raise if it assigns the data of one."""
        args, kwargs = present((args, kwargs or {}))
        if func is SET_DATA and isinstance(args[0], DTensor) and isinstance(args[0], nn.Parameter):
            refuse_new_data(f"of shape {tuple(args[0].shape)}")
        if self._passes(func):
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is _GRAD:
            return self._gradient(func, *args)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        split = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not split or is_write(func) or (is_elementwise(func) and _are_alike(tensors, split)):
            return func(*args, **kwargs)
        self._has_gathered()
        args, kwargs = pytree.tree_map_only(DTensor, gathered, (args, kwargs))
        return func(*args, **kwargs)

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


def _are_alike(tensors: list[Tensor], split: list[DTensor]) -> bool:
    """Return whether all tensors are split alike, or constant factors."""
    others = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    kinds = {(tensor.shape, tensor.placements, tensor.device_mesh) for tensor in split}
    return len(kinds) == 1 and all(tensor.dim() == 0 and not tensor.requires_grad for tensor in others)
