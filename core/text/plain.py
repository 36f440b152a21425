"""Plain values, as ``dataclasses.asdict`` and JSON produce them, and dataclasses rebuilt from these."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from itertools import repeat
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_fields: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def rebuilt(kind: Any, plain: Any) -> Any:
    """Return a value of an annotated type from plain values, without running code from them.

    Args:
        kind: a dataclass, a tuple, list, dict or sequence of them, one of them or None, or a plain type.
        plain: the output of ``asdict`` and JSON.

    Raises:
        TypeError: if a field is missing.
        KeyError: if there is an unknown field.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if plain is None:
        return None
    if is_dataclass(kind):
        kinds = _fields(kind)
        return kind(**{name: rebuilt(kinds[name], value) for name, value in plain.items()})  # type: ignore[operator]
    if origin is UnionType:
        return rebuilt(inner[0], plain)
    if origin is tuple:
        each = repeat(inner[0]) if inner[-1] is Ellipsis else inner
        return tuple(rebuilt(*pair) for pair in zip(each, plain, strict=False))
    if origin in (list, Sequence):
        return [rebuilt(inner[0], value) for value in plain]
    if origin is dict:  # JSON keys are strings
        return {inner[0](key): rebuilt(inner[1], value) for key, value in plain.items()}
    return plain


def finite(value: Any) -> Any:
    """Return plain values with NaN and infinities replaced by strings, since JSON lacks them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the lines of a table with columns as wide as needed; ``align`` has a < or > for each."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  " + "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
