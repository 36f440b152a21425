"""`launch=ray`: a placement group of Ray, with an actor per rank.

This command is Ray's driver. It decides about failures as with `launch=local` (`trainwright.launch.local.attempts`),
while Ray decides where ranks run. Ray itself restarts no actor, because a single rank could not continue.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.failures.error_text import first_line
from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.problems import ConfigError
from trainwright.core.processes.machine import num_cores
from trainwright.core.processes.scratch import default_variables
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.launch.engines.ray.actors import RankActors
from trainwright.launch.engines.ray.placement import RankPlaces, total
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.outcome.attempt import POLL_SECONDS, Outcome, RankAttempt, metrics_after_signal, metrics_in
from trainwright.launch.outcome.interruption import exit_timeout, handled_signals, interruption_in
from trainwright.launch.ranks.follow import Follower
from trainwright.launch.recovery.restarts import RestartLog
from trainwright.launch.recovery.sizes import resized

# Seconds between two reads of the logs.
_POLL_SECONDS = 1.0
# Failures of several ranks arrive one after the other.
_TOGETHER_SECONDS = 0.5


def make_attempt(
    cfg: DictConfig, number: int, *_: Any, verb: str, folder: Path, room: RankPlaces, signals: DeferredSignals
) -> RayAttempt:
    """Return an attempt that is not started.

    Args:
        cfg: its resolved configuration.
        number: earlier attempts.
        verb: fit, validate, test or predict.
        folder: for the records of all attempts; visible to all machines.
        room: placement of the ranks.
        signals: held during calls of Ray.
    """
    records = folder / f"attempt_{number}"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    group, devices = room.place()
    if devices != cfg.devices:  # the very first attempt, in a cluster without room for all
        cfg = resized(cfg, devices, None)
    return RayAttempt(cfg, verb, records, None, RankActors(cfg, number, group, signals))


@dataclass(eq=False)
class RayAttempt(RankAttempt):
    """The ranks of a run from their start to the exit of the last, each held by an actor.

    Args:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for the ranks' records; visible to all machines.
        actors: of the ranks, not yet started.
    """

    actors: RankActors

    def __post_init__(self) -> None:
        self._world_size = int(self.cfg.devices * self.cfg.nodes)
        self._run_dir = Path(self.cfg.run_dir).absolute()
        self._logs = Follower()

    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Run the attempt as in the base class."""
        self._logs.add_ranks(self._run_dir, range(self._world_size))
        try:
            failure = self.actors.start(self.verb, self.records)
            if failure is not None:
                return Outcome(failure)
            failed = self._wait(should_stop)
            if failed:
                self._end(signal.SIGTERM, grace_after_failure)
                return self._after_failure()
            if len(self.actors.codes) < self._world_size:
                self._end(signal.SIGTERM, exit_timeout(self.cfg, self.verb))
                return Outcome()
            return Outcome(metrics=metrics_in(self.records, self.cfg))
        except Interrupted as interrupted:
            return Outcome(metrics=self._after_signal(interrupted))
        finally:
            self.actors.kill()
            self._logs.finish()

    def _wait(self, should_stop: Callable[[], bool] | None) -> bool:
        """Wait until all ranks have exited, one has failed, or `should_stop()`; return whether one has failed."""
        looked = time.monotonic()
        while self.actors.has_ranks:
            if self._collect(_POLL_SECONDS):
                self._collect(_TOGETHER_SECONDS, of_all=True)
                return True
            if should_stop is not None and time.monotonic() - looked >= POLL_SECONDS:
                looked = time.monotonic()
                if should_stop():
                    return False
        return False

    def _collect(self, seconds: float, of_all: bool = False) -> bool:
        failed = self.actors.collect(seconds, of_all)
        self._logs.poll()
        return failed

    def _end(self, number: signal.Signals, grace: float) -> None:
        self.actors.end(number, grace, self._logs.poll)

    # ---- outcome -----------------------------------------------------------------------------------------------------

    def _after_failure(self) -> Outcome:
        failure = self._failure()
        interruption = interruption_in(self.cfg, self.actors.codes)
        if interruption is not None and not failure.is_cause and not self.actors.losses:
            raise interruption
        return Outcome(failure)

    def _failure(self) -> RankError:
        failure = first_failure(self.records, self.actors.codes, self._run_dir)
        if failure.is_cause or not self.actors.losses:
            return failure
        rank, reason = next(iter(self.actors.losses.items()))
        text = f"rank {rank} of {self._world_size} was lost with its actor; the others were ended\n\n{reason.strip()}"
        return RankError(text, rank, None)

    def _after_signal(self, interrupted: Interrupted) -> dict[str, float]:
        """Forward a signal to the ranks; see :func:`~trainwright.launch.outcome.attempt.metrics_after_signal`."""
        try:
            self._end(interrupted.number, exit_timeout(self.cfg, self.verb, interrupted.number))
        except Interrupted:  # a second signal ends them at once
            raise interrupted from None
        return metrics_after_signal(self.records, self.cfg, self.actors.codes, interrupted, self._failure)


def problems(cfg: DictConfig) -> list[str]:
    """Return the problems of `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
    """
    found = list(_rank_problems(cfg))
    if cfg.preemption.requeue:
        found.append("preemption.requeue=true with launch=ray: Ray has no queue; type preemption.requeue=false")
    gpus = cfg.launch.gpus_per_rank
    if cfg.accelerator == "gpu" and gpus not in (None, 1):
        found.append(f"launch.gpus_per_rank={gpus:g} with accelerator=gpu: a rank trains on one GPU; leave it out")
    return found


def _rank_problems(cfg: DictConfig) -> Iterator[str]:
    if cfg.devices == "auto":
        return  # refused for every engine
    world = cfg.devices * cfg.nodes
    ranks: dict[int, Any] = dict(cfg.launch.ranks)
    for rank, needs in ranks.items():
        if not 0 <= rank < world:
            yield f"launch.ranks.{rank}: there are ranks 0 to {world - 1}; leave it out"
        if not isinstance(needs, DictConfig):
            yield f"launch.ranks.{rank}={needs!s}: must be names and amounts, like launch.ranks={{{rank}: {{cpus: 8}}}}"
            continue
        plain: Any = OmegaConf.to_container(needs)
        for name, amount in plain.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool) or amount < 0:
                yield f"launch.ranks.{rank}.{name}={amount}: must be a number of at least 0"


# ---- the run ---------------------------------------------------------------------------------------------------------


def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Run the ranks as actors, and restart them as `launch` says.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The final metrics of rank 0 by name.

    Raises:
        RankError: if a rank failed; all others have exited.
        Interrupted: if this process was interrupted; all ranks have exited.
        ConfigError: if the cluster cannot be reached, or has no room.
    """
    with DeferredSignals(handled_signals(cfg)) as signals, cluster(cfg, signals):
        log = RestartLog(Path(cfg.run_dir))
        folder = Path(cfg.run_dir).absolute() / "logs" / "ray"
        with contextlib.closing(RankPlaces(cfg, verb, log, signals)) as room:
            make = partial(make_attempt, verb=verb, folder=folder, room=room, signals=signals)
            try:
                return AttemptedRun(cfg, verb, make, log, None if cfg.launch.min_devices is None else room).run()
            finally:
                shutil.rmtree(folder, ignore_errors=True)


_LOCAL = "local"
# Ray's variables: send no usage statistics, and let a local cluster listen on this machine only.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextlib.contextmanager
def cluster(cfg: DictConfig, signals: DeferredSignals) -> Iterator[None]:
    """Connect to the cluster of a run; a local one is started before and stopped after it.

    Args:
        cfg: the resolved configuration.
        signals: held while Ray starts and stops.

    Raises:
        ConfigError: if the cluster cannot be reached.
    """
    address = cfg.launch.address
    with default_variables({**_QUIET, **(_LOOPBACK if address == _LOCAL else {})}):
        import ray

        if ray.is_initialized():  # by a program that uses trainwright
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        runtime_env: Any = OmegaConf.to_container(cfg.launch.runtime_env)
        if runtime_env:
            options["runtime_env"] = runtime_env
        if address == _LOCAL:
            options |= _own_cluster(cfg)
        try:
            with signals.deferred():
                _connect(address, options)
            yield
        finally:
            with signals.deferred():
                ray.shutdown()


def _connect(address: str, options: Mapping[str, Any]) -> None:
    import ray

    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([f"launch.address={address}: {first_line(error)}"]) from error


def _own_cluster(cfg: DictConfig) -> dict[str, Any]:
    """Return the options of a local cluster with room for all ranks, which share its cores as with launch=local."""
    needs = total(cfg)
    cpus = max(num_cores(), math.ceil(needs.pop("CPU", 0.0)))
    others = {name: amount for name, amount in needs.items() if name not in ("GPU", "memory")}
    return {"include_dashboard": False, "num_cpus": cpus, **({"resources": others} if others else {})}
