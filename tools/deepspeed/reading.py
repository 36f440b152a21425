"""Reading a DeepSpeed JSON: JSON and nothing else, each key known and of its type, each problem said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.problems import did_you_mean, nearest
from trainwright.tools.deepspeed.key import (
    ANY,
    AUTO,
    KINDS,
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    WHOLE,
    Key,
)
from trainwright.tools.deepspeed.table import elsewhere, is_section, key_of, names_within

# Larger files are no configuration.
_MOST_BYTES = 2**20


@dataclass
class Given:
    """What a file says.

    Attributes:
        name: of the file, for messages.
        values: dotted path -> value, for every key with a value; whole numbers are int.
        keys: the same paths -> what the key is.
        empty: paths whose value is null or an empty section, which DeepSpeed takes for its defaults.
        problems: what is wrong with the file, one text each.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(path: str | Path) -> Given:
    """Read a file; nothing in it is executed, and nothing but JSON is understood."""
    given = Given(str(path))
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        given.problems.append(f"{path}: cannot be read ({reason}); type the path of a DeepSpeed JSON")
        return given
    if len(text) > _MOST_BYTES:
        given.problems.append(f"{path}: has more than {_MOST_BYTES} characters, so it is no DeepSpeed configuration")
        return given
    repeated: list[str] = []
    try:
        tree = json.loads(text, object_pairs_hook=_once(repeated), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        given.problems.append(f"{path}: is not JSON ({error}); comments, trailing commas, NaN and Infinity are none")
        return given
    given.problems += [f"{path}: {name!r} is given twice in the same section; leave one out" for name in repeated]
    if not isinstance(tree, dict):
        given.problems.append(f"{path}: holds {_seen(tree)}, not a mapping of DeepSpeed's keys")
        return given
    _walk(tree, (), given)
    return given


def _once(repeated: list[str]) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, value in pairs:
            if name in tree:
                repeated.append(name)
            tree[name] = value
        return tree

    return build


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")


def _walk(tree: Mapping[str, Any], at: tuple[str, ...], given: Given) -> None:
    for name, value in tree.items():
        here = (*at, str(name))
        path, key = ".".join(here), key_of(here)
        section = is_section(here)
        if key is None and not section:
            given.problems.append(_unknown(given.name, at, str(name)))
        elif value is None or (section and value == {}):
            given.empty.append(path)
        elif section and isinstance(value, Mapping):
            _walk(value, here, given)
        elif key is None:
            given.problems.append(
                f"{given.name}: {path} is {_seen(value)}, but a section; write "
                f'"{name}": {{"{names_within(here)[0]}": ...}}'
            )
        else:
            problems = [f"{given.name}: {problem}" for problem in _wrong(path, key, value)]
            given.problems += problems
            if not problems:
                given.values[path], given.keys[path] = _plain(key, value), key


def _unknown(file: str, at: tuple[str, ...], name: str) -> str:
    where = ".".join(at)
    siblings = names_within(at)
    near = nearest(name, siblings)
    path = f"{where}.{name}" if where else name
    if near is not None:
        return f"{file}: {path} is no key of DeepSpeed's; did you mean {near}?"
    others = [other for other in elsewhere(name) if other != path]
    if others:
        return f"{file}: {path} is no key of DeepSpeed's; did you mean {' or '.join(others[:3])}?"
    what = f"keys of {where}" if where else "keys"
    return f"{file}: {path} is no key of DeepSpeed's; {did_you_mean(name, siblings, what)}"


def _refers(value: Any) -> bool:
    """Whether some text in a value would be taken for a reference to something else by the configuration."""
    if isinstance(value, dict):
        return any(_refers(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value


def _wrong(path: str, key: Key, value: Any) -> Iterator[str]:
    if _refers(value):
        yield f"{path} has ${{ in it, which refers to something else in a configuration; write it out"
        return
    if value == AUTO and key.kind != ANY:
        if not key.auto:
            yield f'{path} is "auto", which nobody fills in; write {KINDS[key.kind]}'
        return
    if not _is(key.kind, value):
        hint = ""
        if isinstance(value, str) and key.kind != TEXT:
            hint = ", without quotes" if _looks_like(key.kind, value) else ""
        yield f"{path} is {_seen(value)}, but must be {KINDS[key.kind]}{hint}"
    elif key.words and value not in key.words:
        words = sorted({str(word) for word in key.words})
        yield f"{path} is {_seen(value)}; {did_you_mean(str(value), words, 'allowed')}"


def _is(kind: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "whole":
            return number and float(value).is_integer()
        case "number":
            return number
        case "text":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list)
        case "mapping":
            return isinstance(value, dict)
        case "rates":
            return number or (isinstance(value, list) and bool(value) and all(_is(NUMBER, item) for item in value))
    return True


def _looks_like(kind: str, text: str) -> bool:
    try:
        return _is(kind, json.loads(text.lower()))
    except ValueError:
        return False


def _plain(key: Key, value: Any) -> Any:
    return int(value) if key.kind == WHOLE and isinstance(value, float) and value.is_integer() else value


def _seen(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return KINDS[MAPPING if isinstance(value, dict) else LIST]
    return json.dumps(value)
