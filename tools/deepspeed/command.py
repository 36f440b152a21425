"""The verb `import-deepspeed`: translate a DeepSpeed JSON to native configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from trainwright.command.arguments import Parser
from trainwright.command.schema.compose import compose_checked, config_loader, group_names
from trainwright.command.schema.expansion import Expansion
from trainwright.command.schema.quoting import quote_values
from trainwright.core.problems import ConfigError
from trainwright.tools.deepspeed.expand import translate_file
from trainwright.tools.deepspeed.report import Report
from trainwright.tools.deepspeed.table import UNSUPPORTED
from trainwright.tools.verb import OK, run_verb

VERB = "import-deepspeed"
_OPTIONS = ("--out", "--overwrite", "--json", "--config-dir", "--help")

HELP = """trainwright import-deepspeed: translate a DeepSpeed JSON to native configuration. No process is started.

usage: trainwright import-deepspeed ds_config.json [key=value ...] [options]

Prints the translation of each key: mapped (to what), approximated (how it differs), unsupported (why, and what to do
instead). "auto" is taken from the recipe; key=value overrides the file.

options:
  --out FILE.yaml   also write a recipe: in your own folder recipe/, `fit --config-dir` finds it by name
  --overwrite       replace FILE.yaml
  --json            print the report as one JSON document, and nothing else, on standard output
  --config-dir DIR  also search DIR for your own recipes and groups, <group>/<choice>.yaml

examples:
  trainwright import-deepspeed ds_config.json
  trainwright import-deepspeed ds_config.json recipe=gpt devices=8
  trainwright import-deepspeed ds_config.json recipe=gpt devices=8 --out my_conf/recipe/mine.yaml
  trainwright fit --config-dir my_conf recipe=mine
  trainwright fit recipe=gpt devices=8 strategy=deepspeed_json strategy.path=ds_config.json
"""


def run_import_command(words: Sequence[str]) -> int:
    """Run `import-deepspeed` and print errors to stderr.

    Args:
        words: the command line after `trainwright`, verb included.

    Returns:
        The exit code: 0 success, 2 the command line or the file was refused.
    """
    return run_verb(VERB, words, HELP, lambda rest: _import(_parse(rest)))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(VERB)
    parser.add_argument("--out")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    arguments, plain, problems = parser.parse_among_words(words, _OPTIONS)
    files = [word for word in plain if "=" not in word]
    if len(files) != 1:
        given = "no file was given" if not files else f"{' '.join(files)}: one file at a time"
        problems.append(f"{given}; type trainwright {VERB} ds_config.json [key=value ...]")
    if problems:
        raise ConfigError(problems)
    arguments.file, arguments.overrides = files[0], [word for word in plain if "=" in word]
    return arguments


def _import(arguments: argparse.Namespace) -> int:
    expansion = _translated(arguments.file, quote_values(arguments.overrides), arguments.config_dir)
    if expansion.problems or expansion.report is None:
        raise ConfigError(expansion.problems)
    report = expansion.report
    if arguments.out is not None:
        _write(report, arguments)
    if arguments.json:
        print(json.dumps(report.to_dict(), allow_nan=False), flush=True)
        return OK
    print(report.to_text())
    if arguments.out is None:
        print("native configuration:\n  " + "\n  ".join(report.overrides or ("nothing differs from the recipe",)))
    else:
        print(f"written: {arguments.out}")
    return OK


def _translated(file: str, typed: Sequence[str], config_dir: str | None) -> Expansion[Report]:
    problems: list[str] = []

    def composed(overrides: Sequence[str]) -> DictConfig | None:
        found = compose_checked(overrides, config_dir)
        problems.extend(found.problems)
        return found.cfg

    expansion = translate_file(file, typed, composed)
    expansion.problems += problems
    if not expansion.problems and any(text.lstrip("+").startswith("recipe=") for text in typed):
        expansion.problems += compose_checked(expansion.overrides, config_dir).problems
    return expansion


def _write(report: Report, arguments: argparse.Namespace) -> None:
    out = Path(arguments.out).expanduser()
    if out.suffix != ".yaml":
        raise ConfigError([f"--out {out}: a configuration is a .yaml; type --out {out.with_suffix('.yaml')}"])
    if out.exists() and not arguments.overwrite:
        raise ConfigError([f"--out {out}: the file exists; type another name, or --overwrite"])
    groups = group_names(config_loader(arguments.config_dir))
    text = recipe_text(report, quote_values(arguments.overrides), groups, out.stem)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--out {out}: {error.strerror}; type another path"]) from error


_EXCLUDED_FROM_RECIPE = ("recipe", "run_dir", "ckpt_path", "resume")


def recipe_text(report: Report, typed: Sequence[str], groups: Sequence[str], name: str) -> str:
    """Return the yaml of a recipe.

    Args:
        report: of the file.
        typed: other overrides, which the recipe includes.
        groups: names of all groups.
        name: of the recipe.
    """
    parser = OverridesParser.create()
    overrides: list[Override] = [parser.parse_override(text) for text in [*report.overrides, *typed]]
    base: str | None = None
    choices: dict[str, Any] = {}
    tree = OmegaConf.create()
    left_over: list[str] = []
    for override in overrides:
        key: str = override.get_key_element().lstrip("+~").split("@")[0]
        if override.type == OverrideType.DEL:
            left_over.append(str(override.input_line))
        elif key == "recipe":
            base = str(override.value())
        elif key in groups and not isinstance(override.value(), dict):
            choices[key] = override.value()
        elif key not in _EXCLUDED_FROM_RECIPE:
            OmegaConf.update(tree, key, override.value())
    named = OmegaConf.merge({} if base is None else {"name": name}, tree)
    return "\n".join(
        [
            "# @package _global_",
            f"# Translated from {Path(report.file).name}{f' for recipe={base}' if base is not None else ''}.",
            *_header(report, left_over, base),
            "defaults:",
            *([f"  - {base}"] if base is not None else []),
            *(f'  - override /{group}: "{choice}"' for group, choice in choices.items()),
            "  - _self_",
            "",
            OmegaConf.to_yaml(named).rstrip(),
            "",
        ]
    )


def _header(report: Report, left_over: Sequence[str], base: str | None) -> list[str]:
    lines = [f"# Keys: {', '.join(f'{count} {status}' for status, count in report.counts.items())}."]
    lines += [f"# unsupported: {line.key}" for line in report.with_status(UNSUPPORTED)]
    if base is None:
        lines.append("# To use it in a recipe, put this file beside it and its name first under its defaults.")
    if left_over:
        lines.append(f"# A yaml cannot remove keys; type additionally: {' '.join(left_over)}")
    return lines
