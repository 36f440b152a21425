"""All rows of the zoo by theme, and the recorded outcome of each cell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# File -> the heading of its modules.
THEMES: dict[str, str] = {
    "models": "Ordinary models",
    "mlps": "Feed-forward layers",
    "attention": "Attention",
    "norms": "Norms, counters and statistics",
    "mixing": "Blocks that mix positions",
    "idioms": "What PyTorch offers",
    "escapes": "Values that leave blocks",
    "pipelines": "How blocks are used",
    "optimizers": "Optimizers",
    "states": "States, frozen parts and averages",
    "weights": "Weights and gradients in users' code",
    "handwritten": "Parameters, gradients and states by hand",
    "later": "What begins in a later step",
    "collectives": "Collectives and metrics",
    "streams": "Streams and batches",
    "documented": "What documentations show",
    "finetuned": "Fine-tuning",
    "families": "Families of transformers",
    "pictures": "Families of timm",
}
RECORD = Path(__file__).with_name("outcomes.json")

# Theme -> row -> layout -> outcome.
Outcomes = Mapping[str, Mapping[str, Mapping[str, str]]]


def recorded() -> Outcomes:
    """Return the recorded outcomes: ``equal``, ``refused: WORDS`` or ``wrong: WHAT``."""
    found: Outcomes = json.loads(RECORD.read_text())
    return found


def count(outcomes: Outcomes) -> dict[str, int]:
    """Return the number of modules, and of cells by outcome."""
    modules = [row for theme in outcomes.values() for row in theme.values()]
    cells = [outcome.partition(":")[0] for row in modules for outcome in row.values()]
    return {"modules": len(modules), **{kind: cells.count(kind) for kind in ("equal", "refused", "wrong")}}
