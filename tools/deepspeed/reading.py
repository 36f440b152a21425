"""Read a DeepSpeed JSON: as JSON and nothing else, each key known, each mapped key of its type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.key import (
    ANY,
    AUTO,
    BOOL,
    KINDS,
    LIST,
    MAPPING,
    NUMBER,
    RATES,
    TEXT,
    WHOLE,
    Key,
)
from trainwright.tools.deepspeed.table import KEYS, TREE, Tree

_TYPES: dict[str, type] = {BOOL: bool, TEXT: str, LIST: list, MAPPING: dict, ANY: object}
# Names closer than this are taken for one; but for these, whose keys have no effect, DeepSpeed has none so close.
_ALIKE = 0.8
_OWN_NAMES = ("amp.min_loss_scale", "amp.max_loss_scale", "comet.experiment_name")
# Larger files are no configuration.
_MOST_BYTES = 2**20


@dataclass
class Given:
    """A file, read.

    Attributes:
        name: of the file, for messages.
        values: dotted path -> value, for every key with a value; whole numbers of mapped keys are int.
        empty: paths whose value is null or an empty section, for which DeepSpeed has its defaults.
        problems: what is wrong with the file, one text each.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
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
    _walk(tree, TREE, "", given)
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


def _walk(tree: Mapping[str, Any], known: Tree, above: str, given: Given) -> None:
    for name, value in tree.items():
        path, below = f"{above}{name}", known.get(name)
        key = KEYS.get(path)
        meant = _meant(path, known) if below is None else []
        if meant:
            given.problems.append(f"{given.name}: {path} is no key of DeepSpeed's; did you mean {' or '.join(meant)}?")
        elif value is None or (value == {} and (below or key is None)):
            given.empty.append(path)
        elif isinstance(value, Mapping) and (below or key is None):
            _walk(value, below or {}, f"{path}.", given)
        elif below and key is None:
            example = f'"{name}": {{"{min(below)}": ...}}'
            given.problems.append(f"{given.name}: {path} is {_seen(value)}, but a section; write {example}")
        elif key is None:
            given.values[path] = value
        elif problem := _wrong(path, key, value):
            given.problems.append(f"{given.name}: {problem}")
        else:
            given.values[path] = int(value) if key.kind == WHOLE and isinstance(value, float) else value


def _meant(path: str, siblings: Tree) -> list[str]:
    """Return the keys that an unknown one is a misspelling of, or that it has lost the section of."""
    if path in _OWN_NAMES:
        return []
    near = get_close_matches(path.rpartition(".")[2], siblings, n=1, cutoff=_ALIKE)
    return near or [known for known in KEYS if "." not in path and known.endswith(f".{path}")][:3]


def _refers(value: Any) -> bool:
    """Return whether the configuration would take some text in a value for a reference to something else."""
    if isinstance(value, dict):
        return any(_refers(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value


def _wrong(path: str, key: Key, value: Any) -> str | None:
    """Return what is wrong with a value; None if nothing is."""
    if _refers(value):
        return f"{path} has ${{ in it, which refers to something else in a configuration; write it out"
    if value == AUTO and key.kind != ANY:
        return None if key.auto else f'{path} is "auto", which nothing fills in; write {KINDS[key.kind]}'
    if not _is(key.kind, value):
        hint = ", without quotes" if isinstance(value, str) and _looks_like(key.kind, value) else ""
        return f"{path} is {_seen(value)}, but must be {KINDS[key.kind]}{hint}"
    if key.words and value not in key.words:
        return f"{path} is {_seen(value)}; {did_you_mean(str(value), map(str, key.words), 'allowed')}"
    if key.least is not None and value < key.least:
        return f"{path} is {value}; must be at least {key.least}"
    return None


def _is(kind: str, value: Any) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind == RATES and isinstance(value, list):
        return bool(value) and all(_is(NUMBER, item) for item in value)
    return number and (kind != WHOLE or float(value).is_integer())


def _looks_like(kind: str, text: str) -> bool:
    try:
        return _is(kind, json.loads(text.lower()))
    except ValueError:
        return False


def _seen(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return KINDS[MAPPING if isinstance(value, dict) else LIST]
    return json.dumps(value)
