"""Names of modules: matched by patterns, folded for messages, shown as a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from torch import nn

# Lines of a module tree in a message before it is cut short.
_MOST_LINES = 60


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that ``pattern`` matches, in their order. A star stands for one level, as in a path."""
    level = pattern.count(".")
    return [name for name in names if name.count(".") == level and fnmatchcase(name, pattern)]


def matched(names: Sequence[str], patterns: Iterable[str], option: str) -> list[str]:
    """The names that any of ``patterns`` matches, in the order of the patterns.

    Raises:
        ValueError: if a pattern matches nothing; ``option`` is what the message calls the setting.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        hits = matching(names, pattern)
        if not hits:
            raise ValueError(
                f"{option}: no module is called {pattern!r}. Give names or patterns of this model, one star per level, "
                f"for example 'model.layers.*'. It has: {', '.join(folded(names)[:16])}."
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def parent_of(name: str) -> str:
    """Name of the module that ``name`` lies in; the root is ``""``."""
    return name.rpartition(".")[0]


def joined(outer: str, inner: str) -> str:
    """Name of what is called ``inner`` within ``outer``; either may be the root, ``""``."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def within(name: str, outer: str) -> bool:
    """Whether ``name`` is ``outer`` or lies in it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def folded(names: Iterable[str]) -> list[str]:
    """Names with numbers replaced by stars, each once: ``layers.*.mlp``."""
    return list(dict.fromkeys(starred(name) for name in names))


def starred(name: str) -> str:
    """``name`` with a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def module_tree(module: nn.Module) -> str:
    """The modules below ``module``, one a line; equal neighbours share one: ``0..11 (12 x LlamaDecoderLayer)``."""
    lines = list(_lines(module, "  "))
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  ... and {len(lines) - _MOST_LINES} more lines"]
    return "\n".join([type(module).__name__, *lines])


def _lines(module: nn.Module, indent: str) -> Iterable[str]:
    for _, run in groupby(module.named_children(), key=lambda item: _signature(item[1])):
        names, children = zip(*run, strict=True)
        name, kind = names[0], type(children[0]).__name__
        if len(names) > 1:
            name, kind = f"{names[0]}..{names[-1]}", f"{len(names)} x {kind}"
        yield f"{indent}{name} ({kind}{_sizes(children[0])})"
        yield from _lines(children[0], indent + "  ")


def _signature(module: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    return (type(module), shapes, tuple((name, _signature(child)) for name, child in module.named_children()))


def _sizes(module: nn.Module) -> str:
    shapes = [f"{name} {'x'.join(map(str, p.shape))}" for name, p in module._parameters.items() if p is not None]
    return f": {', '.join(shapes)}" if shapes else ""
