"""The verb `generate`: text from the model of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.read.candidates import LAST
from trainwright.command.arguments import Parser
from trainwright.command.run import run
from trainwright.command.schema.compose import compose_checked
from trainwright.command.schema.compose_faults import key_of
from trainwright.core.config.references import settled
from trainwright.core.problems import ConfigError, did_you_mean
from trainwright.core.run.launcher import detect_launcher
from trainwright.core.run.run_directory import holds_run, read_config
from trainwright.core.text.printable import printable
from trainwright.launch.ranks.output import ranks_to_stderr
from trainwright.launch.recovery.check_resume import decide_resume
from trainwright.launch.schema import RunConfig
from trainwright.strategies.contract.registry import all_options, target_of
from trainwright.tools.verb import OK, run_verb

VERB = "generate"
_RECIPE = "run_to_generate"
_PACKAGE = "trainwright.recipes.generation"
# Keys taken from the run's configuration unless overridden.
_KEPT = ("name", "module", "data", "strategy", "precision", "devices", "nodes", "accelerator", "seed")
_SAMPLING = ("max_new_tokens", "temperature", "top_p")
_OPTIONS = ("prompt", "prompts_file", "batch_size", *_SAMPLING)

HELP = """trainwright generate: continue prompts with the model of a run, on any layout.

usage: trainwright generate RUN prompt=TEXT [prompt=TEXT ...] [key=value ...] [--json]

  RUN               a run directory; its newest good checkpoint is used, or ckpt_path=PATH
  prompt=TEXT       a text to continue; may be repeated, or a list: 'prompt=["a","b"]'
  prompts_file=FILE one prompt per line
  max_new_tokens=N  tokens to add to each prompt (100); fewer if the model ends the text
  temperature=T     divisor of the logits (0); 0 always takes the most likely token
  top_p=P           sample from the most likely tokens with this total probability (1: all)
  seed=S            of sampling (default: of the run); independent of layout and batch size
  batch_size=B      prompts per rank and batch (8)
  --json            print one JSON object, and nothing else, on standard output

Other key=value words override the run's configuration: strategy=tensor devices=2, precision=...

examples:
  trainwright generate runs/gpt/2026-01-31_14-05-09 'prompt=def '
  trainwright generate runs/mine prompts_file=prompts.txt temperature=0.8 top_p=0.9 seed=1 strategy=tensor devices=2
"""


def run_generate_command(words: Sequence[str]) -> int:
    """Run `generate` and print errors to stderr.

    Args:
        words: the command line after `trainwright`, `generate` included.

    Returns:
        The exit code: 0 success, 1 a rank failed, 2 the command line was refused.
    """
    return run_verb(VERB, words, HELP, lambda rest: _generate(parse(rest)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Args:
        words: arguments after `trainwright generate`.

    Returns:
        `run_dir`, `json`, `own`: options of this verb, `typed`: overrides of the run's configuration.

    Raises:
        ConfigError: if it is invalid.
    """
    parser = Parser(VERB)
    parser.add_argument("--json", action="store_true")
    arguments, plain, problems = parser.parse_among_words(words, ("--json", "--help"))
    folders = [word for word in plain if "=" not in word and not word.startswith("~")]
    if len(folders) != 1:
        given = "no run directory was given" if not folders else f"{' '.join(folders)}: one run at a time"
        problems.append(f"{given}; type trainwright {VERB} RUN prompt=TEXT (prompt='...' if it has spaces)")
    if problems:
        raise ConfigError(problems)
    arguments.run_dir = Path(folders[0]).expanduser()
    arguments.own = [word for word in plain if key_of(word) in _OPTIONS]
    arguments.typed = [word for word in plain if word not in (*folders, *arguments.own)]
    if misspelled := list(_misspelled(arguments.typed)):
        raise ConfigError(misspelled)
    return arguments


def _misspelled(typed: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each word that is closer to an option of this verb than to a key of a run."""
    keys = [item.name for item in fields(RunConfig)]
    for word in typed:
        key = key_of(word)
        if set(get_close_matches(key, [*keys, *_OPTIONS], n=1)) & set(_OPTIONS):
            yield f"{word}: there is no option {key!r}; {did_you_mean(key, _OPTIONS, f'options of {VERB}')}"


def _generate(arguments: argparse.Namespace) -> int:
    if not holds_run(arguments.run_dir):
        raise ConfigError([f"{arguments.run_dir}: not a run directory: it has no config.yaml; type runs/<name>/<time>"])
    prompts, own = _prompts(arguments.own), {key_of(word): _value(word) for word in arguments.own}
    cfg = _configured(arguments.run_dir, arguments.typed, prompts, own)
    with ranks_to_stderr() if arguments.json else contextlib.nullcontext():
        result = run(cfg, "predict")
    launcher = detect_launcher()
    if launcher is None or launcher.rank == 0:
        _print(_report(prompts, result.run_dir), as_json=arguments.json)
    return OK


def _prompts(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key == "prompts_file":
            try:
                found += [line for line in Path(text).expanduser().read_text(encoding="utf-8").splitlines() if line]
            except (OSError, UnicodeError) as error:
                raise ConfigError([f"{word}: {error}; type the path of a UTF-8 text file"]) from error
        elif key == "prompt":
            given = _value(word) if text.startswith("[") else text
            found += given if isinstance(given, list) and all(isinstance(each, str) for each in given) else [text]
    return found


def _value(word: str) -> Any:
    if key_of(word) == "prompts_file" or (key_of(word) == "prompt" and not word.startswith("prompt=[")):
        return word
    try:
        return OverridesParser.create().parse_override(word).value()
    except HydraException:
        return word.partition("=")[2]


def _configured(run_dir: Path, typed: Sequence[str], prompts: Sequence[str], own: dict[str, Any]) -> DictConfig:
    """Return the run's configuration with overrides, for `predict` on the prompts.

    Raises:
        ConfigError: if it is invalid, or the run has no checkpoint.
    """
    saved = read_config(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        _write_recipe(Path(folder), saved, {key_of(word) for word in typed})
        composition = compose_checked([f"recipe={_RECIPE}", *typed], folder)
    cfg, problems = composition.cfg, list(composition.problems)
    if cfg is not None and cfg.ckpt_path in (None, LAST):
        saved.run_dir, saved.ckpt_path, saved.resume, saved.init_from = str(run_dir), LAST, None, None
        saved.resume_folders = []
        problems += decide_resume(saved, "predict")
        cfg.ckpt_path = saved.ckpt_path
    if cfg is None or problems:
        raise ConfigError(problems)
    cfg.data = {
        "_target_": f"{_PACKAGE}.prompts.PromptData",
        "prompts": list(prompts),
        "data": OmegaConf.to_container(cfg.data),  # a node would refer to itself
        "batch_size": own.get("batch_size", 8),
        "sampling": {
            "_target_": f"{_PACKAGE}.sampling.Sampling",
            **{key: own[key] for key in _SAMPLING if key in own},
            "seed": cfg.seed,
        },
    }
    cfg.checks = [f"{_PACKAGE}.sampling:check"]
    cfg.callbacks = {VERB: {"_target_": f"{_PACKAGE}.prompts.ContinuePrompts"}}
    cfg.monitor = {}
    return cfg


def _write_recipe(folder: Path, saved: DictConfig, typed: set[str]) -> None:
    """Write the run's configuration as a recipe, without overridden keys."""
    body: Any = OmegaConf.to_container(settled(saved))
    body = {key: value for key, value in body.items() if key in _KEPT and key not in typed}
    if "strategy" in body:
        names = [name for name, options in all_options() if target_of(options) == body["strategy"].get("_target_")]
        body["defaults"] = [*({"override /strategy": name} for name in names[:1]), "_self_"]
    (folder / "recipe").mkdir()
    text = "# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(body))
    (folder / "recipe" / f"{_RECIPE}.yaml").write_text(text, encoding="utf-8")


def _report(prompts: Sequence[str], run_dir: Path) -> dict[str, Any]:
    from trainwright.checkpoint.foreign.unpickle import load_safely  # torch is already imported
    from trainwright.launch.worker import PREDICTIONS

    with (run_dir / PREDICTIONS).open("rb") as file:
        batches = load_safely(str(run_dir / PREDICTIONS), file)
    new, tokens = ([each for batch in batches for each in batch[key]] for key in ("new", "tokens"))
    began, ended = zip(*(batch["seconds"] for batch in batches), strict=True)
    seconds = max(ended) - min(began)
    texts = [
        {"prompt": prompt, "text": text, "new_tokens": count}
        for prompt, text, count in zip(prompts, new, tokens, strict=True)
    ]
    return {
        "texts": texts,
        "new_tokens": sum(tokens),
        "seconds": seconds,
        "tokens_per_second": sum(tokens) / seconds,
        "run_dir": str(run_dir),
    }


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, allow_nan=False, ensure_ascii=False), flush=True)
        return
    for each in report["texts"]:
        print(printable(f"{each['prompt']}{each['text']}") + "\n")
    print(
        f"{report['new_tokens']} new tokens in {report['seconds']:.2f} s: {report['tokens_per_second']:.1f} tokens per "
        f"second",
        flush=True,
    )
