"""Arguments of the wrong type, which Lightning would take until something fails far from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import formatannotation
from types import FunctionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from trainwright.core.config.options import members

# Values without a rule of their own in Lightning; less than this fails in a step, or turns gradients around.
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0}
# Other objects are left to Lightning, which also takes those that only behave alike.
_JUDGED = (str, int, float, list, tuple, dict, type, FunctionType)


def type_problems(run: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return a problem for each class, function, text, number or collection where an argument takes none.

    Args:
        run: function that has the arguments; others are ignored.
        given: arguments by name.
    """
    hints = get_type_hints(run)
    return [text for name, value in given.items() if name in hints for text in _problems(name, value, hints[name])]


def _problems(name: str, value: Any, hint: Any) -> Iterator[str]:
    kinds = members(hint)
    inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, Iterable)), None)
    if isinstance(value, list | tuple) and inner is not None:
        for place, each in enumerate(value):
            yield from _problems(f"{name}[{place}]", each, inner)
    elif isinstance(value, _JUDGED) and not any(_takes(kind, value) for kind in kinds):
        shown = value.__name__ if isinstance(value, type) else repr(value)
        meant = f"{shown}(...)" if isinstance(value, type) else value if str(value).isdecimal() else ""
        names = " or ".join(re.sub(r"\w+\.", "", formatannotation(kind)).removesuffix("Type") for kind in kinds)
        yield f"{name}={shown}: must be {names}" + (f"; type {name}={meant}" if meant else "")
    elif isinstance(value, int | float) and value < _LEAST.get(name, value):
        yield f"{name}={value!r}: must be {_LEAST[name]} or more"


def _takes(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    is_whole = kind is int and isinstance(value, float) and value.is_integer()  # such as max_steps=1e5
    is_switch = kind is bool and value in (0, 1)
    origin = get_origin(kind) or kind
    return is_whole or is_switch or kind is Any or (origin is not Iterable and isinstance(value, origin))


@contextmanager
def explained(problems: list[str], given: Mapping[str, Any]) -> Iterator[None]:
    """Name the values in errors of Lightning, whose kind is kept, and raise for problems that it does not notice.

    Args:
        problems: of the arguments.
        given: all arguments, by name.

    Raises:
        TypeError: with the problems.
    """
    try:
        yield
    except (MisconfigurationException, TypeError, ValueError, AttributeError) as error:
        text = str(error)
        values = (f"{name}={value!r}" for name, value in given.items() if name in text or str(value) in text.split())
        if problems:
            error.args = (f"{'; '.join(problems)} ({text})",)
        elif "=" not in text and (named := ", ".join(values)):
            error.args = (f"{text} Given: {named}.",)
        if isinstance(error, AttributeError) and problems:
            raise TypeError(*error.args) from error
        raise
    if problems:
        raise TypeError("; ".join(problems))
