"""How ranks end after a signal, from the configuration alone."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.end.options import PreemptionOptions
from trainwright.callbacks.end.requeue import job_of
from trainwright.core.run.interrupt import Interrupted

# "No limit" for functions that wait, in seconds.
_A_WEEK = 7 * 86400.0
MARGIN_SECONDS = 2.0
"""Seconds beyond a rank's own limit (:class:`~trainwright.core.processes.watch.ShutdownWatch`), so that it can exit by
itself.
"""
# Killed by the signal itself, before or after the rank handled it.
_BY_SIGNAL = {-int(number): number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}


def seconds_to_end(cfg: DictConfig, verb: str, number: int = signal.SIGTERM) -> float | None:
    """Return the seconds that a rank has to exit after a signal; None = no limit.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        number: of the signal.
    """
    grace = float(cfg.launch.grace_seconds)
    if verb != "fit" or not cfg.preemption.save or number not in handled_signals(cfg):
        return grace
    deadline = cfg.preemption.deadline_seconds
    return None if deadline is None else max(grace, float(deadline))


def exit_timeout(cfg: DictConfig, verb: str, number: int = signal.SIGTERM) -> float:
    """Return the seconds to wait for ranks after a signal: a little more than they give themselves.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        number: of the signal.
    """
    seconds = seconds_to_end(cfg, verb, number)
    return _A_WEEK if seconds is None else seconds + MARGIN_SECONDS


def handled_signals(cfg: DictConfig) -> tuple[signal.Signals, ...]:
    """Return the signals upon which a run saves and ends; the launching process forwards them to the ranks."""
    return tuple(signal.Signals[name] for name in cfg.preemption.signals)


def interruption_in(cfg: DictConfig, exit_codes: Mapping[int, int | None]) -> Interrupted | None:
    """Return the signal that the exit codes of ranks show, of the first such rank; None if there is none.

    Args:
        cfg: the resolved configuration.
        exit_codes: by rank.
    """
    signals = _interrupt_codes(cfg)
    for code in exit_codes.values():
        if code is not None and code in signals:
            return Interrupted(signals[code], code if code > 0 else None)
    return None


def _interrupt_codes(cfg: DictConfig) -> dict[int, signal.Signals]:
    code = cfg.preemption.exit_code
    if code:
        return {**_BY_SIGNAL, int(code): signal.SIGTERM, 128 + signal.SIGTERM: signal.SIGTERM}
    return {**_BY_SIGNAL, **{128 + number: number for number in (*handled_signals(cfg), signal.SIGTERM)}}


def preemption_refusals(cfg: DictConfig, verb: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the problems of the group `preemption`.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        environment: variables of this process; None = as they are.
    """
    options: Any = OmegaConf.to_container(cfg.preemption)
    options.pop("_target_")
    found = list(PreemptionOptions(**options).option_problems("preemption."))
    return found + list(_requeue_problems(cfg, verb, os.environ if environment is None else environment))


def _requeue_problems(cfg: DictConfig, verb: str, environment: Mapping[str, str]) -> Iterator[str]:
    preemption = cfg.preemption
    if preemption.file is not None and Path(preemption.file).expanduser().exists():
        yield f"preemption.file={preemption.file} exists, so the run would end at once; delete it, or type another"
    if verb != "fit" or not preemption.requeue:
        return
    in_job_of_its_own = cfg.launch.kind == "slurm"  # which keeps the run directory, and resumes in it
    if job_of(environment) is None and not in_job_of_its_own:
        yield "preemption.requeue=true outside SLURM (SLURM_JOB_ID is not set): type launch=slurm, or leave it out"
    if cfg.resume is None and not in_job_of_its_own:
        yield "preemption.requeue=true: the requeued job would not resume; type resume=auto, with its own run_dir=..."
    if all(each is None for each in cfg.checkpoint.values()):
        yield "preemption.requeue=true without a checkpoint to resume; type checkpoint=last (or async), or leave it out"
