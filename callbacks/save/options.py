"""Validation of the options of a checkpoint callback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import Formatter
from typing import Any

from trainwright.core.config.option_rules import Rule, broken_rules, is_count, is_positive, or_none

_RULES: dict[str, Rule] = {
    "every": (lambda value: value in ("auto", None), '"auto", or None for off'),
    "every_n_steps": (or_none(is_count), "1 or more optimizer steps, or None for off"),
    "every_n_seconds": (or_none(is_positive), "more than 0 seconds, or None for off"),
    "every_n_epochs": (or_none(is_count), "1 or more epochs, or None for off"),
    "keep_last": (is_count, "1 or more checkpoints"),
    "keep_every": (or_none(is_count), "1 or more optimizer steps, or None for off"),
    "keep_best": (lambda value: value == 0 or is_count(value), "0 for off, or 1 or more checkpoints"),
    "mode": (lambda value: value in ("min", "max"), '"min" or "max"'),
    "mtbf": (is_positive, "more than 0 hours"),
    "in_memory_every_n_steps": (or_none(is_count), "1 or more optimizer steps, or None for off"),
    "on_error": (lambda value: value in ("raise", "warn"), '"raise" or "warn"'),
}
_WHEN = ("every", "every_n_steps", "every_n_seconds", "every_n_epochs", "save_at_end", "monitor")


def save_problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the arguments of ``RunStateCheckpoint``, one message each.

    Args:
        given: all of them by name.
    """
    name = SaveName(given["filename"])
    problems = broken_rules(_RULES, given) + name.problems()
    if problems:
        return problems  # combinations can be judged only if each value is valid
    monitor, keep_best = given["monitor"], given["keep_best"]
    if keep_best and monitor is None:
        problems.append(f"keep_best={keep_best} without monitor (name a logged value: monitor='val_loss')")
    if monitor is not None and not keep_best:
        problems.append(f"monitor={monitor!r} with keep_best=0 (set how many of the best to keep: keep_best=1)")
    keeps_several = given["keep_last"] > 1 or given["keep_every"] is not None or keep_best
    if keeps_several and "step" not in name.fields:
        problems.append(
            f"filename={name.template!r} without {{step}}, while several checkpoints are kept (keep_last, keep_every "
            "or keep_best): they would overwrite each other; add {step}"
        )
    if not any(given[option] for option in _WHEN):
        problems.append(f"nothing says when to save (give one of {', '.join(_WHEN)})")
    if given["in_memory_every_n_steps"] is not None and given["save_weights_only"]:
        problems.append("in_memory_every_n_steps with save_weights_only=True (weights alone cannot be resumed)")
    return problems


class SaveName:
    """Names of checkpoints from a template: ``"step={step}"`` gives ``step=1200``.

    Args:
        template: for ``str.format``, with the fields ``step`` and ``epoch`` (integers) and any logged metric (floats),
            such as ``"{epoch}-{step:06d}-{val/loss:.3f}"``.
    """

    def __init__(self, template: str) -> None:
        self.template = template

    def problems(self) -> list[str]:
        """Return what is wrong with the template, one message each."""
        given = f"filename={self.template!r}"
        try:
            if any(not field or field.isdigit() for field in self.fields):
                raise ValueError("a field has no name")
            name = self.template.format_map(_Example())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return [f'{given} ({error}; allowed: a template such as "step={{step}}" or "{{epoch}}-{{val_loss:.3f}}")']
        if not name or name.startswith(".") or "/" in name or "\\" in name:
            return [f"{given} (allowed: the name of one folder, not starting with a dot; set its parent by dirpath)"]
        return []

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""
        return [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]

    def make(self, step: int, epoch: int, metrics: Mapping[str, float]) -> str:
        """Return the name of one checkpoint; a metric that has not been logged yet is ``nan``."""
        known: dict[str, Any] = {**metrics, "step": step, "epoch": epoch}
        return self.template.format_map({field: known.get(field, math.nan) for field in self.fields})


class _Example(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return 0 if name in ("step", "epoch") else 0.5
