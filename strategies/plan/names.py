"""Names of modules: pattern matching, nesting, and abbreviation for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match ``pattern``, in their order. A star matches within one level."""
    level = pattern.count(".")
    return [name for name in names if name.count(".") == level and fnmatchcase(name, pattern)]


def matched(names: Sequence[str], patterns: Iterable[str], option: str) -> list[str]:
    """Return the names that match any of ``patterns``, in the order of the patterns.

    Raises:
        ValueError: naming ``option``, if a pattern matches nothing.
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
    """Return the name of the parent of ``name``; the root is ``""``."""
    return name.rpartition(".")[0]


def joined(outer: str, inner: str) -> str:
    """Return the name of ``inner`` within ``outer``; either may be the root, ``""``."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def within(name: str, outer: str) -> bool:
    """Return whether ``name`` is ``outer`` or lies in it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def folded(names: Iterable[str]) -> list[str]:
    """Return names with numbers replaced by stars, without duplicates: ``layers.*.mlp``."""
    return list(dict.fromkeys(starred(name) for name in names))


def starred(name: str) -> str:
    """Return ``name`` with numbers replaced by stars."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def inside_any(name: str, outer: Iterable[str]) -> bool:
    """Return whether ``name`` is one of ``outer`` or lies in one."""
    return any(within(name, other) for other in outer)
