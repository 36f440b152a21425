"""Random commands with junk for any key of a configuration, and their checks."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.command.run import plan
from trainwright.command.schema.compose import compose_checked
from trainwright.core.problems import ConfigError

# Choices of groups, so that every part of the schema is in one of the bases.
BASES: tuple[tuple[str, ...], ...] = (
    ("recipe=digits",),
    ("recipe=digits", "guard=rollback", "checkpoint=best", "monitor=thorough", "optimizer=sgd"),
    ("recipe=digits", "strategy=ddp", "devices=2", "compression=topk", "balance=auto", "launch=resilient"),
    ("recipe=digits", "strategy=zero3", "devices=2", "launch=kubernetes", "launch.image=a", "launch.claim=b"),
    ("recipe=digits", "strategy=parameter_server", "devices=2", "compression=powersgd", "accumulation=fixed",
     "accumulation.steps=2", "global_batch_size=32"),
    ("recipe=digits", "strategy=diloco", "devices=2", "preemption=none", "guard=skip"),
    ("recipe=digits", "strategy=hybrid", "devices=2", "optimizer=adagrad", "checkpoint=async"),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    -1, 0, 1, 7, -0.5, 0.5, 1e300, -1e300, 10**9, 10**30, float("nan"), float("inf"), True, False, None,
    [], {}, [1, 2], [None], {"a": 1}, {"_target_": "os.getcwd"}, [[[]]],
    "", " ", "abc", "nan", "auto", "none", "last", "-1", "../../x", "/dev/null", "/proc/self/mem", "~", "http://",
    "file:///nope", "os.getcwd", "os.path", "builtins.object", "nope.Nope", "a.b.c.", "{step", "{}", "{0}", "{step!x}",
    "${nope}", "${oc.env:NOPE}", "${oc.decode:\"[\"}", "${name}", "${.}", "${..}", "${oc.select:nope}", "${strategy}",
    "???", "a\nb", "\x1b[2J", "\x00", "\u202e", "x" * 5000, "(" * 200, "%s", "=", "a=b", "lr=1,2", "*", "[", "$", "'",
)  # fmt: skip
# Keys whose value a class of the module's or of the data's would turn into memory or files.
_NOT_BUILT = ("module.", "data.", "run_dir", "name", "init_from", "ckpt_path", "logger.")


@functools.cache
def composed(base: tuple[str, ...]) -> DictConfig:
    """The configuration of a base, which every draw copies."""
    result = compose_checked(base)
    assert result.cfg is not None
    assert not result.problems, result.problems
    return result.cfg


@functools.cache
def keys_of(base: tuple[str, ...]) -> tuple[str, ...]:
    """Every dotted key of a base, parts and leaves; those of the schema and those of its free-form parts."""
    return tuple(_keys(OmegaConf.to_container(composed(base))))


def _keys(node: Any, path: str = "") -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        here = f"{path}.{key}" if path else str(key)
        yield here
        yield from _keys(value, here)


def override(key: str, value: Any) -> str:
    """Return the override that sets a key to a value."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_typed, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def problems_of(base: tuple[str, ...], drawn: dict[str, Any], verb: str, *, whole: bool) -> list[str]:
    """Why a command with drawn values is refused; empty: it is accepted.

    Args:
        base: its choices of groups.
        drawn: values by key.
        verb: fit, validate, test or predict.
        whole: compose it from what is typed; else put the values into the composed base, as Hydra does in the end.
    """
    try:
        if whole:
            result = compose_checked([*base, *(override(key, value) for key, value in drawn.items())])
            return [*result.problems, *(_checked(result.cfg, verb) if result.cfg and result.guessed else ())]
        cfg = composed(base).copy()
        try:
            for key, value in drawn.items():
                OmegaConf.update(cfg, key, value, merge=False)
        except (OmegaConfBaseException, ValueError, AssertionError):  # it asserts that what holds a key is no text
            return ["of another type"]
        return _checked(cfg, verb)
    except ConfigError as error:
        return list(error.problems)


def _checked(cfg: DictConfig, verb: str) -> list[str]:
    planned, problems = plan(cfg, verb)
    if not problems and cfg.run_dir is None:
        planned.run_dir = "built"
    _ACCEPTED[:] = [] if problems else [planned]
    return problems


# The configuration that was accepted last.
_ACCEPTED: list[DictConfig] = []


def build_accepted(drawn: dict[str, Any]) -> list[str]:
    """Build what was accepted last, where that takes one process and no memory to speak of."""
    from trainwright.launch.worker import build

    if not _ACCEPTED or _ACCEPTED[0].devices != 1 or any(key.startswith(_NOT_BUILT) for key in drawn):
        return []
    cfg = OmegaConf.create(OmegaConf.to_container(_ACCEPTED[0], resolve=True))
    assert isinstance(cfg, DictConfig)
    try:
        with mock.patch.dict(os.environ):  # some of what is built sets variables of torch
            build(cfg)
    except ConfigError as error:
        return list(error.problems)
    finally:
        shutil.rmtree(Path("built"), ignore_errors=True)
    return []
