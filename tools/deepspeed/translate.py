"""Translate a file, with a recipe and what was typed, to native configuration and a report."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.tools.deepspeed.reading import Given
from trainwright.tools.deepspeed.recipe import Recipe
from trainwright.tools.deepspeed.report import Report
from trainwright.tools.deepspeed.themes.batch import translate_batch
from trainwright.tools.deepspeed.themes.layout import translate_layout
from trainwright.tools.deepspeed.themes.optimizer import translate_clipping, translate_optimizer
from trainwright.tools.deepspeed.themes.precision import translate_precision
from trainwright.tools.deepspeed.themes.rest import translate_communication, translate_logging
from trainwright.tools.deepspeed.themes.scheduler import translate_scheduler
from trainwright.tools.deepspeed.translation import Translation
from trainwright.tools.deepspeed.typed import Typed


def translate(given: Given, recipe: Recipe | None, overrides: Sequence[str] = ()) -> tuple[Report, list[str]]:
    """Translate a file.

    Args:
        given: as :func:`~trainwright.tools.deepspeed.reading.read` returns it.
        recipe: what "auto" is taken from, and what holds where the file says nothing; None = no recipe is known.
        overrides: what was typed beside the file; it wins.

    Returns:
        The report, and what makes the file impossible, those of `given` first.
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
