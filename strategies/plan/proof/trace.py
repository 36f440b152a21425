"""Trace of one forward pass on synthetic inputs: calls of blocks, and uses of parameters outside of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.torch_internals import FakeTensor, FakeTensorMode, _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.plan.names import parent_of, within

# Image sizes tried if the model does not state its own.
_SIDES = (32, 64, 224)
# Largest size of a position table tried as sequence length.
_LONGEST = 1024
# Larger modules (in parameters) run on fake tensors.
_LARGEST = 2**26


@dataclass(frozen=True)
class BlockCall:
    """Arguments of a forward; tensors are copies, and those that depend on parameters require gradients."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def renewed(self) -> BlockCall:
        """Return a deep copy."""
        args, kwargs = pytree.tree_map(_copied, (self.args, dict(self.kwargs)))
        return BlockCall(args, kwargs)

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments that require gradients."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass
class Trace:
    """Calls and uses in one forward.

    Args:
        calls: name of the first block of each kind -> its call.
        uses: name of a parameter outside of the blocks -> where it is used: ``first``, ``between`` or ``last``.
        functional: names of those used by functions other than ``F.embedding``.
    """

    calls: dict[str, BlockCall] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)
    functional: set[str] = field(default_factory=set)


def kinds_of(module: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group ``names`` of modules by kind: same classes, shapes and plain attributes except their index."""
    siblings: dict[str, list[str]] = {}
    for name in names:
        siblings.setdefault(parent_of(name), []).append(name)
    plain = {name: _plain_attributes(module.get_submodule(name)) for name in names}
    counted = {
        key
        for group in siblings.values()
        for key, first in plain[group[0]].items()
        if first in (0, 1) and len(group) > 1 and all(plain[n].get(key) == first + i for i, n in enumerate(group))
    }
    kinds: dict[Hashable, list[str]] = {}
    for name in names:
        attributes = tuple((key, value) for key, value in plain[name].items() if key not in counted)
        kinds.setdefault((_shapes(module.get_submodule(name)), attributes), []).append(name)
    return list(kinds.values())


def _shapes(module: nn.Module) -> Hashable:
    return tuple(
        (name, type(sub), tuple((key, None if p is None else tuple(p.shape)) for key, p in sub._parameters.items()))
        for name, sub in module.named_modules(remove_duplicate=False)
    )


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, sub in module.named_modules(remove_duplicate=False)
        for key, value in vars(sub).items()
        if isinstance(value, int | float | str) and not key.startswith("_") and key != "training"
    }


def trace(module: nn.Module, blocks: Sequence[str], size: int) -> Trace:
    """Run ``module``, or the submodule around its ``blocks``, on synthetic inputs.

    Runs a copy that shares its parameters. Only the first block of each kind computes; the others return its output.
    The result is empty if nothing can be run.

    Args:
        module: the whole model, possibly on the meta device.
        blocks: names of its blocks.
        size: number of ranks that will split sequences; lengths are multiples of it.
    """
    found = Trace()
    with _disable_current_modes():  # a planner may run under FakeTensorMode
        for parent in dict.fromkeys(parent_of(name) for name in blocks):
            siblings = [name for name in blocks if parent_of(name) == parent]
            if all(name in found.calls for name, *_ in kinds_of(module, siblings)):
                continue
            path = parent.split(".") if parent else []
            for depth in range(len(path) + 1):
                if _trace_from(module, ".".join(path[:depth]), siblings, size, found):
                    break
    return found


def _trace_from(module: nn.Module, root: str, blocks: Sequence[str], size: int, found: Trace) -> bool:
    """Add the trace of a forward of the submodule ``root``; returns whether it reached ``blocks``."""
    sub = module.get_submodule(root)
    if type(sub).forward is nn.Module.forward or isinstance(sub, nn.ModuleList | nn.ModuleDict):
        return False
    for given in _synthetic_calls(sub, size):
        try:
            watch = _Watch(sub, root, blocks)
        except Exception:  # the module cannot be copied
            return False
        with suppress(Exception), watch, torch.random.fork_rng(devices=[]):
            watch.run(given)
        if watch.calls:
            found.calls.update(watch.calls)
            if watch.ended:
                found.uses.update(watch.uses)
                found.functional.update(watch.functional)
            return True
    return False


class _Watch(TorchFunctionMode):
    """A copy of a module that records the calls of its blocks."""

    def __init__(self, module: nn.Module, root: str, blocks: Sequence[str]) -> None:
        super().__init__()
        prefix = f"{root}." if root else ""
        # Large modules would take too long, and shapes suffice.
        self._shapes_only = ShapesOnly(module) if is_larger(module, _LARGEST) else None
        if self._shapes_only is not None:
            self._twin = self._shapes_only.twin.eval()
        else:
            self._twin = twin_of(module, {id(p): without_memory(p) for p in module.parameters() if _is_empty(p)}).eval()
            for sub in self._twin.modules():
                for name, buffer in sub._buffers.items():
                    sub._buffers[name] = buffer if buffer is None else real_tensor(buffer)
        self.calls: dict[str, BlockCall] = {}
        self.uses: dict[str, set[str]] = {}
        self.functional: set[str] = set()
        self.ended = False
        self._called: set[str] = set()
        self._blocks = blocks
        self._inside = 0
        named = self._twin.named_parameters()
        self._names = {id(p): prefix + n for n, p in named if not any(within(prefix + n, b) for b in blocks)}
        outputs: dict[str, Any] = {}
        for first, *others in kinds_of(module, [name[len(prefix) :] for name in blocks]):
            for name in (first, *others):
                block = self._twin.get_submodule(name)
                block.forward = self._recording(block.forward, prefix + name, prefix + first, outputs)

    def _recording(self, forward: Callable[..., Any], name: str, first: str, outputs: dict[str, Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._called.add(name)
            if name == first and first not in self.calls:
                args_kwargs = pytree.tree_map_only(FakeTensor, _on_meta, (args, dict(kwargs)))
                self.calls[first] = BlockCall(*args_kwargs).renewed()
            if first not in outputs:
                self._inside += 1
                outputs[first] = forward(*args, **kwargs)
                self._inside -= 1
            return outputs[first]

        return run

    def run(self, given: BlockCall) -> None:
        """Run the copy; records before a failure are kept."""
        if self._shapes_only is None:
            self._twin(*given.args, **given.kwargs)
        else:
            self._shapes_only.run(given)
        self.ended = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not self._inside:
            phase = "first" if not self._called else "last" if len(self._called) == len(self._blocks) else "between"
            for value in pytree.tree_leaves((args, kwargs)):
                name = self._names.get(id(value)) if isinstance(value, Tensor) else None
                if name is not None:
                    self.uses.setdefault(name, set()).add(phase)
                    if func is not F.embedding:
                        self.functional.add(name)
        return result


def twin_of(module: nn.Module, parameters: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of ``module`` that shares its parameters, except for replacements by ``id``."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    # Non-leaf tensors, such as the weight of the legacy weight norm, cannot be copied.
    kept = [v for sub in module.modules() for v in vars(sub).values() if isinstance(v, Tensor) and not v.is_leaf]
    shared |= {id(tensor): tensor.detach() for tensor in kept}
    return copy.deepcopy(module, {**shared, **(parameters or {})})


def is_larger(module: nn.Module, limit: int) -> bool:
    """Return whether ``module`` has more than ``limit`` parameters."""
    return sum(parameter.numel() for parameter in module.parameters()) > limit


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class ShapesOnly:
    """A copy of a module on fake tensors.

    Args:
        module: possibly on the meta device.

    Attributes:
        twin: the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            made = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), False) for p in module.parameters()}
        self.twin = twin_of(module, made)
        with self._mode:
            for sub in self.twin.modules():
                for name, buffer in sub._buffers.items():
                    sub._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)

    def run(self, call: BlockCall) -> None:
        """Call the copy on fake tensors."""
        with self._mode:
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), (call.args, dict(call.kwargs))
            )
            self.twin(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.is_floating_point())


def without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Return a computable replacement of a meta parameter: one number, expanded."""
    return nn.Parameter(torch.full((), 0.02, dtype=parameter.dtype).expand(parameter.shape), parameter.requires_grad)


def real_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or random floats, ``True`` or zeros on the CPU if it has no values."""
    if not _is_empty(tensor):
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).requires_grad_(tensor.requires_grad)
    return torch.full(tensor.shape, tensor.dtype is torch.bool, dtype=tensor.dtype)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # shared, as it is between blocks
        return value


# ---- inputs -------------------------------------------------------------------------------------------------------


def _synthetic_calls(module: nn.Module, size: int) -> Iterator[BlockCall]:
    """Yield inputs that the forward of ``module`` may accept: ids, images, features."""
    example = getattr(module, "example_input_array", None)
    if example is not None:
        yield BlockCall(example) if isinstance(example, tuple) else BlockCall((example,))
    try:
        options = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    named = [name for name in options if name.endswith("input_ids")]
    further = {"use_cache": False} if "use_cache" in options else {}
    rows = [sub.num_embeddings for sub in module.modules() if isinstance(sub, nn.Embedding)]
    for length in _lengths(module, size):
        if rows:
            ids = torch.randint(min(rows), (2 * size, length)).to(device)
            yield BlockCall((), {**dict.fromkeys(named, ids), **further}) if named else BlockCall((ids,), further)
    conv = next((sub for sub in module.modules() if isinstance(sub, nn.Conv2d)), None)
    for height, width in _images(module) if conv is not None else ():
        yield BlockCall((torch.randn(2 * size, conv.in_channels, height, width).to(device),))  # type: ignore[union-attr]
    if not rows:
        yield from (BlockCall((x,)) for x in features_for(module, size, device))


def features_for(module: nn.Module, size: int, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Yield random hidden states and feature vectors of the input width of the first layer of ``module``."""
    for sub in module.modules():
        attention = sub.embed_dim if isinstance(sub, nn.MultiheadAttention) else None
        width = attention or getattr(sub, "in_features", None) or getattr(sub, "nx", None)
        if isinstance(width, int):
            for length in _lengths(module, size):
                yield torch.randn(2 * size, length, width).to(device).requires_grad_()
            yield torch.randn(2 * size, width).to(device).requires_grad_()
            return


def _lengths(module: nn.Module, size: int) -> Iterable[int]:
    own = (sub for sub in module.modules() if not type(sub).__module__.startswith("torch.nn."))
    tables = [p.shape[-2] for sub in own for p in sub._parameters.values() if p is not None and p.dim() in (2, 3)]
    return dict.fromkeys([4 * size, 2 * size, *(n for n in tables if 1 < n <= _LONGEST and n % size == 0)])


def _images(module: nn.Module) -> Iterable[tuple[int, int]]:
    owners = [*module.modules(), *(getattr(sub, "config", None) for sub in module.modules())]
    stated = [getattr(owner, name, None) for owner in owners for name in ("image_size", "img_size")]
    sides = [side if isinstance(side, tuple | list) else (side, side) for side in stated if side]
    return dict.fromkeys((*(tuple(side) for side in sides if len(side) == 2), *((side, side) for side in _SIDES)))


def calls_for(module: nn.Module, size: int) -> Iterator[BlockCall]:
    """Yield calls that ``module`` may accept: hidden states, and ``None``, themselves or a vector of each sample."""
    try:
        options = list(inspect.signature(module.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return
    more = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in options)
    for x in features_for(module, size):
        yield BlockCall((x, *[None] * more))
        if more:
            yield BlockCall((x, *[x] * more))
            yield BlockCall((x, *[x[:, 0].detach().requires_grad_()] * more))
    if any(isinstance(sub, nn.Conv2d | nn.Embedding) for sub in module.modules()):
        yield from _synthetic_calls(module, size)


def variants_of(module: nn.Module, call: BlockCall) -> Iterator[BlockCall]:
    """Yield ``call`` with one optional argument more: hidden states for ``None``, the opposite of a flag."""
    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    like = next(leaf for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Tensor))
    widths = [sub.in_features for sub in module.modules() if isinstance(sub, nn.Linear)]
    shapes = dict.fromkeys((like.shape, *((*like.shape[:-1], width) for width in widths)))
    for name, value in bound.arguments.items():
        given: list[Any] = [not value] if isinstance(value, bool) else []
        if value is None:
            given = [torch.randn(shape, device=like.device).requires_grad_() for shape in shapes]
        for each in given:
            changed = inspect.BoundArguments(bound.signature, {**bound.arguments, name: each})
            yield BlockCall(changed.args, changed.kwargs)
