"""Parsing and validation of a DeepSpeed JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed import table

_TYPES: dict[str, type] = {table.BOOL: bool, table.TEXT: str, table.LIST: list, table.MAPPING: dict, table.ANY: object}
# Similarity above which a name is a misspelling; the exceptions are keys of DeepSpeed without effect.
_ALIKE = 0.8
_OWN_NAMES = ("amp.min_loss_scale", "amp.max_loss_scale", "comet.experiment_name")
# Larger files are not configurations.
_MOST_BYTES = 2**20


@dataclass
class ParsedFile:
    """A parsed file.

    Attributes:
        name: of the file, for messages.
        values: dotted path -> value; whole numbers of mapped keys are int.
        empty: paths with null or an empty section, for which DeepSpeed uses defaults.
        problems: one text each.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(path: str | Path) -> ParsedFile:
    """Parse a file as JSON; nothing in it is executed."""
    given = ParsedFile(str(path))
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        given.problems.append(f"{path}: cannot be read ({reason}); type the path of a DeepSpeed JSON")
        return given
    if len(text) > _MOST_BYTES:
        given.problems.append(f"{path}: has more than {_MOST_BYTES} characters, so it is not a DeepSpeed configuration")
        return given
    repeated: list[str] = []
    try:
        tree = json.loads(text, object_pairs_hook=_once(repeated), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        given.problems.append(f"{path}: is not JSON ({error}); it allows no comments, trailing commas, NaN or Infinity")
        return given
    given.problems += [f"{path}: {name!r} is given twice in the same section; leave one out" for name in repeated]
    if not isinstance(tree, dict):
        given.problems.append(f"{path}: contains {_describe(tree)}, not a mapping of DeepSpeed's keys")
        return given
    _walk(tree, table.TREE, "", given)
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
    raise ValueError(f"{constant} is not a JSON number")


def _walk(tree: Mapping[str, Any], known: table.Tree, above: str, given: ParsedFile) -> None:
    for name, value in tree.items():
        path, below = f"{above}{name}", known.get(name)
        key = table.KEYS.get(path)
        similar = _similar_keys(path, known) if below is None else []
        if similar:
            given.problems.append(
                f"{given.name}: {path} is not a key of DeepSpeed; did you mean {' or '.join(similar)}?"
            )
        elif value is None or (value == {} and (below or key is None)):
            given.empty.append(path)
        elif isinstance(value, Mapping) and (below or key is None):
            _walk(value, below or {}, f"{path}.", given)
        elif below and key is None:
            example = f'"{name}": {{"{min(below)}": ...}}'
            given.problems.append(f"{given.name}: {path} is {_describe(value)}, but must be a section; write {example}")
        elif key is None:
            given.values[path] = value
        elif problem := _problem_of(path, key, value):
            given.problems.append(f"{given.name}: {problem}")
        else:
            given.values[path] = int(value) if key.kind == table.WHOLE and isinstance(value, float) else value


def _similar_keys(path: str, siblings: table.Tree) -> list[str]:
    """Return the keys that an unknown one may be a misspelling of, or whose section it lacks."""
    if path in _OWN_NAMES:
        return []
    near = get_close_matches(path.rpartition(".")[2], siblings, n=1, cutoff=_ALIKE)
    return near or [known for known in table.KEYS if "." not in path and known.endswith(f".{path}")][:3]


def _problem_of(path: str, key: table.Key, value: Any) -> str | None:
    """Return the problem of a value, if any."""
    if "${" in json.dumps(value):
        return f"{path} contains ${{, an interpolation; write the value"
    if value == table.AUTO and key.kind != table.ANY:
        return None if key.auto else f'{path} is "auto", which is not supported for it; write {table.KINDS[key.kind]}'
    if not _is(key.kind, value):
        hint = ", without quotes" if isinstance(value, str) and _looks_like(key.kind, value) else ""
        return f"{path} is {_describe(value)}, but must be {table.KINDS[key.kind]}{hint}"
    if key.words and value not in key.words:
        return f"{path} is {_describe(value)}; {did_you_mean(str(value), map(str, key.words), 'allowed')}"
    if key.least is not None and value < key.least:
        return f"{path} is {value}; must be at least {key.least}"
    return None


def _is(kind: str, value: Any) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind == table.RATES and isinstance(value, list):
        return bool(value) and all(_is(table.NUMBER, item) for item in value)
    return number and (kind != table.WHOLE or float(value).is_integer())


def _looks_like(kind: str, text: str) -> bool:
    try:
        return _is(kind, json.loads(text.lower()))
    except ValueError:
        return False


def _describe(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return table.KINDS[table.MAPPING if isinstance(value, dict) else table.LIST]
    return json.dumps(value)
