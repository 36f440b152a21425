"""Everything that a call of a block gives to code outside of it, and the same given again where the block is skipped.

Besides its output that is: tensors that it keeps as attributes of its modules (auxiliary losses), and what the user's
forward hooks on it and on its submodules are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.pipeline.form import PLAIN, Form, take_apart

Call = Callable[..., Any]
# Attributes of every nn.Module, which hold no results.
_OWN = frozenset(nn.Module().__dict__)


class Places(NamedTuple):
    """Where a block leaves tensors besides its output.

    Attributes:
        attributes: (path of a submodule, name of an attribute) that a call sets.
        hooked: paths of the submodules with hooks of the user's; ``""`` is the block itself.
    """

    attributes: tuple[tuple[str, str], ...] = ()
    hooked: tuple[str, ...] = ()


class HookRange(NamedTuple):
    """Ids of the forward hooks that engines have registered; all others are the user's."""

    start: int
    stop: int

    def users(self, hooks: dict[int, Any]) -> list[int]:
        """Ids of the user's among ``hooks``."""
        return [key for key in hooks if not self.start <= key < self.stop]


class BlockValue(NamedTuple):
    """What one call has left.

    Attributes:
        output: after all hooks.
        attributes: by place.
        hooked: (path, arguments, output before its hooks) of each call of a hooked submodule, in order.
    """

    output: Any
    attributes: dict[tuple[str, str], Any]
    hooked: list[tuple[str, Any, Any]]

    def take_apart(self, source: str) -> tuple[Form, tuple[Tensor, ...]]:
        """Form and tensors, those of the output first."""
        return take_apart((self.output, list(self.attributes.values()), self.hooked), source)


def hooked_paths(block: nn.Module, engines: HookRange) -> tuple[str, ...]:
    """Submodules of ``block`` on which the user has put forward hooks."""
    return tuple(
        path
        for path, sub in block.named_modules()
        if engines.users(sub._forward_hooks) or engines.users(sub._forward_pre_hooks)
    )


def observed_call(
    block: nn.Module, call: Call, args: Any, kwargs: Any, engines: HookRange, watch: Any = None
) -> BlockValue:
    """Call a block and find out what it leaves.

    Args:
        block: of this rank.
        call: runs it.
        args, kwargs: of the call.
        engines: hooks that are not the user's.
        watch: ``watch.hooks_begin(args, output)`` and ``watch.hooks_end()`` surround the user's hooks.
    """
    before = {place: _ids(value) for place, value in _attributes(block)}
    hooked = hooked_paths(block, engines)
    with recorded(block, hooked, watch) as records:
        output = call(*args, **kwargs)
    changed = {place: value for place, value in _attributes(block) if before.get(place) != _ids(value)}
    return BlockValue(output, changed, records)


def known_call(block: nn.Module, call: Call, args: Any, kwargs: Any, places: Places) -> BlockValue:
    """Call a block of which it is known what it leaves."""
    with recorded(block, places.hooked) as records:
        output = call(*args, **kwargs)
    found = {place: getattr(block.get_submodule(place[0]), place[1]) for place in places.attributes}
    return BlockValue(output, found, records)


@contextmanager
def recorded(block: nn.Module, paths: Sequence[str], watch: Any = None) -> Iterator[list[tuple[str, Any, Any]]]:
    """Within it calls of the submodules at ``paths`` are kept, as their hooks see them."""
    records: list[tuple[str, Any, Any]] = []
    with ExitStack() as stack:
        for path in paths:
            sub = block.get_submodule(path)
            stack.callback(sub.register_forward_hook(_keep(records, path, watch), prepend=True).remove)
            if watch is not None:
                stack.callback(sub.register_forward_hook(lambda *_: watch.hooks_end()).remove)
        yield records


def _keep(records: list[tuple[str, Any, Any]], path: str, watch: Any) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        records.append((path, _tensors_and_plain(args), _tensors_and_plain(output)))
        if watch is not None:
            watch.hooks_begin(args, output)

    return keep


def enter_skipped(block: nn.Module, args: Any, kwargs: Any, engines: HookRange) -> None:
    """Run the engines' hooks in front of a block of another stage, which learn the length of a pass by them."""
    for key in block._forward_pre_hooks.keys() - set(engines.users(block._forward_pre_hooks)):
        hook: Call = block._forward_pre_hooks[key]
        hook(block, args, *([kwargs] if key in block._forward_pre_hooks_with_kwargs else []))


def replay(block: nn.Module, value: BlockValue, engines: HookRange) -> Any:
    """Leave in a skipped block what a call of it would have left, and return its output."""
    for (path, name), kept in value.attributes.items():
        setattr(block.get_submodule(path), name, kept)
    for path, args, output in value.hooked:
        sub = block.get_submodule(path)
        for key in engines.users(sub._forward_pre_hooks):
            pre_hook: Call = sub._forward_pre_hooks[key]
            pre_hook(sub, args, *([{}] if key in sub._forward_pre_hooks_with_kwargs else []))
        for key in engines.users(sub._forward_hooks):
            hook: Call = sub._forward_hooks[key]
            hook(sub, args, *([{}] if key in sub._forward_hooks_with_kwargs else []), output)
    return value.output


def _attributes(block: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Attributes of the modules of a block that hold tensors and nothing that cannot travel."""
    for path, sub in block.named_modules():
        for name, value in (*vars(sub).items(), *sub._buffers.items()):
            if name in _OWN or value is None:
                continue
            leaves = pytree.tree_leaves(value)
            if any(isinstance(leaf, Tensor) for leaf in leaves) and all(
                isinstance(x, (Tensor, *PLAIN)) for x in leaves
            ):
                yield (path, name), value


def _ids(value: Any) -> list[tuple[int, int]]:
    # Of a tensor that was freed, another may have the id; its version tells most of them apart.
    return [(id(leaf), leaf._version if _has_version(leaf) else 0) for leaf in pytree.tree_leaves(value)]


def _has_version(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _tensors_and_plain(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, (Tensor, *PLAIN)) else None, value)


class Placeholder(torch.Tensor):
    """Zeros where a stage has no value, because the first step has shown that it needs none.

    What is computed from one is one. The pass refuses them where they would count: in the arguments of a block, in the
    loss, and where Python reads a value.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as on any tensor, unless the values would be read."""
        kwargs = kwargs or {}
        if func in READS_VALUES:
            raise RuntimeError(_LATE.format(f"{getattr(func, '__name__', func)} reads"))
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            written = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            if isinstance(written, cls) and written.numel() > 1 and not any(written.stride()):
                raise RuntimeError(_WRITTEN.format(name, tuple(written.shape)))
        if func in SHAPE_ONLY or (func in FIRST_ONLY and not isinstance(args[0], cls)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the memory of one element."""
    made: Tensor = torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
    # Ranks of a planner are not there, and compute with tensors that have no values at all.
    return made if dist.is_initialized() and dist.get_backend() == "fake" else made.as_subclass(Placeholder)


def refuse_placeholders(value: Any, where: str) -> None:
    """Raise if a placeholder, or what was computed from one, is in ``value``.

    Raises:
        RuntimeError: naming where.
    """
    if any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves(value)):
        raise RuntimeError(_LATE.format(f"{where} depends on"))


_LATE = (
    "{} the output of a block, or a parameter, of another stage of the pipeline that the first step did not need on "
    "this one, so it was not sent. training_step must use the same values in every step (compute them always and "
    "multiply by 0 what does not count yet), or use pipeline=1."
)

_WRITTEN = (
    "{} changes a tensor of shape {} that another stage of the pipeline holds (a parameter, or the output of a block). "
    "Weights can be set before fit (in __init__, configure_model or setup), not on the ranks of a pipeline: use "
    "pipeline=1 for a module that does so in training."
)

# Results of these do not depend on the values of any tensor.
SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
# Of these, only the first argument's values count.
FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
# These give Python a value.
READS_NUMBERS = {
    Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, Tensor.numpy,
    Tensor.__array__,
}  # fmt: skip
READS_VALUES = READS_NUMBERS | {
    Tensor.__bool__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero, torch.equal, Tensor.equal,
    torch.allclose, Tensor.allclose,
}  # fmt: skip
