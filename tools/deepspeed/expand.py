"""`strategy=deepspeed_json strategy.path=...`: the overrides that stand for the file, put before what was typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainwright.command.schema.expansion import ASKS, PATH, Compose, Expansion
from trainwright.tools.deepspeed.reading import read
from trainwright.tools.deepspeed.recipe import LEAST_OPTIMIZER, Recipe, recipe_of
from trainwright.tools.deepspeed.report import Report
from trainwright.tools.deepspeed.translate import translate

_STRATEGY = re.compile(r"[+~]{0,2}strategy[.=@]")
_OPTIMIZER = re.compile(r"[+~]{0,2}optimizer[=@]")
_RECIPE = re.compile(r"\+{0,2}recipe=.")


def expand(overrides: Sequence[str], compose: Compose) -> Expansion[Report]:
    """Put native configuration in place of `strategy=deepspeed_json`.

    Args:
        overrides: as typed, with `strategy=deepspeed_json` and `strategy.path`.
        compose: composes overrides without the file; None where they cannot be composed.
    """
    typed = [text for text in overrides if not ASKS.fullmatch(text) and not PATH.fullmatch(text)]
    path = _value([text for text in overrides if PATH.fullmatch(text)][-1])
    if not isinstance(path, str) or not path:
        return Expansion(typed, None, ["strategy.path: must be the path of a DeepSpeed JSON"])
    expansion = translate_file(path, typed, compose)
    if expansion.report is not None:
        expansion.problems += [
            f"{path}: {line.key} changes what is trained and is not supported: {line.note}"
            for line in expansion.report.stopping
        ]
    return expansion


def translate_file(path: str, typed: Sequence[str], compose: Compose) -> Expansion[Report]:
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
    """Return the recipe without the file; None if there is none.

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
    """Refuse `strategy=deepspeed_json` that was not expanded, as happens when a configuration is composed.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "strategy=deepspeed_json is expanded when the configuration is composed: type strategy.path=<ds_config.json> "
        "beside it."
    )
