"""Repeated blocks of a model, and per-block activation checkpointing and compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainwright.core.torch_internals import _NormBase, peek_interpreter_stack
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.plan.names import joined, matched, parent_of, within

_PREPARED = "_trainwright_prepared"
COMPILE_BLOCKS = "Take torch.compile out of the module and type strategy.compile=true, which compiles each block"
# The first calls may run uncompiled: of a certificate, of a step that a layout watches.
_ENOUGH_CALLS = 32


def find_blocks(module: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return blocks of ``module`` by fully qualified name, in the order of ``named_modules``, without nested ones.

    Sources in order: ``patterns``; classes in Hugging Face's ``_no_split_modules`` (those in lists, if any); two or
    more repeated modules: children with parameters of an ``nn.ModuleList``, or of one class in an ``nn.Sequential``, or
    all of one class with children in an ``nn.ModuleDict``.

    Args:
        module: the whole model.
        patterns: shell-style patterns of fully qualified names, such as ``model.layers.*``; ``None``: off.

    Returns:
        The blocks; empty if ``patterns`` is ``None`` and nothing is repeated.

    Raises:
        ValueError: if a pattern matches no module.
    """
    if patterns is not None:
        return _outermost(_matching(module, patterns, "blocks"))
    return _outermost(_unsplittable(module)) or _outermost(_repeated(module))


def count_parameters(module: nn.Module) -> int:
    """Count parameter elements of ``module``, tied ones once, packed ones by the module's ``unpacked_numel[name]``."""
    counts: dict[nn.Parameter, int] = {}
    for part in module.modules():
        unpacked = getattr(part, "unpacked_numel", {})
        counts |= {weight: unpacked.get(name, weight.numel()) for name, weight in part.named_parameters(recurse=False)}
    return sum(counts.values())


def _matching(module: nn.Module, patterns: Sequence[str], option: str) -> dict[str, nn.Module]:
    modules = {name: part for name, part in module.named_modules() if name}
    chosen = set(matched(list(modules), patterns, option))
    return {name: part for name, part in modules.items() if name in chosen}


def _unsplittable(module: nn.Module) -> dict[str, nn.Module]:
    classes: set[str] = set()
    for submodule in module.modules():
        classes.update(getattr(submodule, "_no_split_modules", None) or ())
    found = {name: sub for name, sub in module.named_modules() if name and type(sub).__name__ in classes}
    # Some models list embeddings too, which are not repeated and may be tied to a head.
    listed = {
        n: sub
        for n, sub in found.items()
        if isinstance(module.get_submodule(parent_of(n)), nn.ModuleList | nn.Sequential)
    }
    return listed or found


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, container in module.named_modules():
        named = ((joined(name, n), child) for n, child in container.named_children())
        children = {n: child for n, child in named if next(child.parameters(), None) is not None}
        # Of nested lists, only the inner ones hold callable modules.
        has_forward = not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children.values())
        if isinstance(container, nn.ModuleList) and len(children) > 1 and has_forward:
            found.update(children)
        elif isinstance(container, nn.Sequential):
            classes = [type(child) for child in children.values()]
            found.update({n: child for n, child in children.items() if classes.count(type(child)) > 1})
        elif isinstance(container, nn.ModuleDict) and len(children) > 1 and _are_alike(children.values()):
            found.update(children)
    return found


def _are_alike(children: Iterable[nn.Module]) -> bool:
    return len({type(child) for child in children}) == 1 and all(next(c.children(), None) is not None for c in children)


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in found.items()
        if not any(within(name, other) for other in found if other != name)
    }


def checkpoint_activations(
    module: nn.Module, mode: str, blocks: Iterable[nn.Module], patterns: Sequence[str] | None
) -> None:
    """Recompute activations in backward instead of keeping them.

    Replaces ``forward`` on the instances, so classes and parameter names do not change.

    Args:
        module: the whole model.
        mode: ``"none"``: off; ``"full"``: every block; ``"selective"``: the modules matching ``patterns``.
        blocks: the blocks of the model.
        patterns: names for ``"selective"``, one star per level.

    Raises:
        ValueError: if a pattern matches no module, or ``"full"`` finds no blocks.
    """
    if mode == "none":
        return
    chosen = list(_matching(module, patterns, "checkpoint_modules").values()) if patterns else list(blocks)
    if not chosen:
        raise ValueError(
            "activation_checkpointing='full' found no repeated blocks in this model. "
            "Name them: strategy.blocks=['model.layers.*']."
        )
    for target in chosen:
        # True in transformers where layers share keys through the cache.
        norms = [sub for sub in target.modules() if isinstance(sub, _NormBase)]
        target.forward = _Recomputed(target.forward, getattr(target, "_can_checkpoint_with_cache", False), norms)


class _Recomputed:
    """A ``forward`` that saves only its inputs and is recomputed in backward.

    It gets no key-value cache of transformers, to which a recomputation would append the same keys again.
    """

    def __init__(self, forward: Callable[..., Any], keeps_cache: bool, norms: Sequence[nn.Module]) -> None:
        self.forward, self._keeps_cache, self._norms = forward, keeps_cache, norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
            return self.forward(*args, **kwargs)  # a transform of torch.func: nothing can be recomputed in it
        if not self._keeps_cache:
            args, kwargs = tuple(map(_uncached, args)), {name: _uncached(each) for name, each in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        # Non-reentrant: supports keyword arguments, repeated backward and sharded parameters.
        options: dict[str, Any] = {}
        if self._norms and not torch.compiler.is_compiling():
            options["context_fn"] = lambda: (nullcontext(), _without_statistics(self._norms))
        return checkpoint(partial(self.forward, **kwargs), *args, use_reentrant=False, **options)


@contextmanager
def _without_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Keep running statistics, which the first forward has updated, in a ``with`` block."""
    with ExitStack() as stack:
        for norm in norms:
            copies = {name: None if value is None else value.clone() for name, value in norm._buffers.items()}
            stack.enter_context(with_attributes(norm, _buffers=copies))
        yield


def _uncached(value: Any) -> Any:
    """Return ``None`` for an empty key-value cache of transformers, anything else as it is."""
    count = getattr(value, "get_seq_length", None)
    if count is None:
        return value
    if length := int(count()):
        raise RuntimeError(
            f"A block with recomputed activations got a key-value cache of {length} earlier position(s), which its "
            "recomputation would extend again. Type strategy.activation_checkpointing=none, or train without a cache."
        )
    return None


def compile_blocks(module: nn.Module, blocks: Iterable[nn.Module], options: bool | dict[str, Any]) -> None:
    """Compile each block in place with ``torch.compile``; the whole module if there are no blocks.

    Per block, compile time is independent of depth, and hooks between blocks are not compiled.

    Args:
        module: the whole model.
        blocks: the blocks of the model.
        options: ``False``: off; ``True``: torch's defaults; a mapping is passed to ``torch.compile``.
    """
    if options is False:
        return
    kwargs = dict(options) if isinstance(options, dict) else {}
    compiled = list(blocks) or [module]
    if any(isinstance(sub.forward, _Recomputed) for block in compiled for sub in block.modules()):
        # Layouts keep what modules share in attributes during a call; a recomputation would have to set them again.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in compiled:
        block.compile(**kwargs)
        block._compiled_call_impl = _CompiledCall(block)


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as written."""
    has_compiler = "torch._dynamo" in sys.modules  # nothing is compiled without it, and importing it takes seconds
    return torch.compiler.set_stance("force_eager") if has_compiler else nullcontext()


def compiled_modules(module: nn.Module) -> list[str]:
    """Return the names of the modules that the user has compiled, in place or wrapped; ``""``: ``module`` itself."""
    return [
        name
        for name, sub in module.named_modules()
        if not isinstance(sub._compiled_call_impl, _CompiledCall | None) or "_orig_mod" in sub._modules
    ]


class _CompiledCall:
    """A compiled call of a module.

    It does not see gradients which are sharded while their parameter is not: ZeRO-1 and 2 show such gradients from one
    step to the next, and Dynamo cannot trace with them. It warns if Dynamo has compiled nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._call: Any = module._compiled_call_impl
        self._parameters: tuple[nn.Parameter, ...] | None = None
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls == _ENOUGH_CALLS:
            _warn_without_graphs(self._module)
        if self._parameters is None:  # a strategy may replace parameters until the first call
            self._parameters = tuple(p for p in self._module.parameters() if not isinstance(p, DTensor))
        sharded = [(p, p.grad) for p in self._parameters if isinstance(p.grad, DTensor)]
        for parameter, _ in sharded:
            parameter.grad = None
        try:
            return self._call(*args, **kwargs)
        finally:
            for parameter, gradient in sharded:
                parameter.grad = gradient


def _warn_without_graphs(module: nn.Module) -> None:
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        rank_zero_warn(
            f"strategy.compile has compiled nothing: Dynamo can trace no part of {type(module).__name__}, so it runs "
            "uncompiled. Context parallelism with activation_checkpointing=full is such a case. "
            "TORCH_LOGS=graph_breaks shows the reason; type strategy.compile=false, or activation_checkpointing=none."
        )


class Blocks:
    """Blocks of a module.

    Args:
        options: with patterns, activation checkpointing and compilation.

    Attributes:
        names: of the blocks, in order, after :meth:`prepare`.
    """

    def __init__(self, options: StrategyOptions) -> None:
        self._options = options
        self.names: tuple[str, ...] = ()

    def find(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks of ``module`` by name, in order."""
        return find_blocks(module, self._options.blocks)

    def prepare(self, module: nn.Module, blocks: dict[str, nn.Module]) -> None:
        """Set up activation checkpointing, then compilation, so that the compiler sees the recomputation."""
        self.names, options = tuple(blocks), self._options
        if getattr(module, _PREPARED, False):
            return  # a later run with the same module
        checkpoint_activations(module, options.activation_checkpointing, blocks.values(), options.checkpoint_modules)
        compile_blocks(module, blocks.values(), options.compile)
        object.__setattr__(module, _PREPARED, True)
