"""All keys of DeepSpeed's configuration, and how to find one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache

from trainwright.tools.deepspeed.key import Key
from trainwright.tools.deepspeed.keys import methods, parallel, state, training, watching

TABLE: tuple[Key, ...] = (
    *training.KEYS,
    *state.KEYS,
    *parallel.KEYS,
    *watching.KEYS,
    *methods.KEYS,
)


def key_of(path: Iterable[str]) -> Key | None:
    """The key at a path of the file; None if it is none (it may be a section)."""
    parts = tuple(path)
    exact = _by_path().get(".".join(parts))
    return exact or next((key for key in _starred() if _fits(key.parts, parts)), None)


def is_section(path: Iterable[str]) -> bool:
    """Whether there are keys below a path; the whole file is one."""
    parts = tuple(path)
    return any(len(key.parts) > len(parts) and _fits(key.parts[: len(parts)], parts) for key in TABLE)


def names_within(path: Iterable[str]) -> list[str]:
    """Names of keys and sections right below a path."""
    parts = tuple(path)
    below = (key.parts for key in TABLE if len(key.parts) > len(parts) and _fits(key.parts[: len(parts)], parts))
    return sorted({names[len(parts)] for names in below})


def elsewhere(name: str) -> list[str]:
    """Paths of keys and sections that have this very name, or nearly, anywhere in the file."""
    by_name: dict[str, list[str]] = {}
    for key in TABLE:
        for depth, part in enumerate(key.parts):
            path = ".".join(key.parts[: depth + 1])
            if "*" not in path and path not in by_name.setdefault(part, []):
                by_name[part].append(path)
    near = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.75)
    return by_name[near[0]] if near else []


def _fits(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return len(pattern) == len(parts) and all(a in ("*", b) for a, b in zip(pattern, parts, strict=True))


@cache
def _by_path() -> dict[str, Key]:
    return {key.path: key for key in TABLE}


@cache
def _starred() -> tuple[Key, ...]:
    return tuple(key for key in TABLE if "*" in key.path)
