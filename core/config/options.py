"""Options as fields of dataclasses: what a field allows, and the one check of given values; without torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields
from functools import cache
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, Unpack, get_args, get_origin, get_type_hints

from trainwright.core.config.override_words import typed
from trainwright.core.config.synonyms import Vocabulary
from trainwright.core.problems import did_you_mean, nearest

# About 30 years: the clocks of Python and torch's stores reject longer times.
_MOST_SECONDS = 1e9
_MOST, _FINITE = 2**63 - 1, sys.float_info.max
_MISSING = "???"
_JSON = {int: "integer", float: "number", bool: "boolean", NoneType: "null", list: "array", dict: "object"}
_INNER: dict[Any, str] = {list: "items", dict: "additionalProperties"}
# JSON Schema of a value that stands elsewhere, like ${max_steps}; the document around it defines it.
REFERENCE = {"$ref": "#/$defs/reference"}


class NumberBounds(TypedDict, total=False):
    """Bounds of numbers: ``least`` (0) and ``most`` are inclusive, ``above`` and ``below`` are not; infinite: none.

    ``unit`` is the unit or meaning of the number, ``null`` the meaning of ``None``, such as "for off".
    """

    least: float
    most: float
    above: float
    below: float
    unit: str
    null: str


def number(default: Any, *words: str, **bounds: Unpack[NumberBounds]) -> Any:
    """Return a field of numbers within bounds, or of lists or mappings of these.

    Args:
        default: a value, or a function that makes it.
        *words: text that is allowed instead of a number, such as ``"auto"``.
        **bounds: of each number, inclusive: ``least`` (default 0) and ``most``; exclusive: ``above`` and ``below``;
            infinite: none. ``unit`` and ``null`` (the meaning of ``None``) appear in messages.
    """
    return _field(default, {"least": 0, **bounds, "words": words})


def word(default: Any, *allowed: str) -> Any:
    """Return a field that takes one of some words, or, if its type is a list, a list of them.

    Args:
        default: a value, or a function that makes it.
        *allowed: the words.
    """
    return _field(default, {"words": allowed})


def checked(default: Any, allows: Callable[[Any], bool], text: str) -> Any:
    """Return a field whose values satisfy a function.

    Args:
        default: a value, or a function that makes it.
        allows: returns whether a value is allowed; ``None`` is allowed wherever the type of the field has it.
        text: what is allowed, for messages: "must be <text>".
    """
    return _field(default, {"allows": allows, "text": text})


def _field(default: Any, rule: Mapping[str, Any]) -> Any:
    return field(default_factory=default, metadata=rule) if callable(default) else field(default=default, metadata=rule)


def refuse(problems: Iterable[str], owner: str = "") -> None:
    """Raise all problems together, if there are any.

    Args:
        problems: one text each.
        owner: begins the message: the name of what has the options.

    Raises:
        ValueError: with every problem.
    """
    found = list(problems)
    if found:
        raise ValueError((f"{owner}: " if owner else "") + "; ".join(found))


def unknown_options(schema: type, given: Iterable[str], prefix: str) -> list[str]:
    """Return a problem for each name that is no field of ``schema``."""
    names = [item.name for item in fields(schema)]
    near = {name: did_you_mean(name, names, "options") for name in given if name not in names}
    return [f"{prefix}{name}: there is no such option; {hint}" for name, hint in near.items()]


def refuse_unknown_arguments(owner: Any, given: Mapping[str, Any], *others: Any, **choices: Collection[str]) -> None:
    """Raise if a constructor or function gets arguments that do not exist.

    Args:
        owner: the function, or the class, whose base classes take arguments as well.
        given: arguments by name.
        *others: that take some of them.
        **choices: words that some arguments take.

    Raises:
        TypeError: with what each is called and what to type, or the nearest names.
    """
    takers = [*(each.__init__ for each in getattr(owner, "__mro__", ())), *others] or [owner]
    names = {name for each in takers for name in signature(each).parameters} - {"self", "args", "kwargs", "_target_"}
    words, shown_by = Vocabulary(names, choices, _shown), f"help({owner.__qualname__})"
    problems = (
        f"{name}={_shown(given[name])}: there is no such argument; "
        + (words.meaning(name, given[name]) or did_you_mean(name, names, "arguments", shown_by))
        for name in given
        if name not in names
    )
    if text := "; ".join(problems):
        raise TypeError(f"{owner.__qualname__}: {text}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__}(...)" if " object at 0x" in repr(value) else repr(value)


def value_problems(schema: type, given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a problem for each value that its field does not allow, with what is allowed.

    Numbers are finite, and not negative unless their field says otherwise, times are within the range of clocks, and
    text is printable and not empty.

    Args:
        schema: dataclass of the options.
        given: values by name; names without a field are ignored.
        prefix: of the names where they are typed, such as ``strategy.``; empty for arguments in Python.
    """
    hints = _hints(schema)
    for item in fields(schema):
        if item.name in given:
            key, value = f"{prefix}{item.name}", given[item.name]
            yield from (text for _, text in field_problems(item, hints[item.name], key, value, bool(prefix)))


def field_problems(
    item: Field[Any], hint: Any, key: str, value: Any, is_typed: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield key and text of what a field does not allow, for each element of a list or mapping of numbers or words.

    Args:
        item: the field.
        hint: its type.
        key: name of the value.
        value: as given.
        is_typed: whether it is typed on the command line; else it is an argument in Python.
    """
    rule = _Rule(item, hint)
    if rule.elements is not None and isinstance(value, Mapping if rule.is_mapping else list | tuple):
        for place, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            at = f"{key}.{place}" if rule.is_mapping else f"{key}[{place}]"
            yield from field_problems(item, rule.elements, at, each, is_typed)
    elif not rule.allows(value):
        yield key, f"{key}={typed(value) if is_typed else repr(value)}: {rule.text(key, value, is_typed)}"


def json_schema(item: Field[Any], hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of the values that a field allows, references included; {} = any value.

    What a function of the field checks is described by its types alone.

    Args:
        item: the field.
        hint: its type.
    """
    return _Rule(item, hint).json_schema()


def require(owner: object, hint: Any, rule: Any, **given: Any) -> None:
    """Check arguments of a constructor that is no dataclass's.

    Args:
        owner: has the arguments.
        hint: type of each.
        rule: field that says what each may be, see :func:`number` and :func:`word`.
        **given: values by name.

    Raises:
        ValueError: with what is allowed.
    """
    for name, value in given.items():
        rule.name = name
        problems = field_problems(rule, hint, name, value, is_typed=False)
        refuse((text for _, text in problems), type(owner).__name__)


def class_of(node: Any) -> str:
    """Return the name of the class that a configuration node builds; empty if it builds none."""
    return str(node.get("_target_", "")).rsplit(".", 1)[-1] if hasattr(node, "get") else ""


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


class _Rule:
    """What a field of a type allows."""

    def __init__(self, item: Field[Any], hint: Any) -> None:
        self.item, self.given, self.kinds = item, item.metadata, members(hint)
        literals = (each for kind in self.kinds if get_origin(kind) is Literal for each in get_args(kind))
        self.words: tuple[str, ...] = (*self.given.get("words", ()), *literals)
        is_any = Any in self.kinds and "least" in self.given
        self.numbers = {float} if is_any else {int, float}.intersection(self.kinds)
        self.is_mapping = any(get_origin(kind) is dict for kind in self.kinds)
        inner = (get_args(kind)[-1] for kind in self.kinds if get_origin(kind) in (list, dict))
        has_rule = bool(self.words or "least" in self.given)
        self.elements = next((each for each in inner if has_rule or {int, float} & {*members(each)}), None)
        self.is_checked = bool(self.numbers or self.words or self.elements or bool in self.kinds)
        self.has_null = NoneType in self.kinds or "null" in self.given
        is_time = item.name.endswith(("seconds", "timeout"))
        self.most = self.given.get("most", _MOST_SECONDS if is_time else _MOST if self.numbers == {int} else _FINITE)

    def allows(self, value: Any) -> bool:
        if value == _MISSING or (value is None and self.has_null):
            return True
        if "allows" in self.given:
            return bool(self.given["allows"](value))
        if isinstance(value, str) and self.elements is None and (self.words or {str, Any}.intersection(self.kinds)):
            return value in self.words if self.words else value.isprintable() and bool(value.strip())
        if isinstance(value, bool):
            return bool in self.kinds or not self.is_checked
        is_number = bool(self.numbers) and isinstance(value, int if self.numbers == {int} else int | float)
        return (is_number and self._is_within(value)) or not self.is_checked

    def _is_within(self, value: float) -> bool:
        given = self.given
        is_between = value > given.get("above", -math.inf) and ("below" not in given or value < given["below"])
        return is_between and bool(given.get("least", 0) <= value <= self.most)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what is allowed."""
        is_word = bool(self.words) and self.elements is None
        if Any in self.kinds and not (is_word or self.numbers):
            return {}
        kinds = dict.fromkeys(
            [*self.numbers, *self.kinds, *([NoneType] if self.has_null and not self.elements else [])]
        )
        named = [self._json_of(kind) for kind in kinds if (get_origin(kind) or kind) in _JSON]
        text = [{"type": "string", "pattern": r"\S"}] if str in self.kinds else []
        return {"anyOf": [*([{"enum": [*self.words]}] if is_word else text), *named, REFERENCE]}

    def _json_of(self, kind: Any) -> dict[str, Any]:
        names = {"minimum": "least", "maximum": "most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
        is_free = kind not in (int, float) or "allows" in self.given
        given = {} if is_free else {"least": 0, "most": self.most, **self.given}
        bounds = {name: given[key] for name, key in names.items() if math.isfinite(given.get(key, math.inf))}
        more = {_INNER[get_origin(kind)]: _Rule(self.item, get_args(kind)[-1]).json_schema()} if get_args(kind) else {}
        return {"type": _JSON[get_origin(kind) or kind], **bounds, **more}

    def text(self, key: str, value: Any, is_typed: bool) -> str:
        """Return what is allowed instead of a value."""
        if isinstance(value, str) and not (self.is_checked or "allows" in self.given):
            why = "has characters that cannot be printed" if value.strip() else "is empty"
            return f"{why}; type another value, null where the key takes it, or leave the key out"
        why = self.given.get("null", "for no limit" if self.item.name.startswith("max_") else "")
        null = [f"{'null' if is_typed else 'None'} {why}".strip()] if self.has_null else []
        if self.words and not self.numbers and self.elements is None:
            near = nearest(str(value), self.words)
            return f"unknown; {f'did you mean {near}? ' if near else ''}allowed: {', '.join([*self.words, *null])}"
        default = self.item.default
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        usual = f"; the default is {key}={default}" if is_number else ""
        return f"must be {', or '.join([self._choices(value), *null])}{usual}"

    def _choices(self, value: Any) -> str:
        if "allows" in self.given:
            return str(self.given["text"])
        if self.elements is not None:
            return f"a {'mapping' if self.is_mapping else 'list'}, each {_Rule(self.item, self.elements)._choices(0)}"
        numbers = [self._bounds(value)] if self.numbers else []
        return " or ".join([*numbers, *self.words, *(["true or false"] if bool in self.kinds else [])])

    def _bounds(self, value: Any) -> str:
        given, bounds = self.given, []
        if "above" in given:
            bounds.append(f"above {given['above']:g}")
        elif given.get("least", 0) > -math.inf:
            bounds.append(f"of at least {given.get('least', 0):g}")
        is_over = isinstance(value, int | float) and self.most < value < math.inf
        if "below" in given:
            bounds.append(f"below {given['below']:g}")
        elif given.get("most", math.inf) < math.inf or self.most == _MOST_SECONDS or is_over:
            bounds.append(f"at most {int(self.most)}")
        unit = f" ({given['unit']})" if "unit" in given else ""
        return f"{'a whole' if self.numbers == {int} else 'a finite'} number {' and '.join(bounds)}".strip() + unit
