"""`strategy=deepspeed_json strategy.path=...`: the overrides that stand for the file, put before what was typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainwright.tools.deepspeed.reading import read
from trainwright.tools.deepspeed.recipe import LEAST_OPTIMIZER, Recipe, recipe_of
from trainwright.tools.deepspeed.report import Report
from trainwright.tools.deepspeed.translate import translate

CHOICE = "deepspeed_json"
_ASKS = re.compile(rf"\+{{0,2}}strategy=['\"]?{CHOICE}['\"]?")
_PATH = re.compile(r"\+{0,2}strategy\.path=.*", re.DOTALL)
_STRATEGY = re.compile(r"[+~]{0,2}strategy[.=@]")
_OPTIMIZER = re.compile(r"[+~]{0,2}optimizer[=@]")
_RECIPE = re.compile(r"\+{0,2}recipe=.")
Compose = Callable[[Sequence[str]], DictConfig | None]


@dataclass
class Expansion:
    """What a file stands for.

    Attributes:
        overrides: to compose with: those of the file, then what was typed.
        report: what became of each key; None where the file could not be read.
        problems: one text each.
    """

    overrides: list[str]
    report: Report | None = None
    problems: list[str] = field(default_factory=list)


def asks_for_file(overrides: Sequence[str]) -> bool:
    """Whether a DeepSpeed JSON is to be expanded; without its path there is nothing to expand yet."""
    return any(_ASKS.fullmatch(text) for text in overrides) and any(_PATH.fullmatch(text) for text in overrides)


def expand(overrides: Sequence[str], compose: Compose) -> Expansion:
    """Put native configuration in place of `strategy=deepspeed_json`.

    Args:
        overrides: as typed, with `strategy=deepspeed_json` and `strategy.path`.
        compose: composes overrides without the file; None where they cannot be composed.
    """
    typed = [text for text in overrides if not _ASKS.fullmatch(text) and not _PATH.fullmatch(text)]
    path = _value([text for text in overrides if _PATH.fullmatch(text)][-1])
    if not isinstance(path, str) or not path:
        return Expansion(typed, None, ["strategy.path: must be the path of a DeepSpeed JSON"])
    expansion = translate_file(path, typed, compose)
    if expansion.report is not None:
        expansion.problems += [
            f"{path}: {line.key} changes what is trained and cannot be had: {line.note}"
            for line in expansion.report.stopping
        ]
    return expansion


def translate_file(path: str, typed: Sequence[str], compose: Compose) -> Expansion:
    """Translate a file, with the recipe among what was typed, if there is one.

    Args:
        path: of the file.
        typed: overrides beside it, which win.
        compose: see `expand`.
    """
    given = read(path)
    if given.problems and not given.values:
        return Expansion(list(typed), None, given.problems)
    without = [text for text in typed if not _STRATEGY.match(text)]
    report, problems = translate(given, _recipe(without, compose, "optimizer.type" in given.values), typed)
    return Expansion([*report.overrides, *typed], report, problems)


def _recipe(without: Sequence[str], compose: Compose, optimizer: bool) -> Recipe | None:
    """What holds without the file.

    Args:
        without: what was typed but for the strategy.
        compose: see `expand`.
        optimizer: whether the file has one, so that arguments of the recipe's must go.
    """
    if not any(_RECIPE.match(text) for text in without):
        return None
    cfg = compose(without)
    if cfg is None or not optimizer or any(_OPTIMIZER.match(text) for text in without):
        return None if cfg is None else recipe_of(cfg)
    return recipe_of(cfg, compose([*without, f"optimizer={LEAST_OPTIMIZER}"]))


def _value(text: str) -> Any:
    try:
        return OverridesParser.create().parse_override(text).value()
    except HydraException:
        return text.split("=", 1)[1]  # a path with signs that Hydra wants in quotes


def not_expanded(**_: Any) -> NoReturn:
    """What `strategy=deepspeed_json` stands for until it is expanded, which happens when a configuration is composed.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "strategy=deepspeed_json is expanded when the configuration is composed: type strategy.path=<ds_config.json> "
        "beside it."
    )
