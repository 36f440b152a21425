"""Recipes of runs with faults, in a configuration directory of their own."""

from __future__ import annotations

from pathlib import Path

TINY = """# @package _global_
name: tiny
accelerator: cpu
micro_batch_size: 4
max_steps: 24
seed: 3
module: {_target_: tests.faults.tiny.Tiny, dropout: 0.1, seconds: 0.0, fail_at: -1, broken: ""}
callbacks:
  loss: {_target_: trainwright.callbacks.progress.global_loss.GlobalLoss, every_n_steps: 1}
data: {_target_: tests.faults.tiny.TinyData, batch_size: "${micro_batch_size}"}
"""


def write_recipe(folder: Path, name: str, text: str) -> Path:
    """Write a recipe into a folder; returns the configuration directory."""
    recipes = folder / "conf" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "conf"


def restart_log(run_dir: Path) -> str:
    """Return the text of a run's log of restarts."""
    path = run_dir / "logs" / "restarts.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""
