"""What is impossible about the options of a checkpoint callback, found before training begins, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.callbacks.save.name import SaveName
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
    """What is wrong with the arguments of ``RunStateCheckpoint``, one text each.

    Args:
        given: all of them by name.
    """
    problems = broken_rules(_RULES, given)
    name = SaveName(given["filename"])
    wrong_name = name.problems()
    problems += wrong_name
    if problems:
        return problems  # what the values mean together can be judged only once each is possible
    monitor, keep_best = given["monitor"], given["keep_best"]
    if keep_best and monitor is None:
        problems.append(f"keep_best={keep_best} without monitor (say by which logged value: monitor='val_loss')")
    if monitor is not None and not keep_best:
        problems.append(f"monitor={monitor!r} with keep_best=0 (say how many of the best to keep: keep_best=1)")
    keeps_several = given["keep_last"] > 1 or given["keep_every"] is not None or keep_best
    if keeps_several and not name.has_step:
        problems.append(
            f"filename={name.template!r} without {{step}}, while several checkpoints are kept (keep_last, keep_every "
            "or keep_best): one would replace the other; write {step} into it"
        )
    if not any(given[option] for option in _WHEN):
        problems.append(f"nothing says when to save (give one of {', '.join(_WHEN)})")
    if given["in_memory_every_n_steps"] is not None and given["save_weights_only"]:
        problems.append("in_memory_every_n_steps with save_weights_only=True (a run cannot go on from weights alone)")
    return problems
