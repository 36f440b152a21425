"""Write the native configuration of a file as a recipe, a yaml that Hydra composes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf

from trainwright.tools.deepspeed.key import UNSUPPORTED
from trainwright.tools.deepspeed.report import Report

_NOT_OF_A_RECIPE = ("recipe", "run_dir", "ckpt_path", "resume")


def recipe_text(report: Report, typed: Sequence[str], groups: Sequence[str], name: str) -> str:
    """Return the yaml.

    Args:
        report: of the file.
        typed: overrides that were typed beside it; they are in the recipe too.
        groups: names of all groups.
        name: of the recipe.
    """
    parser = OverridesParser.create()
    overrides: list[Override] = [parser.parse_override(text) for text in [*report.overrides, *typed]]
    base: str | None = None
    choices: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    left_over: list[str] = []
    for override in overrides:
        key: str = override.get_key_element().lstrip("+~").split("@")[0]
        if override.type == OverrideType.DEL:
            left_over.append(str(override.input_line))
        elif key == "recipe":
            base = str(override.value())
        elif key in groups and not isinstance(override.value(), dict):
            choices[key] = override.value()
        elif key not in _NOT_OF_A_RECIPE:
            _put(tree, key.split("."), override.value())
    if base is not None:
        tree = {"name": name, **tree}
    return "\n".join(
        [
            "# @package _global_",
            f"# What {Path(report.file).name} says{f', for recipe={base}' if base is not None else ''}.",
            *_header(report, left_over, base),
            "defaults:",
            *([f"  - {base}"] if base is not None else []),
            *(f'  - override /{group}: "{choice}"' for group, choice in choices.items()),
            "  - _self_",
            "",
            OmegaConf.to_yaml(OmegaConf.create(tree)).rstrip(),
            "",
        ]
    )


def _header(report: Report, left_over: Sequence[str], base: str | None) -> list[str]:
    lines = [f"# Of its keys: {', '.join(f'{count} {status}' for status, count in report.counts.items())}."]
    lines += [f"# unsupported: {line.key}" for line in report.with_status(UNSUPPORTED)]
    if base is None:
        lines.append("# For a recipe of yours: put this file beside it and its name first under the recipe's defaults.")
    if left_over:
        lines.append(f"# A yaml cannot take keys away; type beside it: {' '.join(left_over)}")
    return lines


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, last = path
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value
