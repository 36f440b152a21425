"""The verbs of the command `trainwright`."""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.command.arguments import Parser
from trainwright.command.auto import choice_lines
from trainwright.command.pages import links
from trainwright.command.run import PREPARED, RunResult, launch, plan, prepare
from trainwright.command.schema.compose import Composition, compose_checked
from trainwright.command.schema.expansion import report_import
from trainwright.command.schema.quoting import spaced
from trainwright.core.config.masking import masked
from trainwright.core.config.missing import resolved
from trainwright.core.config.references import settled
from trainwright.core.failures.failure import RankError
from trainwright.core.failures.uncaught import Uncaught
from trainwright.core.problems import ConfigError, did_you_mean
from trainwright.core.run.interrupt import InsistentSignals
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.core.run.run_directory import RunDirRollback, command_words
from trainwright.core.tools import tool
from trainwright.launch.engines.torchrun.agreement import agree
from trainwright.launch.ranks.forkserver import call_in_fork, has_forkserver, without_collector
from trainwright.strategies.compose.world import VERBS, Surroundings, closed_layout

OK, FAILED, REFUSED = 0, 1, 2
VERIFY, LAYOUT, PLAN = "verify", "layout", "plan"
# Verbs that must be the first word, with what follows them.
FIRST_WORD_VERBS = {
    "checkpoint": "<verb> PATH [options]",
    "import-deepspeed": "ds_config.json [options]",
    "new": "NAME",
    "generate": "RUN prompt=TEXT [key=value ...] [--json]",
    "report": "RUN_DIR [options]",
    "watch": "RUN_DIR [options]",
    "schema": "[--config-dir DIR]",
    "doctor": "[key=value ...] [--json]",
    "profile": "[key=value ...] [--out FILE]",
}
ALL_VERBS = (*VERBS, VERIFY, LAYOUT, PLAN, *FIRST_WORD_VERBS)
_OPTIONS = (
    "--help", "--version", "--multirun", "--print-config", "--config-dir", "--json", "--html", "--report"
)  # fmt: skip


def run_command(words: Sequence[str]) -> int:
    """Run the command and print its errors.

    Args:
        words: after `trainwright`.

    Returns:
        The exit code; that of the user's own `sys.exit` if it ended the run.

    Raises:
        Interrupted: if this process was interrupted.
    """
    try:
        return _run(_parse(words))
    except ConfigError as error:
        print(f"trainwright: {error}", *(f"see {link}" for link in links(error.problems)), sep="\n", file=sys.stderr)
        return REFUSED
    except RankError as error:
        print(f"trainwright: {error}", file=sys.stderr)
        return error.exit_code_of_user or FAILED


def _run(arguments: argparse.Namespace) -> int:
    if arguments.version:
        print(version("trainwright"))
        return OK
    if arguments.help or arguments.verb is None:
        return _show_help(arguments)
    if arguments.print_config:
        return _print_config(arguments)
    if arguments.verb == VERIFY:
        return int(tool(VERIFY)(arguments))
    if arguments.verb == LAYOUT:
        return _layout(arguments)
    if arguments.verb == PLAN:
        return _plan(arguments)
    launcher = detect_launcher()
    if arguments.multirun:
        return _sweep(arguments, launcher)
    return _run_once(arguments, launcher)


def _run_once(arguments: argparse.Namespace, launcher: Launcher | None) -> int:
    verb, overrides, config_dir = arguments.verb, arguments.overrides, arguments.config_dir
    if launcher is None:
        cfg = _composed_beside_imports(verb, overrides, config_dir)
    else:
        agreed = agree(launcher, lambda launcher: _composed(verb, overrides, config_dir, launcher))
        if agreed is None:
            return REFUSED  # rank 0 reports the reason
        cfg = agreed
    if _prints(launcher):
        _print_start(cfg, verb)
    try:
        result = launch(cfg, verb, launcher)
    except SystemExit as error:
        # The run was in this process. Name the caller of sys.exit, which no traceback shows.
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"trainwright: sys.exit({error.code!r}) was called by {where.filename}:{where.lineno}", file=sys.stderr)
        raise
    except ConfigError as error:
        if launcher is None:
            raise
        Uncaught(Path(cfg.run_dir)).report(error)
        return REFUSED
    except RankError:
        raise
    except Exception as error:
        Uncaught(Path(cfg.run_dir)).report(error)  # the run was in this process
        return FAILED
    if _prints(launcher) and verb != "fit" and result.has_ended:  # after fit, callbacks print it
        _print_run_dir(result, verb)
    return OK


def _layout(arguments: argparse.Namespace) -> int:
    """Print what each rank would hold; no process is started."""
    composition, problems = _compose_only(arguments, "it shows one layout at a time")
    cfg = resolved(_checked(composition, "fit", problems))
    layout = closed_layout(cfg, Surroundings())
    if layout is None:
        target = cfg.strategy.get("_target_")
        raise ConfigError([f"strategy: the layout of {target} is not known from its configuration; fit shows it"])

    from trainwright.planning.layout_report import report

    report_import(composition.import_report, sys.stderr)
    print(report(cfg, layout), end="", flush=True)
    return OK


def _plan(arguments: argparse.Namespace) -> int:
    """Rank all layouts by predicted step time; no process is started."""
    composition, problems = _compose_only(arguments, "it compares all layouts anyway; type one value per key")
    if problems or composition.problems or composition.cfg is None:
        raise ConfigError([*problems, *composition.problems])
    from trainwright.planning.report.command import run_plan

    return OK if run_plan(composition.cfg, as_json=arguments.json, html=arguments.html) else FAILED


def _compose_only(arguments: argparse.Namespace, why_one: str) -> tuple[Composition, list[str]]:
    """Compose for a verb that starts no ranks; return the composition and the problems of the command."""
    launcher, problems, verb = detect_launcher(), list[str](), arguments.verb
    if launcher is not None:
        problems.append(f"{launcher.name}: {verb} starts no ranks; type trainwright {verb} ... without the launcher")
    if arguments.multirun:
        problems.append(f"--multirun with {verb}: {why_one}")
    return compose_checked(arguments.overrides, arguments.config_dir), problems


def _checked(
    composition: Composition, verb: str, problems: Sequence[str] = (), launcher: Launcher | None = None
) -> DictConfig:
    """Return the configuration with everything decided; raise `problems` and all others together."""
    found, planned = [*problems, *composition.problems], None
    if composition.cfg is not None and composition.guessed:
        planned, more = plan(composition.cfg, verb, launcher)
        found += more
    if found or planned is None:
        raise ConfigError(found)
    return planned


def _composed(verb: str, overrides: Sequence[str], config_dir: str | None, launcher: Launcher | None) -> DictConfig:
    """Compose, check everything, create the run directory; raise all problems together."""
    composition = compose_checked(overrides, config_dir)
    if composition.problems:
        _checked(composition, verb, launcher=launcher)  # raises them, with those of the checks
    assert composition.cfg is not None
    prepared = prepare(composition.cfg, verb, launcher, words=command_words(verb, overrides, config_dir))
    report_import(composition.import_report, sys.stdout, Path(prepared.run_dir))
    return prepared


def _composed_beside_imports(verb: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Compose in another process while this one imports torch, if the rank will probably be in this one."""
    if has_forkserver() or any(word.startswith("launch=") for word in overrides):
        return _composed(verb, overrides, config_dir, None)
    cfg: DictConfig
    cfg, before = call_in_fork(_composed_apart, verb, overrides, config_dir, meanwhile=_import_torch)
    PREPARED[cfg.run_dir] = before
    return cfg


def _composed_apart(verb: str, overrides: Sequence[str], config_dir: str | None) -> tuple[DictConfig, RunDirRollback]:
    """Return what :func:`launch` needs in the process that launches."""
    cfg = _composed(verb, overrides, config_dir, None)
    return cfg, PREPARED.pop(cfg.run_dir)


def _import_torch() -> None:
    with InsistentSignals(), without_collector():
        import torch  # noqa: F401


def _sweep(arguments: argparse.Namespace, launcher: Launcher | None) -> int:
    if launcher is not None:
        raise ConfigError(
            [f"--multirun under {launcher.name}: each job needs its own ranks; leave {launcher.name} out"]
        )
    from trainwright.command.sweep import run_sweep

    return run_sweep(arguments.verb, arguments.overrides, arguments.config_dir)


def _print_config(arguments: argparse.Namespace) -> int:
    verb, overrides = arguments.verb, arguments.overrides
    problems: list[str] = []
    if verb == VERIFY:
        from trainwright.command.verify_options import take_options

        verb, (_, overrides, problems) = "fit", take_options(overrides)
    elif verb in (LAYOUT, PLAN):
        verb = "fit"
    composition = compose_checked(overrides, arguments.config_dir)
    cfg = _checked(composition, verb, problems)
    report_import(composition.import_report, sys.stderr)
    print(OmegaConf.to_yaml(masked(OmegaConf.to_container(settled(cfg)))), end="")
    return OK


def _show_help(arguments: argparse.Namespace) -> int:
    from trainwright.command.help import help_of_verb, overview

    asked = arguments.help
    print(overview() if arguments.verb is None else help_of_verb(arguments.verb, arguments.config_dir), end="")
    return OK if asked else REFUSED


def make_parser() -> Parser:
    """Return the parser of the options of all verbs that run a configuration."""
    parser = Parser()
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--print-config", "--cfg", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html")
    parser.add_argument("--report")
    parser.add_argument("--prove", action="store_true", help=argparse.SUPPRESS)  # removed; answered with what to type
    return parser


def _without_dashed_keys(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without keys that were typed like options, and these as overrides: `--lr 0.1` as `--lr=0.1`."""
    rest, dashed = list[str](), dict[str, str]()
    for before, word in pairwise(["", *words]):
        if re.match(r"--\w", word) and not get_close_matches(
            word.split("=")[0], (*_OPTIONS, "--cfg", "--prove"), 1, 0.75
        ):
            dashed[word] = "" if "=" in word else "=true"
        elif dashed.get(before) == "=true" and not re.match("-|.*=", word) and word not in ALL_VERBS:
            dashed[before] = f"={word}"
        else:
            rest.append(word)
    return rest, [key + value for key, value in dashed.items()]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    words, dashed = _without_dashed_keys(words)
    arguments, plain, problems = make_parser().parse_among_words(words, _OPTIONS)
    arguments.verb = plain.pop(0) if plain and "=" not in plain[0] else None
    plain += dashed
    arguments.overrides = plain
    if arguments.verb is not None and arguments.verb not in ALL_VERBS:
        problems.append(f"{arguments.verb}: there is no such verb; {did_you_mean(arguments.verb, ALL_VERBS, 'verbs')}")
    elif arguments.verb in FIRST_WORD_VERBS:
        problems.append(
            f"{arguments.verb} comes first: type trainwright {arguments.verb} {FIRST_WORD_VERBS[arguments.verb]}"
        )
    elif arguments.verb is None and plain:
        problems.append(f"no verb was given before {plain[0]}; type trainwright fit {' '.join(plain)}")
    problems += [f"{typed}: a key with its values is one word; type {meant}" for typed, meant in spaced(plain)]
    for option, verbs in (("json", (VERIFY, PLAN)), ("report", (VERIFY,)), ("html", (PLAN,))):
        is_given = getattr(arguments, option) not in (None, False)
        if is_given and arguments.verb not in verbs and not arguments.help:
            problems.append(f"--{option}: only {' and '.join(verbs)} can take it; leave it out")
    if arguments.prove:
        problems.append("--prove: plan no longer builds ranks; a fit with strategy=auto compares its steps with it")
    if problems:
        raise ConfigError(problems)
    return arguments


def _print_start(cfg: DictConfig, verb: str) -> None:
    for line in choice_lines(Path(cfg.run_dir)):
        print(line, flush=True)
    if verb != "fit":
        weights = cfg.ckpt_path or cfg.init_from
        print(f"weights: {_relative(weights) if weights else 'the initial ones of the module'}", flush=True)
    elif cfg.ckpt_path is not None:
        print(f"resuming from {_relative(cfg.ckpt_path)}", flush=True)
    elif cfg.resume is not None and cfg.resume_folders:
        print(f"resume={cfg.resume}: no good checkpoint among those in {', '.join(cfg.resume_folders)}", flush=True)
    elif cfg.resume is not None:
        print(f"resume={cfg.resume}: there is no checkpoint yet; starting from scratch", flush=True)


def _prints(launcher: Launcher | None) -> bool:
    return launcher is None or launcher.rank == 0


def _print_run_dir(result: RunResult, verb: str) -> None:
    run_dir = _relative(result.run_dir)
    lines = [f"Run directory: {run_dir}"]
    if verb == "predict":
        lines.append(f"Predictions:   torch.load('{run_dir}/predictions.pt')")
    elif any(result.run_dir.glob("events.out.tfevents.*")):
        lines.append(f"TensorBoard:   tensorboard --logdir {run_dir}")
    print("\n".join(lines), flush=True)


def _relative(path: Path | str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    if "://" in str(path):
        return str(path)
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
