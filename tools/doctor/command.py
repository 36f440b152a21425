"""The verbs `doctor` and `profile`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.command.arguments import Parser
from trainwright.core.device_profiles import MEASURED
from trainwright.core.problems import ConfigError, did_you_mean
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.launch.ranks.output import ranks_to_stderr
from trainwright.tools.doctor.examination import DoctorRequest, Examination, examine_locally, examine_under_launcher
from trainwright.tools.doctor.finding import ERROR
from trainwright.tools.verb import FAILED, OK, run_verb

_ACCELERATORS = ("auto", "cpu", "gpu")


def _number(key: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{key}={text}: not a whole number of at least {least}; type for example {key}={least + 1}")
    return int(text)


def _accelerator(key: str, text: str) -> str:
    if text not in _ACCELERATORS:
        raise ValueError(f"{key}={text}: {did_you_mean(text, _ACCELERATORS, 'accelerators')}")
    return text


def _devices(key: str, text: str) -> int | None:
    return None if text == "auto" else _number(key, text)


def _text(key: str, text: str) -> str:
    if not text:
        raise ValueError(f"{key}= is empty; give a folder, or leave it out")
    return text


_KEYS: dict[str, Callable[[str, str], Any]] = {
    "devices": _devices,
    "accelerator": _accelerator,
    "launch.threads": _number,
    "workers": partial(_number, least=0),
    "run_dir": _text,
}
_PROFILE_KEYS = ("devices", "accelerator", "launch.threads")


def parse(verb: str, words: Sequence[str], launcher: Launcher | None) -> argparse.Namespace:
    """Parse the command line of a verb.

    Args:
        verb: doctor or profile.
        words: the arguments after the verb.
        launcher: that started this process, if any; it decides the number of ranks.

    Returns:
        The options by name, and the keys as `request`.

    Raises:
        ConfigError: naming all problems.
    """
    options = {"doctor": ("--json", "--help"), "profile": ("--out", "--overwrite", "--help")}[verb]
    parser = Parser(verb)
    for option in options[:-1]:
        parser.add_argument(option, action="store" if option == "--out" else "store_true")
    arguments, plain, problems = parser.parse_among_words(words, options)
    keys = tuple(_KEYS) if verb == "doctor" else _PROFILE_KEYS
    values: dict[str, Any] = {}
    for key, is_key, text in (word.partition("=") for word in plain):
        if not is_key or key not in keys:
            problems.append(f"{key}: there is no such key of {verb}; {did_you_mean(key, keys, 'keys')}")
            continue
        try:
            values[key.removeprefix("launch.")] = _KEYS[key](key, text)
        except ValueError as failure:
            problems.append(str(failure))
    if launcher is not None and values.get("devices") not in (None, launcher.local_world_size):
        problems.append(
            f"devices={values['devices']}: {launcher.name} has started {launcher.local_world_size} ranks on this "
            "machine; leave devices out"
        )
    if problems:
        raise ConfigError(problems)
    arguments.request = DoctorRequest(**values, figures=verb == "profile")
    return arguments


DOCTOR, PROFILE = "doctor", "profile"
VERBS = (DOCTOR, PROFILE)
_DEFAULT_OUT = str(MEASURED)

HELP = {
    DOCTOR: """trainwright doctor: check this machine, or all machines of a job, before a run.

usage: trainwright doctor [key=value ...] [--json]

It checks cores and memory, GPUs, installed versions, network interfaces, the speed between ranks, clocks, disks and
shared memory, and shows the environment (torch.utils.collect_env). It needs no root and writes no files.
Exit code 0: no errors (there may be warnings), 1: errors.

keys:
  devices=N           ranks to start on this machine (default: one for each GPU, or 2 on the CPU)
  accelerator=NAME    auto, cpu or gpu
  launch.threads=N    CPU threads of a rank (default: OMP_NUM_THREADS, else the cores divided by the ranks)
  workers=N           worker processes of the data loaders of one rank (default: 0)
  run_dir=FOLDER      where runs will write (default: runs)

options:
  --json              print the findings as one JSON document, and nothing else, on standard output
  --help

examples:
  trainwright doctor
  trainwright doctor devices=4 workers=8 run_dir=/data/runs
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=host:29400 -m trainwright doctor
""",
    PROFILE: f"""trainwright profile: measure devices and the links between them, for the plans of device=auto.

device=auto reads {_DEFAULT_OUT} in the working directory; select another file with device=<name>.

usage: trainwright profile [key=value ...] [--out FILE] [--overwrite]

keys:
  devices=N           ranks to start on this machine (default: one for each GPU, or 2 on the CPU)
  accelerator=NAME    auto, cpu or gpu
  launch.threads=N    CPU threads of a rank (default: OMP_NUM_THREADS, else the cores divided by the ranks)

options:
  --out FILE          a yaml in a folder named device (default: {_DEFAULT_OUT})
  --overwrite         replace FILE
  --help

examples:
  trainwright profile devices=4 --out my_conf/device/lab.yaml
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=host:29400 -m trainwright profile
""",
}


def run_doctor_command(words: Sequence[str]) -> int:
    """Run `doctor` or `profile` and print configuration errors to stderr.

    Args:
        words: the command line after `trainwright`, verb included.

    Returns:
        The exit code: 0 no errors, 1 errors found, 2 the command line was refused.
    """
    verb = next(word for word in words if word in VERBS)
    launcher, run = detect_launcher(), _doctor if verb == DOCTOR else _profile
    is_other = launcher is not None and launcher.rank > 0

    def parsed_and_run(rest: Sequence[str]) -> int:
        return run(parse(verb, rest, launcher), launcher)

    return run_verb(verb, words, HELP[verb], parsed_and_run, bare=True, silent=is_other)


def _doctor(typed: argparse.Namespace, launcher: Launcher | None) -> int:
    from trainwright.tools.doctor.report import judge, to_json, to_text

    examination = _examine(typed, launcher)
    if examination is None:
        return OK  # rank 0 reports
    findings = judge(examination)
    print(to_json(findings, examination) if typed.json else to_text(findings, examination).rstrip(), flush=True)
    return FAILED if any(finding.state == ERROR for finding in findings) else OK


def _examine(typed: argparse.Namespace, launcher: Launcher | None) -> Examination | None:
    if launcher is not None:
        return examine_under_launcher(launcher, typed.request)
    with ranks_to_stderr():
        return examine_locally(typed.request)


def _profile(typed: argparse.Namespace, launcher: Launcher | None) -> int:
    from trainwright.tools.doctor.profile import profile_of, to_yaml

    path = Path(typed.out or _DEFAULT_OUT)
    if launcher is None or launcher.rank == 0:
        _check_out(path, typed.overwrite)
    examination = _examine(typed, launcher)
    if examination is None:
        return OK
    failures = [f"rank {result.rank}: {result.failure}" for result in examination.results if result.failure is not None]
    if failures or not examination.results:
        errors = [
            each.found for report in examination.hosts.values() for each in report.findings if each.state == ERROR
        ]
        why = "; ".join(failures or errors) or "no rank could be started"
        print(f"trainwright: nothing was measured: {why}; run trainwright doctor for details", file=sys.stderr)
        return FAILED
    values, notes = profile_of(examination, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(values, notes), encoding="utf-8")
    print(path.read_text(encoding="utf-8"), end="")
    usage = "device=auto reads it in this folder; elsewhere type" if path == MEASURED else "use it with"
    print(f"\nwritten to {path}; {usage} --config-dir {path.parent.parent} device={path.stem}", flush=True)
    return OK


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix != ".yaml" or path.absolute().parent.name != "device":
        raise ConfigError([f"--out {path}: device=<name> reads <folder>/device/<name>.yaml; type --out {_DEFAULT_OUT}"])
    if path.exists() and not overwrite:
        raise ConfigError([f"--out {path}: the file exists; type --overwrite to replace it, or another name"])
