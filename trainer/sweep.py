"""`--multirun`: every combination of the given values, one run after the other."""

import itertools
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainwright.trainer.compose import compose_checked, config_loader, quote_paths
from trainwright.trainer.deepspeed_config.report import Report
from trainwright.trainer.deepspeed_config.tell import tell_import
from trainwright.trainer.inject_words import is_inject
from trainwright.trainer.launch.failure import RankError
from trainwright.trainer.launch.forkserver import start_forkserver
from trainwright.trainer.problems import ConfigError
from trainwright.trainer.run import launch, plan, prepare
from trainwright.trainer.run_directory import command_words, timestamp, write_command

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
        return " ".join(self.varied) or "no value varies"

    @property
    def directory_name(self) -> str:
        """Number and values as a directory name: `1_strategy=zero3,seed=2`."""
        values = ",".join(self.varied)
        safe = re.sub(r"[^\w.,=+-]", "_", values)[:120]
        return f"{self.number}_{safe}" if safe else str(self.number)


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
    """Check all jobs, then run one after the other, each in its own processes and its own directory.

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
    start_forkserver()
    failed: list[Job] = []
    for job, (cfg, report) in zip(jobs, configurations, strict=True):
        print(f"job {job.number + 1} of {len(jobs)}: {job.title}", flush=True)
        if not _run_job(cfg, verb, report, command_words(verb, job.overrides, config_dir)):
            failed.append(job)
    above = Path(configurations[0][0].run_dir).parent
    print(f"\n{len(jobs) - len(failed)} of {len(jobs)} jobs ended well; their directories are in {above}")
    for job in failed:
        print(f"failed: job {job.number + 1} ({job.title}), {above / job.directory_name}", file=sys.stderr)
    return 1 if failed else 0


def _compose_all(
    jobs: Sequence[Job], verb: str, config_dir: str | Path | None
) -> list[tuple[DictConfig, Report | None]]:
    configurations: list[tuple[DictConfig, Report | None]] = []
    problems: dict[str, list[str]] = {}
    base: Path | None = None
    for job in jobs:
        result = compose_checked(job.overrides, config_dir)
        found = list(result.problems)
        if result.cfg is not None and result.guessed:
            base = base or (Path(result.cfg.run_dir) if result.cfg.run_dir else MULTIRUN / timestamp())
            result.cfg.run_dir = str(base / job.directory_name)
            found += plan(result.cfg, verb)[1]
            configurations.append((result.cfg, result.import_report))
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


def _run_job(cfg: DictConfig, verb: str, report: Report | None, words: Sequence[str]) -> bool:
    try:
        prepared = prepare(cfg, verb)
        write_command(Path(prepared.run_dir), words)
        tell_import(report, sys.stdout, Path(prepared.run_dir))
        launch(prepared, verb, own_processes=True)
    except (RankError, ConfigError) as error:
        print(f"trainwright: {error}\n", file=sys.stderr, flush=True)
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True
