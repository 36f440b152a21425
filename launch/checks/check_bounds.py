"""Values against the bounds declared in the schema, for every key without a check of its own.

Unless their field says otherwise, numbers are finite and not negative, times are within the range of clocks, and text
is not empty and printable.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf

from trainwright.core.problems import did_you_mean
from trainwright.launch.schema import RunConfig

# About 30 years: the clocks of Python and torch's stores reject longer times.
_MOST_SECONDS = 1e9
_MOST = 2**63 - 1
# Keys of type Any that other checks index.
_GROUPS = ("strategy", "accumulation", "compression", "optimizer")


def bound_problems(cfg: DictConfig, missing: Sequence[str] = ()) -> dict[str, str]:
    """Return violations of the schema's bounds by dotted key.

    Args:
        cfg: as composed, so that its parts know their types; all references resolve.
        missing: keys of groups whose missing value was replaced by null.
    """
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    found = dict(_schema_problems(RunConfig, values, cfg, ""))
    found.update(
        (key, f"{key}={values[key]}: is not a mapping; type {key}=<choice>, `trainwright fit --help` lists them")
        for key in _GROUPS
        if not isinstance(values.get(key), dict) and key not in missing
    )
    found.update(_optimizer_problems(values.get("optimizer")))
    return found


def _schema_problems(schema: Any, values: Mapping[str, Any], typed: Any, path: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        value, key = values.get(item.name), f"{path}{item.name}"
        below = typed._get_node(item.name) if isinstance(typed, DictConfig) else None
        part = OmegaConf.get_type(below) if isinstance(below, DictConfig) else hints[item.name]
        if isinstance(value, dict) and is_dataclass(part):
            yield from _schema_problems(part, value, below, f"{key}.")
        elif isinstance(value, dict) and float in get_args(hints[item.name]):
            for name, each in value.items():
                yield from _problem(f"{key}.{name}", each, _number_problem(item, f"{key}.{name}", each))
        elif isinstance(value, str) and value != "???":
            yield from _problem(key, value, _text_problem(item, value))
        else:
            yield from _problem(key, value, _number_problem(item, key, value))


def _problem(key: str, value: Any, problem: str | None) -> Iterator[tuple[str, str]]:
    if problem is not None:
        yield key, f"{key}={value}: {problem}"


def _number_problem(item: Field[Any], key: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    least, most, above = item.metadata.get("least", 0), item.metadata.get("most"), item.metadata.get("above")
    is_time = item.name.endswith(("seconds", "timeout"))
    limit = most if most is not None else _MOST_SECONDS if is_time else _MOST if isinstance(value, int) else math.inf
    if math.isfinite(value) and least <= value <= limit and (above is None or value > above):
        return None
    kind = "a whole number" if isinstance(value, int) else "a finite number"
    has_upper = math.isfinite(limit) and (most is not None or is_time or value > limit)
    upper = f" and at most {int(limit)}" if has_upper else ""
    lower = f"of at least {least:g}" if above is None else f"above {above:g}"
    return f"must be {kind} {lower}{upper}{_null_hint(item)}{_default_hint(item, key)}"


def _default_hint(item: Field[Any], key: str) -> str:
    is_number = isinstance(item.default, int | float) and not isinstance(item.default, bool)
    return f"; the default is {key}={item.default}" if is_number else ""


def _null_hint(item: Field[Any]) -> str:
    if "None" not in str(item.type):
        return ""
    return ", or null for no limit" if item.name.startswith("max_") else ", or null"


def _text_problem(item: Field[Any], value: str) -> str | None:
    if not value.strip():
        return "is empty; type a value, null where the key takes it, or leave the key out"
    if not value.isprintable():
        return "has characters that cannot be printed; leave them out"
    words = item.metadata.get("words")
    return None if words is None or value in words else f"unknown; {did_you_mean(value, words, 'choices')}"


def _optimizer_problems(options: Any) -> Iterator[tuple[str, str]]:
    """Refuse a learning rate that is not finite or negative; the optimizer class checks its other options itself."""
    rate = options.get("lr") if isinstance(options, Mapping) else None
    if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < math.inf):
        yield "optimizer.lr", f"optimizer.lr={rate}: must be a finite number of at least 0; type optimizer.lr=0.001"
