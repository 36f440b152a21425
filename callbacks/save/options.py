"""Validation of the options of a checkpoint callback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from string import Formatter
from typing import Any, Literal

from trainwright.core.config.options import number, value_problems

_WHEN = ("every", "every_n_steps", "every_n_seconds", "every_n_epochs", "save_at_end", "monitor")
_STEPS = "optimizer steps"


@dataclass(eq=False, repr=False)
class SaveOptions:
    """Options of :class:`~trainwright.callbacks.save.run_state.RunStateCheckpoint`, which explains them."""

    dirpath: str | None = None
    filename: str = "step={step}"
    _: KW_ONLY
    every: Literal["auto"] | None = "auto"
    every_n_steps: int | None = number(None, least=1, unit=_STEPS, null="for off")
    every_n_seconds: float | None = number(None, above=0, null="for off")
    every_n_epochs: int | None = number(None, least=1, unit="epochs", null="for off")
    save_at_end: bool = True
    save_weights_only: bool = False
    asynchronous: bool = False
    keep_last: int = number(1, least=1, unit="checkpoints")
    keep_every: int | None = number(None, least=1, unit=_STEPS, null="for off")
    keep_best: int = number(0, unit="checkpoints, 0 for off")
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    mtbf: float = number(24.0, above=0, unit="hours")
    in_memory_every_n_steps: int | None = number(None, least=1, unit=_STEPS, null="for off")
    on_error: Literal["raise", "warn"] = "raise"

    def option_problems(self) -> list[str]:
        """Return what is wrong with the options, one message each."""
        name, keep_best, monitor = SaveName(self.filename), self.keep_best, self.monitor
        problems = [*value_problems(SaveOptions, vars(self)), *name.problems()]
        if problems:
            return problems  # combinations can be judged only if each value is valid
        if keep_best and monitor is None:
            problems.append(f"keep_best={keep_best} without monitor (name a logged value: monitor='val_loss')")
        if monitor is not None and not keep_best:
            problems.append(f"monitor={monitor!r} with keep_best=0 (set how many of the best to keep: keep_best=1)")
        keeps_several = self.keep_last > 1 or self.keep_every is not None or keep_best
        if keeps_several and "step" not in name.fields:
            problems.append(
                f"filename={name.template!r} without {{step}}, while several checkpoints are kept (keep_last, "
                "keep_every or keep_best): they would overwrite each other; add {step}"
            )
        if not any(getattr(self, option) for option in _WHEN):
            problems.append(f"nothing says when to save (give one of {', '.join(_WHEN)})")
        if self.in_memory_every_n_steps is not None and self.save_weights_only:
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
