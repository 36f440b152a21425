"""Missing values and unresolvable references of a configuration."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, ValidationError

from trainwright.core.config.references import literal
from trainwright.core.failures.error_text import first_line
from trainwright.core.problems import ConfigError, did_you_mean


def missing_values(cfg: DictConfig) -> list[str]:
    """Return one message per mandatory key without a value."""
    missing = sorted(_missing_keys(OmegaConf.to_container(cfg, resolve=False)))
    if "name" in missing:
        return ["name has no value; the recipe sets it, for example name: mine (its runs then lie under runs/mine/)"]
    return [f"{key} has no value, but {cfg.name} needs one; type {key}=..." for key in missing]


def without_missing(cfg: DictConfig) -> DictConfig:
    """Return a copy with null for missing values, so that the rest can be checked."""
    cfg = cfg.copy()
    with open_dict(cfg):
        for key in list(_missing_keys(OmegaConf.to_container(cfg, resolve=False))):
            OmegaConf.update(cfg, key, "unnamed" if key == "name" else None)
    return cfg


def unresolved(cfg: DictConfig) -> list[str]:
    """Return messages for missing values and broken references; empty if every reference can be resolved."""
    try:
        resolved(without_missing(cfg))
    except ConfigError as error:
        return [*missing_values(cfg), *error.problems]
    except ValidationError:  # a key that cannot be null
        return missing_values(cfg)
    return []


def resolved(cfg: DictConfig) -> DictConfig:
    """Return a copy with references replaced by their values.

    Raises:
        ConfigError: if a reference cannot be resolved.
    """
    try:
        found = OmegaConf.create(literal(OmegaConf.to_container(cfg, resolve=True)))
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([f"{key}the reference cannot be resolved: {_reason(cfg, first_line(error))}"]) from error
    assert isinstance(found, DictConfig)
    return found


def _reason(cfg: DictConfig, message: str) -> str:
    """Return why a reference is broken, and what to type if that is known."""
    if variable := re.search(r"Environment variable '([^']+)' not found", message):
        return f"{message}; type export {variable[1]}=... first, or a default: ${{oc.env:{variable[1]},value}}"
    key = re.search(r"Interpolation key '([\w.]+)' not found", message)
    parent = key[1].rpartition(".")[0] if key else ""
    node = OmegaConf.select(cfg, parent) if parent else cfg
    names = [".".join(filter(None, (parent, str(name)))) for name in node] if isinstance(node, DictConfig) else []
    return f"{message}; {did_you_mean(key[1], names, 'keys', '`--print-config`')}" if key else message


def _missing_keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield dotted keys whose own value is missing; ``OmegaConf.missing_keys`` fails on broken references."""
    if node == MISSING:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        here = f"[{key}]" if isinstance(node, list) else f".{key}" if path else str(key)
        yield from _missing_keys(value, path + here)
