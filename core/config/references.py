"""OmegaConf configurations as plain values, without secrets from the environment and without interpolating text that
was read.

A reference like ``${oc.env:HF_TOKEN}`` names a secret without containing it. Written configurations keep such
references and have all others resolved. Text that is read back is not interpolated: otherwise the author of a file
could read any environment variable of its reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

_ENVIRONMENT = "oc.env"
_OPENING = re.compile(r"(\\*)\$\{")

# Environment variables read while resolving a reference.
_asked: ContextVar[list[str] | None] = ContextVar("trainwright_asked_variables", default=None)


def plain_values(config: DictConfig | ListConfig) -> Any:
    """Return a configuration as plain containers, for a file.

    References to environment variables and broken references stay text; all others are resolved.
    """
    _observe_environment()
    return _plain(config, lambda value: value)


def python_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with lists and mappings of OmegaConf as Python's."""
    return {name: python_value(value) for name, value in given.items()}


def python_value(value: Any) -> Any:
    """Return a list or mapping of OmegaConf as Python's, resolved; other values as they are."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def settled(cfg: DictConfig) -> DictConfig:
    """Return a copy of a configuration in which only references to environment variables remain.

    These are resolved when read, in the process that reads them.
    """
    _observe_environment()
    copy = OmegaConf.create(_plain(cfg, literal))
    assert isinstance(copy, DictConfig)
    return copy


def variables_of(cfg: DictConfig) -> set[str]:
    """Return the names of the environment variables that a configuration references."""
    asked: list[str] = []

    def note(config: DictConfig | ListConfig) -> None:
        keys: Any = OmegaConf.to_container(config, resolve=False) or ()
        for key in keys if isinstance(keys, dict) else range(len(keys)):
            if OmegaConf.is_interpolation(config, key):
                asked.extend(_value(config, key)[1])
            elif not OmegaConf.is_missing(config, key) and OmegaConf.is_config(config[key]):
                note(config[key])

    _observe_environment()
    note(cfg)
    return set(asked)


def literal(value: Any) -> Any:
    """Return nested plain containers with ``${`` escaped, so that OmegaConf reads their text verbatim."""
    if isinstance(value, str):
        return _OPENING.sub(lambda found: f"{found[1]}{found[1]}\\${{", value)
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return value


def _plain(config: DictConfig | ListConfig, write: Callable[[Any], Any]) -> Any:
    raw = OmegaConf.to_container(config, resolve=False)
    if isinstance(raw, dict):
        return {key: _leaf(config, key, item, write) for key, item in raw.items()}
    if isinstance(raw, list):
        return [_leaf(config, index, item, write) for index, item in enumerate(raw)]
    return raw


def _leaf(config: DictConfig | ListConfig, key: Any, raw: Any, write: Callable[[Any], Any]) -> Any:
    if not OmegaConf.is_interpolation(config, key):
        return _plain(config[key], write) if isinstance(raw, dict | list) else raw
    try:
        value, asked = _value(config, key)
    except OmegaConfBaseException:
        return raw
    if asked:
        return raw
    return _plain(value, write) if OmegaConf.is_config(value) else write(value)


def _value(config: DictConfig | ListConfig, key: Any) -> tuple[Any, list[str]]:
    """Return the value of a reference and the environment variables it reads."""
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        return config[key], asked
    finally:
        _asked.reset(token)


def _observe_environment() -> None:
    # On every use: the program may have restored OmegaConf's own (`OmegaConf.clear_resolvers`).
    OmegaConf.register_new_resolver(_ENVIRONMENT, _observed, replace=True)


def _observed(*arguments: Any) -> Any:
    """Resolve ``oc.env`` and record the variable."""
    asked = _asked.get()
    if asked is not None:
        asked.append(str(arguments[0]))
    return oc.env(*arguments)
