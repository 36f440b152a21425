"""Values that a block provides to code outside of it, recorded on its stage and replayed on others.

Besides its output: tensors that it sets as attributes of its modules (auxiliary losses), and the arguments of the
user's forward hooks on it and its submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.pipeline.value_spec import PLAIN, ValueSpec, to_spec

Call = Callable[..., Any]
# Attributes of every nn.Module, which hold no results.
_OWN = frozenset(nn.Module().__dict__)


class SideOutputs(NamedTuple):
    """Side outputs of a block.

    Attributes:
        attributes: (path of a submodule, attribute name) set by a call.
        hooked: paths of the submodules with user hooks; ``""`` is the block itself.
    """

    attributes: tuple[tuple[str, str], ...] = ()
    hooked: tuple[str, ...] = ()


class HookRange(NamedTuple):
    """Ids of the forward hooks registered by engines; all others are the user's."""

    start: int
    stop: int

    def users(self, hooks: dict[int, Any]) -> list[int]:
        """Return the ids of user hooks among ``hooks``."""
        return [key for key in hooks if not self.start <= key < self.stop]


class BlockValue(NamedTuple):
    """Values of one call.

    Attributes:
        output: after all hooks.
        attributes: by place.
        hooked: (path, arguments, output before its hooks) of each call of a hooked submodule, in order.
    """

    output: Any
    attributes: dict[tuple[str, str], Any]
    hooked: list[tuple[str, Any, Any]]

    def to_spec(self, source: str) -> tuple[ValueSpec, tuple[Tensor, ...]]:
        """Return spec and tensors, those of the output first."""
        return to_spec((self.output, list(self.attributes.values()), self.hooked), source)


def hooked_paths(block: nn.Module, engines: HookRange) -> tuple[str, ...]:
    """Return the submodules of ``block`` with user forward hooks."""
    return tuple(
        path
        for path, sub in block.named_modules()
        if engines.users(sub._forward_hooks) or engines.users(sub._forward_pre_hooks)
    )


def observed_call(
    block: nn.Module, call: Call, args: Any, kwargs: Any, engines: HookRange, watch: Any = None
) -> BlockValue:
    """Call a block and detect its values.

    Args:
        block: of this rank.
        call: runs it.
        args, kwargs: of the call.
        engines: hooks that are not the user's.
        watch: ``watch.hooks_begin(args, output)`` and ``watch.hooks_end()`` surround user hooks.
    """
    before = {place: identities(value) for place, value in _attributes(block)}
    hooked = hooked_paths(block, engines)
    with recorded(block, hooked, watch) as records:
        output = call(*args, **kwargs)
    changed = {place: value for place, value in _attributes(block) if before.get(place) != identities(value)}
    return BlockValue(output, changed, records)


def known_call(block: nn.Module, call: Call, args: Any, kwargs: Any, places: SideOutputs) -> BlockValue:
    """Call a block with known side outputs."""
    with recorded(block, places.hooked) as records:
        output = call(*args, **kwargs)
    found = {place: getattr(block.get_submodule(place[0]), place[1]) for place in places.attributes}
    return BlockValue(output, found, records)


@contextmanager
def recorded(block: nn.Module, paths: Sequence[str], watch: Any = None) -> Iterator[list[tuple[str, Any, Any]]]:
    """Record calls of the submodules at ``paths``, as their hooks see them, inside."""
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
    """Run the engines' pre-hooks of a skipped block, which need the length of a pass."""
    for key in block._forward_pre_hooks.keys() - set(engines.users(block._forward_pre_hooks)):
        hook: Call = block._forward_pre_hooks[key]
        hook(block, args, *([kwargs] if key in block._forward_pre_hooks_with_kwargs else []))


def replay(block: nn.Module, value: BlockValue, engines: HookRange) -> Any:
    """Reproduce the values of a skipped block, and return its output."""
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
    """Yield the attributes of a block's modules that consist of tensors and plain values."""
    for path, sub in block.named_modules():
        for name, value in (*vars(sub).items(), *sub._buffers.items()):
            if name in _OWN or value is None:
                continue
            leaves = pytree.tree_leaves(value)
            if any(isinstance(leaf, Tensor) for leaf in leaves) and all(
                isinstance(x, (Tensor, *PLAIN)) for x in leaves
            ):
                yield (path, name), value


def identities(value: Any) -> list[tuple[int, int]]:
    """Return the ids and versions of the tensors in ``value``, which differ once one is replaced or written to."""
    # A freed tensor's id may be reused; the version distinguishes most of them.
    leaves = pytree.tree_leaves(value)
    return [(id(x), x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for x in leaves]


def _tensors_and_plain(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, (Tensor, *PLAIN)) else None, value)


class Placeholder(torch.Tensor):
    """Zeros for a value that this stage does not need, according to the first step.

    Results computed from a placeholder are placeholders. They raise where they would count: in the arguments of a
    block, in the loss, and where Python reads a value.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as on any tensor, unless values would be read."""
        kwargs = kwargs or {}
        if func is Tensor.__deepcopy__:
            return args[0]  # nothing writes to it
        if func in READS_VALUES:
            raise RuntimeError(_NOT_SENT.format(f"{getattr(func, '__name__', func)} reads"))
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
    """Return zeros in the memory of one element."""
    made: Tensor = torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
    # A planner's fake ranks compute with tensors without values.
    return made if dist.is_initialized() and dist.get_backend() == "fake" else made.as_subclass(Placeholder)


def refuse_placeholders(value: Any, where: str) -> None:
    """Raise if ``value`` contains a placeholder, or a result of one.

    Raises:
        RuntimeError: with the location.
    """
    if any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves(value)):
        raise RuntimeError(_NOT_SENT.format(f"{where} depends on"))


_NOT_SENT = (
    "{} the output of a block, or a parameter, of another stage of the pipeline that the first step did not need on "
    "this one, so it was not sent. training_step must use the same values in every step (always compute them and "
    "multiply unused ones by 0), or use pipeline=1."
)

_WRITTEN = (
    "{} changes a tensor of shape {} that another stage of the pipeline holds (a parameter, or the output of a block). "
    "Set weights before fit (in __init__, configure_model or setup), not on the ranks of a pipeline: use pipeline=1 "
    "for a module that does so in training."
)

# Functions whose results do not depend on values of tensors.
SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
# Functions whose results depend on the first argument's values only.
FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
# Functions that return Python numbers.
READS_NUMBERS = {
    Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, Tensor.numpy,
    Tensor.__array__,
}  # fmt: skip
READS_VALUES = READS_NUMBERS | {
    Tensor.__bool__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero, torch.equal, Tensor.equal,
    torch.allclose, Tensor.allclose,
}  # fmt: skip
