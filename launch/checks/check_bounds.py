"""Values against what the fields of the schema allow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.options import field_problems
from trainwright.launch.schema import RunConfig

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
        elif item.name in values:
            yield from field_problems(item, hints[item.name], key, value)


def _optimizer_problems(options: Any) -> Iterator[tuple[str, str]]:
    """Refuse a learning rate that is not finite or negative; the optimizer class checks its other options itself."""
    rate = options.get("lr") if isinstance(options, Mapping) else None
    if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < math.inf):
        yield "optimizer.lr", f"optimizer.lr={rate}: must be a finite number of at least 0; type optimizer.lr=0.001"
