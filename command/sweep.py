"""`--multirun`: every combination of the given values, one run after the other."""

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
from trainwright.command.schema.compose import compose_checked, config_loader
from trainwright.command.schema.expansion import ImportReport, report_import
from trainwright.command.schema.quoting import as_text, quote_values
from trainwright.core.config.masking import masked_words
from trainwright.core.failures.error_text import first_line
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
        overrides: all overrides, each with one value.
        varied: those that differ between jobs.
    """

    number: int
    overrides: tuple[str, ...]
    varied: tuple[str, ...]

    @property
    def title(self) -> str:
        """The values that distinguish this job."""
        return " ".join(masked_words(self.varied)) or "no value varies"

    @property
    def directory_name(self) -> str:
        """Number and values as a directory name: `1_strategy=zero3,seed=2`."""
        values = ",".join(masked_words(self.varied))
        safe = re.sub(r"[^\w.,=+-]", "_", values)[:120]
        return f"{self.number}_{safe}" if safe else str(self.number)


@dataclass(frozen=True)
class _Composed:
    """A job with its configuration, the command that gives the same, the planner's choice and the import report."""

    job: Job
    cfg: DictConfig
    words: Sequence[str]
    choice: Choice | None
    report: ImportReport | None


def expand(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[Job]:
    """Return every combination of the values in Hydra's grammar: `a=1,2`, `a=range(1,4)`, `a=choice(x,y)`, `a=glob(*)`.

    Raises:
        ConfigError: if an override cannot be parsed.
    """
    parser = OverridesParser.create(config_loader=config_loader(config_dir))
    alternatives: list[list[str]] = []
    problems: list[str] = []
    for text in quote_values(overrides):
        if is_inject(text):  # its commas separate no values: every job gets it
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
            example = f"strategy=ddp,zero3{as_text(text)}"
            problems.append(f"{text}: this is not key=value ({first_line(error)}); type for example {example}")
    if problems:
        raise ConfigError(problems)
    varies = [len(values) > 1 for values in alternatives]
    return [
        Job(number, combination, tuple(itertools.compress(combination, varies)))
        for number, combination in enumerate(itertools.product(*alternatives))
    ]


def run_sweep(verb: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> int:
    """Check all jobs, then run them one after the other, each in its own processes and directory, or all together where
    an engine supports it (`launch=slurm`: as an array).

    A failed job does not stop the others.

    Args:
        verb: fit, validate, test or predict.
        overrides: with several values where the jobs differ; `run_dir=` is the parent of the jobs' directories.
        config_dir: as for `compose`.

    Returns:
        0 if every job succeeded, else 1.

    Raises:
        ConfigError: if any job cannot run; none was started.
    """
    jobs = _compose_all(expand(overrides, config_dir), verb, config_dir)
    cfgs = [job.cfg for job in jobs]
    if not all(map(uses_engine, cfgs)):
        start_forkserver()
    start_all = starts_together(cfgs)
    if start_all is None:
        failed = [each.job for each in jobs if not _run_job(each, verb, len(jobs))]
    else:
        failed = _run_together(start_all, jobs, verb)
    above = Path(cfgs[0].run_dir).parent
    went = "ended well" if all(cfg.launch.get("wait", True) for cfg in cfgs) else "were submitted"
    if not all(cfg.launch.get("submit", True) for cfg in cfgs):
        went = "were written"
    print(f"\n{len(jobs) - len(failed)} of {len(jobs)} jobs {went}; their directories are in {above}")
    for job in failed:
        print(f"failed: job {job.number + 1} ({job.title}), {above / job.directory_name}", file=sys.stderr)
    return 1 if failed else 0


def _run_together(start_all: Callable[..., list[Any]], jobs: Sequence[_Composed], verb: str) -> list[Job]:
    """Submit all jobs to an engine together; return those that failed."""
    prepared = [_prepared(each, verb, len(jobs)) for each in jobs]
    folder = Path(prepared[0].run_dir).parent / prepared[0].launch.kind
    ends = start_all(prepared, verb, folder, [f"{each.job.number + 1} " for each in jobs])
    for cfg, end in zip(prepared, ends, strict=True):
        if isinstance(end, Exception):
            print(f"trainwright: {end}\n", file=sys.stderr, flush=True)
        if verb == "fit" and cfg.report and end is not None:
            tool("write_report")(Path(cfg.run_dir))
    return [each.job for each, end in zip(jobs, ends, strict=True) if isinstance(end, Exception)]


def _compose_all(jobs: Sequence[Job], verb: str, config_dir: str | Path | None) -> list[_Composed]:
    composed: list[_Composed] = []
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
            words = command_words(verb, job.overrides, config_dir)
            composed.append(_Composed(job, result.cfg, words, choice, result.import_report))
        for problem in found:
            problems.setdefault(problem, []).append(job.title)
    if problems:
        texts = (text if len(of) == len(jobs) else f"{text} (in {'; '.join(of)})" for text, of in problems.items())
        raise ConfigError(list(texts))
    return composed


def _prepared(each: _Composed, verb: str, count: int) -> DictConfig:
    """Create the run directory of a job, and print its title and the planner's choice."""
    print(f"job {each.job.number + 1} of {count}: {each.job.title}", flush=True)
    prepared = prepare(each.cfg, verb, choice=each.choice, words=each.words)
    report_import(each.report, sys.stdout, Path(prepared.run_dir))
    for line in each.choice.lines if each.choice is not None else ():
        print(line, flush=True)
    return prepared


def _run_job(each: _Composed, verb: str, count: int) -> bool:
    try:
        launch(_prepared(each, verb, count), verb, own_processes=True)
    except (RankError, ConfigError) as error:
        print(f"trainwright: {error}\n", file=sys.stderr, flush=True)
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True
