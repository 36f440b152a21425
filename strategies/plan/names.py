"""Names of modules: matched by patterns, folded for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


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


def inside_any(name: str, outer: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``outer`` or lies in one."""
    return any(within(name, other) for other in outer)
