"""Translation of a DeepSpeed file to native configuration and a report, and expansion of `strategy=deepspeed_json`.

The overrides translated from the file precede those typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainwright.command.schema.expansion import ASKS, PATH, Compose, Expansion
from trainwright.tools.deepspeed.reading import ParsedFile, read
from trainwright.tools.deepspeed.recipe import LEAST_OPTIMIZER, Recipe, recipe_of
from trainwright.tools.deepspeed.report import Report
from trainwright.tools.deepspeed.table import APPROXIMATED, KEYS, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.themes.batch import translate_batch
from trainwright.tools.deepspeed.themes.layout import RequestedLayout, translate_layout
from trainwright.tools.deepspeed.themes.optimizer import translate_clipping, translate_optimizer
from trainwright.tools.deepspeed.themes.precision import translate_precision
from trainwright.tools.deepspeed.themes.scheduler import translate_scheduler
from trainwright.tools.deepspeed.translation import Translation, Typed

# Section -> class of the logger, and its package.
_LOGGERS = {
    "wandb": ("trainwright.trainer.loggers.wandb.Wandb", "wandb"),
    "comet": ("lightning.pytorch.loggers.CometLogger", "comet_ml"),
}


def translate_communication(t: Translation, chosen: RequestedLayout, precision: str) -> None:
    """Decide the dtype of communicated gradients."""
    path = "communication_data_type"
    dtype = t.value(path)
    if dtype is None:
        return
    if dtype == "fp32" and precision != "bf16-true":
        t.say(path, MAPPED, "Gradients are averaged in float32.")
    elif t.is_set("compression"):
        t.say(path, APPROXIMATED, "After the warm-up, signs of momentum are sent.")
    elif chosen.replicates:
        if dtype == "fp32":
            t.say(path, APPROXIMATED, "Gradients are averaged in bfloat16.")
        else:
            t.set("compression", dtype, by=path)
    elif chosen.stage and chosen.data_ranks != 1:
        t.set("strategy.reduce_dtype", dtype, by=path)
    else:
        t.say(path, MAPPED, "One data rank averages nothing.")


def translate_logging(t: Translation) -> None:
    """Decide loggers."""
    path = "steps_per_print"
    if t.has(path):
        t.set("trainer.log_every_n_steps", t.value(path), by=path)
    if t.value("tensorboard.enabled"):
        t.set("logger", "default", by="tensorboard.enabled")
        _copy(t, "tensorboard")
    for section, (cls, package) in _LOGGERS.items():
        enabled = f"{section}.enabled"
        if not t.value(enabled):
            continue
        if find_spec(package) is None:
            t.say(enabled, UNSUPPORTED, f"The package {package} is not installed: pip install {package}.")
            continue
        t.set(f"logger.{section}._target_", cls, by=enabled)
        _copy(t, section)


def _copy(t: Translation, section: str) -> None:
    for path in t.paths(section):
        if path in KEYS and KEYS[path].becomes and t.value(path) != "":
            t.set(f"logger.{section}.{KEYS[path].becomes}", t.value(path), by=path)


def translate(given: ParsedFile, recipe: Recipe | None, overrides: Sequence[str] = ()) -> tuple[Report, list[str]]:
    """Translate a file.

    Args:
        given: as returned by :func:`~trainwright.tools.deepspeed.reading.read`.
        recipe: source of "auto" and of values missing in the file; None: no recipe.
        overrides: typed ones, which win.

    Returns:
        The report, and all problems of the file.
    """
    t = Translation(given, recipe, Typed(overrides))
    precision = translate_precision(t)
    chosen = translate_layout(t, precision)
    translate_batch(t, chosen)
    translate_optimizer(t, chosen, precision)
    translate_clipping(t)
    translate_scheduler(t)
    translate_communication(t, chosen, precision)
    translate_logging(t)
    t.apply_table()
    return t.report(), [*given.problems, *dict.fromkeys(t.problems)]


_STRATEGY = re.compile(r"[+~]{0,2}strategy[.=@]")
_OPTIMIZER = re.compile(r"[+~]{0,2}optimizer[=@]")
_RECIPE = re.compile(r"\+{0,2}recipe=.")


def expand(overrides: Sequence[str], compose: Compose) -> Expansion[Report]:
    """Replace `strategy=deepspeed_json` by native configuration.

    Args:
        overrides: as typed, with `strategy=deepspeed_json` and `strategy.path`.
        compose: composes overrides without the file; returns None if they are invalid.
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
    """Translate a file, with the recipe among the typed overrides, if any.

    Args:
        path: of the file.
        typed: other overrides, which win.
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
        without: typed overrides except for the strategy.
        compose: see `expand`.
        optimizer: whether the file has one, which replaces the recipe's arguments.
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
        return text.split("=", 1)[1]  # a path that Hydra would need quoted


def not_expanded(**_: Any) -> NoReturn:
    """Refuse `strategy=deepspeed_json` that was not expanded when the configuration was composed.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "strategy=deepspeed_json is expanded when the configuration is composed: type strategy.path=<ds_config.json> "
        "with it."
    )
