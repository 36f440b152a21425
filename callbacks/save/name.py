"""The name of a checkpoint, from a template that is checked before training begins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import Formatter
from typing import Any


class SaveName:
    """Makes names of checkpoints such as ``step=1200`` of a template such as ``"step={step}"``.

    Args:
        template: for ``str.format``, with the fields ``step`` and ``epoch`` (whole numbers) and any logged metric
            (floats), such as ``"{epoch}-{step:06d}-{val/loss:.3f}"``.
    """

    def __init__(self, template: str) -> None:
        self.template = template

    def problems(self) -> list[str]:
        """What is wrong with the template, one text each."""
        given = f"filename={self.template!r}"
        try:
            if any(not field or field.isdigit() for field in self.fields):
                raise ValueError("a field has no name")
            name = self.template.format_map(_Example())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return [f'{given} ({error}; allowed: a template such as "step={{step}}" or "{{epoch}}-{{val_loss:.3f}}")']
        if not name or name.startswith(".") or "/" in name or "\\" in name:
            return [f"{given} (allowed: the name of one folder, not beginning with a dot; say where by dirpath)"]
        return []

    @property
    def has_step(self) -> bool:
        """Whether saves at different steps have different names."""
        return "step" in self.fields

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""
        return [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]

    def make(self, step: int, epoch: int, metrics: Mapping[str, float]) -> str:
        """The name of one checkpoint; a metric that has not been logged yet reads ``nan``."""
        known: dict[str, Any] = {**metrics, "step": step, "epoch": epoch}
        return self.template.format_map({field: known.get(field, math.nan) for field in self.fields})


class _Example(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return 0 if name in ("step", "epoch") else 0.5
