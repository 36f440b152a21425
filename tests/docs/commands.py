"""Problems of a command of the documentation, found by the checks that the command runs before it starts anything.

`trainwright` composes and checks its whole configuration: names, types, the layout on that number of ranks, the module
where a layout cuts it. What is left out is what depends on the reader's machine, or takes long: GPUs and programs of a
cluster are taken to be there, and the planner does not choose.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from torch.distributed.run import get_args_parser

from tests.docs.blocks import ROOT
from trainwright.command import verbs as command
from trainwright.command.auto import is_auto
from trainwright.command.run import plan
from trainwright.command.schema.compose import compose_checked
from trainwright.command.sweep import expand
from trainwright.command.verify_options import take_options
from trainwright.core.device_profiles import profile_problems
from trainwright.core.problems import ConfigError
from trainwright.core.processes import machine
from trainwright.core.run.launcher import Launcher
from trainwright.launch.checks.validate import problems_before_layout
from trainwright.launch.recovery.check_resume import decide_resume
from trainwright.strategies.compose.world import Surroundings
from trainwright.tools import schema as schema_command
from trainwright.tools.checkpoints import command as checkpoint_command
from trainwright.tools.deepspeed import command as import_command
from trainwright.tools.doctor.command import VERBS as OF_THE_MACHINE
from trainwright.tools.doctor.command import parse as parse_doctor
from trainwright.tools.generate import command as generate_command
from trainwright.tools.report.command import parse as parse_report
from trainwright.tools.verify.verify import problems_of as problems_of_verify

# Programs of others that the documentation calls; nothing is said of their options.
OTHERS = frozenset(
    ("cat", "cp", "docker", "git", "head", "kill", "kubectl", "less", "ln", "ls", "mkdir", "mkdocs", "nvidia-smi",
     "pytest", "ray", "ruff", "rsync", "sbatch", "scancel", "scontrol", "sinfo", "sleep", "squeue", "ssh", "tail",
     "tensorboard", "uv")
)  # fmt: skip
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_TARGETS = frozenset(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def problems_of(words: Sequence[str], sbatch: str = "") -> list[str]:
    """Return the problems of one command, in the folder where it would be typed.

    Args:
        words: program and arguments.
        sbatch: options of the batch script that it stands in.
    """
    program, rest = Path(words[0]).name, list(words[1:])
    known: dict[str, Callable[[], list[str]]] = {
        "trainwright": lambda: trainwright(rest),
        "torchrun": lambda: _torchrun(rest),
        "srun": lambda: _srun(rest, sbatch),
        "python": lambda: _python(rest, None),
        "python3": lambda: _python(rest, None),
        "make": lambda: [f"make has no target {word}" for word in rest if "=" not in word and word not in _TARGETS],
        "pip": lambda: _pip(rest),
    }
    if program in OTHERS:
        return []
    if program not in known:
        return [f"{program}: no test knows this command; mark the block <!-- not run: why -->, or teach commands.py"]
    gpus = 8 if "accelerator=gpu" in words else 0
    try:
        with patch.object(machine, "num_gpus", return_value=gpus):
            return known[program]()
    except ConfigError as error:
        return list(error.problems)


def trainwright(words: Sequence[str], launcher: Launcher | None = None) -> list[str]:
    """Return the problems of the words after `trainwright`.

    Args:
        words: verb, overrides and options.
        launcher: that has started it as a rank; None = a person.

    Raises:
        ConfigError: with what is wrong.
    """
    first = next((word for word in words if word not in ("-h", "--help")), None)
    if "-h" in words or "--help" in words:
        return [] if first is None or first in command.ALL_VERBS else [f"{first}: there is no such verb"]
    if first == "checkpoint":
        verbs = {name: (lambda _: 0, options) for name, (_, options) in checkpoint_command._VERBS.items()}
        with patch.object(checkpoint_command, "_VERBS", verbs):
            checkpoint_command._run([word for word in words if word != "checkpoint"])
        return []
    if first in ("report", "watch"):
        parse_report([*words])
        return []
    if first == "schema":
        with redirect_stdout(StringIO()):
            schema_command._print([word for word in words if word != first])
        return []
    if first in OF_THE_MACHINE:
        parse_doctor(str(first), [word for word in words if word != first], launcher)
        return []
    if first == generate_command.VERB:
        typed = generate_command.parse([word for word in words if word != first]).typed
        return compose_checked(["recipe=gpt", *typed]).problems
    if first == import_command.VERB:
        return _import_deepspeed([word for word in words if word != first])
    return _composed(words, launcher)


def _composed(words: Sequence[str], launcher: Launcher | None) -> list[str]:
    arguments = command._parse(words)
    if arguments.help or arguments.version or arguments.verb is None:
        return []
    overrides, config_dir, problems = arguments.overrides, arguments.config_dir, []
    verb = arguments.verb if arguments.verb in command.VERBS else "fit"
    if arguments.multirun:
        jobs = expand(overrides, config_dir)
        return [problem for job in jobs for problem in configured(job.overrides, config_dir, verb, launcher)]
    options = None
    if arguments.verb == command.VERIFY:
        options, overrides, problems = take_options(overrides)
    if arguments.verb == command.PLAN:
        composition = compose_checked(overrides, config_dir)
        return composition.problems + (profile_problems(composition.cfg) if composition.cfg is not None else [])
    problems += configured(overrides, config_dir, verb, launcher)
    if options is not None and not problems:
        cfg = compose_checked(overrides, config_dir).cfg
        assert cfg is not None
        problems += problems_of_verify(cfg, options)
    return problems


def configured(
    overrides: Sequence[str], config_dir: str | None, verb: str = "fit", launcher: Launcher | None = None
) -> list[str]:
    """Return the problems of a configuration, as the command finds them.

    Args:
        overrides: as typed.
        config_dir: of the user; None = none.
        verb: fit, validate, test or predict.
        launcher: that has started the command as a rank; None = a person.
    """
    composition = compose_checked(overrides, config_dir)
    if composition.problems or composition.cfg is None:
        return composition.problems
    cfg = composition.cfg
    if is_auto(cfg.strategy) or cfg.micro_batch_size == "auto":
        problems = decide_resume(cfg, verb)
        cfg.run_dir = cfg.run_dir or "runs/planned"
        surroundings = Surroundings(verb) if launcher is None else Surroundings(verb, launcher.world_size)
        return problems + problems_before_layout(cfg, surroundings)
    return plan(cfg, verb, launcher)[1]


def _import_deepspeed(words: Sequence[str]) -> list[str]:
    arguments = import_command._parse(words)
    expansion = import_command._translated(arguments.file, arguments.overrides, arguments.config_dir)
    return list(expansion.problems)


def _torchrun(words: Sequence[str]) -> list[str]:
    try:
        arguments = get_args_parser().parse_args(list(words))
    except SystemExit:
        return [f"torchrun {' '.join(words)}: torchrun does not take these options"]
    nodes, ranks = str(arguments.nnodes).rpartition(":")[2], str(arguments.nproc_per_node)
    if not nodes.isdecimal() or not ranks.isdecimal():
        return [f"torchrun: --nnodes={nodes} --nproc-per-node={ranks}: the ranks are not known here"]
    launcher = Launcher("torchrun", 0, int(nodes) * int(ranks), int(ranks))
    if arguments.module:
        return _python(["-m", arguments.training_script, *arguments.training_script_args], launcher)
    return _script(arguments.training_script)


def _srun(words: Sequence[str], sbatch: str) -> list[str]:
    """Take the number of ranks from srun's options, or from those of the batch script."""
    number = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    said = f"{sbatch} {' '.join(words[:number])} "
    rest = list(words[number:])
    own = re.findall(r"(?:--nodes=|-N )(\d+)", said) or re.findall(r"nodes=(\d+)", " ".join(rest)) or ["1"]
    of_each = re.findall(r"--ntasks-per-node=(\d+)", said)
    if not of_each:
        return ["srun: how many ranks? Write --ntasks-per-node=N"]
    ranks = int(of_each[-1])
    launcher = Launcher("SLURM", 0, int(own[-1]) * ranks, ranks)
    with patch.dict(os.environ, {"SLURM_JOB_ID": "4711"}):
        if rest[:1] == ["trainwright"]:
            return trainwright(rest[1:], launcher)
        if rest[:1] == ["python"]:
            return _python(rest[1:], launcher)
    return [f"srun {' '.join(rest)}: what does it start?"]


def _python(words: Sequence[str], launcher: Launcher | None) -> list[str]:
    if words[:2] == ["-m", "trainwright"]:
        return trainwright(words[2:], launcher)
    if words[:2] == ["-m", "torch.distributed.run"]:
        return _torchrun(words[2:])
    if words[:1] == ["-m"] and len(words) > 1:
        found = importlib.util.find_spec(words[1]) is not None
        return [] if found else [f"python -m {words[1]}: there is no such module"]
    if words[:1] == ["-c"] and len(words) > 1:
        ast.parse(words[1])
        return []
    return _script(words[0]) if words and not words[0].startswith("-") else []


def _script(path: str) -> list[str]:
    if Path(path).is_file():
        return []
    return [f"{path}: the page has no such script; mark the block that shows it <!-- file: {path} -->"]


def _pip(words: Sequence[str]) -> list[str]:
    """The extras that are asked for, of this project."""
    asked = [name for word in words for extras in re.findall(r"^(?:trainwright|\.)\[([\w,-]+)\]", word)
             for name in extras.split(",")]  # fmt: skip
    extras = _PROJECT["optional-dependencies"]
    return [f"pip: there is no extra {name}; extras: {', '.join(extras)}" for name in asked if name not in extras]
