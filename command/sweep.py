"""`--multirun`: every combination of the given values, one run after the other."""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainwright.callbacks.inject.sentences import is_inject
from trainwright.command.auto import Choice
from trainwright.command.run import choose, launch, prepare
from trainwright.command.schema.compose import compose_checked, config_loader, quote_paths
from trainwright.command.schema.expansion import ImportReport, tell_import
from trainwright.core.config.masking import masked_words
from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.core.run.run_directory import command_words, timestamp
from trainwright.core.tools import tool
from trainwright.launch.engines.engines import starts_together, uses_engine
from trainwright.launch.ranks.forkserver import start_forkserver

MULTIRUN = Path("multirun")


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        number: counted from 0.
        overrides: all its overrides, each with one value.
        varied: those that differ between jobs.
    """

    number: int
    overrides: tuple[str, ...]
    varied: tuple[str, ...]

    @property
    def title(self) -> str:
        """What is special about this job, in words for a person."""
        return " ".join(masked_words(self.varied)) or "no value varies"

    @property
    def directory_name(self) -> str:
        """Number and values as a directory name: `1_strategy=zero3,seed=2`."""
        values = ",".join(masked_words(self.varied))
        safe = re.sub(r"[^\w.,=+-]", "_", values)[:120]
        return f"{self.number}_{safe}" if safe else str(self.number)


@dataclass(frozen=True)
class _Composed:
    """The configuration of a job, with what was chosen for it and what was imported."""

    cfg: DictConfig
    choice: Choice | None
    report: ImportReport | None


def expand(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[Job]:
    """Every combination of the values in Hydra's grammar: `a=1,2`, `a=range(1,4)`, `a=choice(x,y)`, `a=glob(*)`.

    Raises:
        ConfigError: if an override cannot be parsed.
    """
    parser = OverridesParser.create(config_loader=config_loader(config_dir))
    alternatives: list[list[str]] = []
    problems: list[str] = []
    for text in quote_paths(overrides):
        if is_inject(text):  # commas in it separate no values: every job gets it
            alternatives.append([text])
            continue
        try:
            # Unlike parse_override, this lets glob() see the choices.
            [override] = parser.parse_overrides([text])
            if override.is_sweep_override():
                key = override.get_key_element()
                alternatives.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            else:
                alternatives.append([text])
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{text}: this is not key=value ({reason}); type for example strategy=ddp,zero3")
    if problems:
        raise ConfigError(problems)
    varies = [len(values) > 1 for values in alternatives]
    return [
        Job(number, combination, tuple(itertools.compress(combination, varies)))
        for number, combination in enumerate(itertools.product(*alternatives))
    ]


def run_sweep(verb: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> int:
    """Check all jobs, then run one after the other, each in its own processes and its own directory, or all together
    where an engine does so (`launch=slurm`: as an array).

    A job that fails does not stop the others.

    Args:
        verb: fit, validate, test or predict.
        overrides: with several values where the jobs differ; `run_dir=` is the directory above those of the jobs.
        config_dir: as for `compose`.

    Returns:
        0 when every job ended well, else 1.

    Raises:
        ConfigError: if any job cannot run; none was started.
    """
    jobs = expand(overrides, config_dir)
    configurations = _compose_all(jobs, verb, config_dir)
    if not all(uses_engine(each.cfg) for each in configurations):
        start_forkserver()
    start_all = starts_together([each.cfg for each in configurations])
    if start_all is not None:
        failed = _run_together(start_all, jobs, configurations, verb, config_dir)
    else:
        failed = _run_in_turn(jobs, configurations, verb, config_dir)
    above = Path(configurations[0].cfg.run_dir).parent
    waited = all(each.cfg.launch.get("wait", True) for each in configurations)
    went = "ended well" if waited else "were submitted"
    if not all(each.cfg.launch.get("submit", True) for each in configurations):
        went = "were written"
    print(f"\n{len(jobs) - len(failed)} of {len(jobs)} jobs {went}; their directories are in {above}")
    for job in failed:
        print(f"failed: job {job.number + 1} ({job.title}), {above / job.directory_name}", file=sys.stderr)
    return 1 if failed else 0


def _run_in_turn(
    jobs: Sequence[Job],
    configurations: Sequence[_Composed],
    verb: str,
    config_dir: str | Path | None,
) -> list[Job]:
    """Run one job after the other; returns those that failed."""
    failed: list[Job] = []
    for job, composed in zip(jobs, configurations, strict=True):
        print(f"job {job.number + 1} of {len(jobs)}: {job.title}", flush=True)
        if not _run_job(composed, verb, command_words(verb, job.overrides, config_dir)):
            failed.append(job)
    return failed


def _run_together(
    start_all: Callable[..., list[Any]],
    jobs: Sequence[Job],
    configurations: Sequence[_Composed],
    verb: str,
    config_dir: str | Path | None,
) -> list[Job]:
    """Hand all jobs to an engine that starts them together; returns those that failed."""
    prepared: list[DictConfig] = []
    for job, composed in zip(jobs, configurations, strict=True):
        print(f"job {job.number + 1} of {len(jobs)}: {job.title}", flush=True)
        prepared.append(_prepared(composed, verb, command_words(verb, job.overrides, config_dir)))
    folder = Path(prepared[0].run_dir).parent / prepared[0].launch.kind
    ends = start_all(prepared, verb, folder, [f"{job.number + 1} " for job in jobs])
    for cfg, end in zip(prepared, ends, strict=True):
        if isinstance(end, Exception):
            print(f"trainwright: {end}\n", file=sys.stderr, flush=True)
        if verb == "fit" and cfg.report and end is not None:
            tool("write_report")(Path(cfg.run_dir))
    return [job for job, end in zip(jobs, ends, strict=True) if isinstance(end, Exception)]


def _compose_all(jobs: Sequence[Job], verb: str, config_dir: str | Path | None) -> list[_Composed]:
    configurations: list[_Composed] = []
    problems: dict[str, list[str]] = {}
    base: Path | None = None
    for job in jobs:
        result = compose_checked(job.overrides, config_dir)
        found = list(result.problems)
        if result.cfg is not None and result.guessed:
            base = base or (Path(result.cfg.run_dir) if result.cfg.run_dir else MULTIRUN / timestamp())
            result.cfg.run_dir = str(base / job.directory_name)
            choice, wrong = choose(result.cfg, verb)
            found += wrong
            configurations.append(_Composed(result.cfg, choice, result.import_report))
        for problem in found:
            problems.setdefault(problem, []).append(job.title)
    if problems:
        everywhere = len(jobs)
        raise ConfigError(
            [
                text if len(titles) == everywhere else f"{text} (in {'; '.join(titles)})"
                for text, titles in problems.items()
            ]
        )
    return configurations


def _prepared(job: _Composed, verb: str, words: Sequence[str]) -> DictConfig:
    """Make the run directory of a job, and say what was chosen for it."""
    prepared = prepare(job.cfg, verb, choice=job.choice, words=words)
    tell_import(job.report, sys.stdout, Path(prepared.run_dir))
    for line in job.choice.lines if job.choice is not None else ():
        print(line, flush=True)
    return prepared


def _run_job(job: _Composed, verb: str, words: Sequence[str]) -> bool:
    try:
        launch(_prepared(job, verb, words), verb, own_processes=True)
    except (RankError, ConfigError) as error:
        print(f"trainwright: {error}\n", file=sys.stderr, flush=True)
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True
