"""Recipes of the runs that are disturbed, in a configuration directory of their own."""

from __future__ import annotations

from pathlib import Path


def write_recipe(folder: Path, name: str, text: str) -> Path:
    """Write a recipe into a folder; returns the configuration directory."""
    recipes = folder / "conf" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "conf"
