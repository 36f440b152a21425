"""`launch=ray`: a placement group of Ray, with an actor for each rank.

This command is Ray's driver: it decides about failures as with `launch=local` (`trainwright.trainer.launch.attempts`),
while Ray decides where ranks are. Ray starts no actor again by itself: one rank alone could not go on.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.trainer.check_recovery import RESTART
from trainwright.trainer.launch.attempt import Outcome, patience
from trainwright.trainer.launch.attempts import AttemptedRun
from trainwright.trainer.launch.ending import notices, told_to_end
from trainwright.trainer.launch.failure import RankError, first_failure, log_file
from trainwright.trainer.launch.follow import Follower
from trainwright.trainer.launch.held_signals import HeldSignals
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.ray_places import Place, actor_options, bundles, environment_of, total
from trainwright.trainer.launch.ray_rank import RankHolder
from trainwright.trainer.launch.records import Beginning, read_beginning, read_result, read_steps
from trainwright.trainer.launch.restart_log import RestartLog
from trainwright.trainer.launch.restarts import RestartPolicy, Setback, setback_of
from trainwright.trainer.launch.sizes import feasible, resized
from trainwright.trainer.machine import num_cores
from trainwright.trainer.problems import ConfigError, did_you_mean
from trainwright.trainer.run_directory import write_config_file

LOCAL = "local"
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Seconds that an actor waits for its rank before it can be told something else.
_WAIT_SECONDS = 2.0
# Seconds between two looks at the logs.
_LOOK_SECONDS = 1.0
# Ranks that fail together are noticed one after the other.
_TOGETHER_SECONDS = 0.5
# Seconds that a smaller group has to find its place, once the whole one did not in time.
_SMALLER_SECONDS = 5.0
# Ray's own: no statistics of use are sent, and a cluster of this machine listens to this machine alone.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


# ---- what is refused -------------------------------------------------------------------------------------------------


def problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is impossible about `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
        verb: fit, validate, test or predict.
    """
    return [*_of_recovery(cfg), *_of_resources(cfg), *_of_ranks(cfg)]


def _of_recovery(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    if launch.recovery != RESTART:
        yield (
            f"launch.recovery={launch.recovery} with launch=ray: a failure starts all ranks again; type "
            "launch.recovery=restart"
        )
    if launch.min_devices is not None and cfg.nodes > 1:
        yield (
            f"launch.min_devices={launch.min_devices} with launch=ray on nodes={cfg.nodes}: only a group of ranks on "
            "one machine shrinks; type nodes=1, or leave it out"
        )
    if cfg.preemption.requeue:
        yield "preemption.requeue=true with launch=ray: Ray has no queue; type preemption.requeue=false"


def _of_resources(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    if launch.placement not in PLACEMENTS:
        given = launch.placement
        yield f"launch.placement={given}: unknown; {did_you_mean(given, PLACEMENTS, 'placements')}"
    if launch.placement_seconds <= 0:
        yield f"launch.placement_seconds={launch.placement_seconds:g}: must be more than 0; 300 is the default"
    given = {
        "launch.cpus_per_rank": launch.cpus_per_rank,
        "launch.gpus_per_rank": launch.gpus_per_rank,
        "launch.memory_gb_per_rank": launch.memory_gb_per_rank,
        **{f"launch.resources.{name}": amount for name, amount in launch.resources.items()},
    }
    yield from (f"{key}={amount}: must be at least 0" for key, amount in given.items() if (amount or 0) < 0)
    if cfg.accelerator == "gpu" and launch.gpus_per_rank not in (None, 1):
        yield (
            f"launch.gpus_per_rank={launch.gpus_per_rank:g} with accelerator=gpu: a rank trains on one GPU; type "
            "launch.gpus_per_rank=1, or leave it out"
        )


def _of_ranks(cfg: DictConfig) -> Iterator[str]:
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


# ---- the cluster -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(cfg: DictConfig, signals: HeldSignals) -> Iterator[None]:
    """Be connected to the cluster of a run; one of this machine is started before and ended after it.

    Args:
        cfg: the resolved configuration.
        signals: held while Ray starts and ends.

    Raises:
        ConfigError: if the cluster cannot be reached.
    """
    address = cfg.launch.address
    with _environment({**_QUIET, **(_LOOPBACK if address == LOCAL else {})}):
        import ray

        if ray.is_initialized():  # by a program that uses trainwright
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        runtime_env: Any = OmegaConf.to_container(cfg.launch.runtime_env)
        if runtime_env:
            options["runtime_env"] = runtime_env
        if address == LOCAL:
            options |= _own_cluster(cfg)
        try:
            with signals.held():
                _connect(address, options)
            yield
        finally:
            with signals.held():
                ray.shutdown()


def _connect(address: str, options: Mapping[str, Any]) -> None:
    import ray

    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([f"launch.address={address}: {str(error).splitlines()[0]}"]) from error


def _own_cluster(cfg: DictConfig) -> dict[str, Any]:
    """A cluster of this machine that has room for all ranks: they share its cores as they would with launch=local."""
    needs = total(cfg)
    cpus = max(num_cores(), math.ceil(needs.pop("CPU", 0.0)))
    others = {name: amount for name, amount in needs.items() if name not in ("GPU", "memory")}
    return {"include_dashboard": False, "num_cpus": cpus, **({"resources": others} if others else {})}


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """With variables that the user has not set otherwise."""
    mine = {name: value for name, value in more.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


# ---- the run ---------------------------------------------------------------------------------------------------------


def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Run the ranks as actors, and start them again where `launch` asks for it.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
        ConfigError: if the cluster cannot be reached, or has no room.
    """
    with HeldSignals(notices(cfg)) as signals, cluster(cfg, signals):
        log = RestartLog(Path(cfg.run_dir))
        room = Room(cfg, verb, log, signals)
        sizes = None if cfg.launch.min_devices is None else room
        return AttemptedRun(cfg, verb, RayAttempts(verb, room, signals), log, sizes).run()


def _answers(ask: Callable[[], list[Any]], signals: HeldSignals) -> list[Any]:
    """What actors answer who are asked, in order."""
    import ray

    with signals.held():
        asked = ask()
    while True:
        with signals.held():
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_SECONDS)
            if len(ready) == len(asked):
                return list(ray.get(asked))


class Room:
    """The placement group of a run: as many ranks as there is room for, at least `launch.min_devices`.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        log: where a change is told.
        signals: held while Ray is asked.
    """

    def __init__(self, cfg: DictConfig, verb: str, log: RestartLog, signals: HeldSignals) -> None:
        self._cfg = cfg
        self._verb = verb
        self._log = log
        self._signals = signals
        self._group: Any = None
        self._is_new = False
        self._size = int(cfg.devices)
        self._samples: int | None = None
        self._look_at = 0.0
        self._pause = float(cfg.launch.probe_seconds)

    @property
    def size(self) -> int:
        """Devices of the next attempt: its place is taken now, that of the one before is given back."""
        self._take()
        return self._size

    def place(self) -> tuple[Any, int]:
        """Ray's placement group for the next attempt, and the devices that it has room for."""
        if not self._is_new:
            self._take()
        self._is_new = False
        return self._group, self._size

    def release(self) -> None:
        """Give the place back."""
        import ray

        if self._group is not None:
            with self._signals.held(), contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(self._group)
            self._group = None

    def blame(self, setback: Setback, samples: int | None) -> bool:
        """Hear of a failure; what was lost is missing when the next place is taken."""
        self._samples = samples
        return False

    def look(self, samples: int | None) -> bool:
        """Whether to try again with all devices: some machine has enough of everything, in use or not."""
        self._samples = samples
        if self._size == self._cfg.devices or time.monotonic() < self._look_at:
            return False
        self._wait_longer()
        grows = self._is_large_enough()
        if grows:
            self._log.tell(f"the cluster has room for {self._cfg.devices} devices again")
        return grows

    def close(self) -> None:
        """Give the place back."""
        self.release()

    def _take(self) -> None:
        """Take the place of all devices, or in time that of as many as there is room for; give the former one back.

        Raises:
            ConfigError: if there is no room, and never was.
            RankError: if there is none any more.
        """
        had_room = self._group is not None
        self.release()
        self._size = int(self._cfg.devices)
        if self._try(self._size, float(self._cfg.launch.placement_seconds)):
            return
        fewest = self._cfg.launch.min_devices
        sizes = [] if fewest is None else range(self._size - 1, fewest - 1, -1)
        for size in sizes:
            possible = feasible(self._cfg, self._verb, [size], self._samples) is not None
            if possible and self._try(size, _SMALLER_SECONDS):
                self._log.tell(f"the cluster has room for {size} of {self._cfg.devices} devices")
                self._size = size
                self._wait_longer()
                return
        raise RankError(self._no_room(), 0, None) if had_room else ConfigError([self._no_room()])

    def _try(self, devices: int, seconds: float) -> bool:
        import ray

        cfg = resized(self._cfg, devices, self._samples, self._cfg.nodes)
        end = time.monotonic() + seconds
        with self._signals.held():
            group = ray.util.placement_group(bundles(cfg), strategy=cfg.launch.placement)
            self._group = group  # to be given back, if the wait for it is interrupted
        while True:
            with self._signals.held():
                if group.wait(min(_LOOK_SECONDS, seconds)):
                    self._is_new = True
                    return True
            if time.monotonic() >= end:
                self.release()
                return False

    def _wait_longer(self) -> None:
        self._look_at = time.monotonic() + self._pause
        self._pause *= 2

    def _is_large_enough(self) -> bool:
        import ray

        [bundle] = bundles(self._cfg)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(has.get(name, 0.0) >= amount for name, amount in bundle.items()) for has in machines)

    def _no_room(self) -> str:
        import ray

        asked = " and ".join(_in_words(bundle) for bundle in bundles(self._cfg))
        there = "; ".join(_in_words(node["Resources"]) for node in ray.nodes() if node["Alive"])
        return (
            f"launch=ray: within launch.placement_seconds={self._cfg.launch.placement_seconds:g} there was no room for "
            f"{asked} (machine by machine, placement {self._cfg.launch.placement}); the machines of the cluster have "
            f"{there}; type fewer devices, or less of launch.cpus_per_rank and the like"
        )


def _in_words(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(shown.items())) + "}"


class RayAttempts:
    """Makes the attempts of a run on a cluster.

    Args:
        verb: fit, validate, test or predict.
        room: where the ranks go.
        signals: held while Ray is asked.
    """

    def __init__(self, verb: str, room: Room, signals: HeldSignals) -> None:
        self._verb = verb
        self._room = room
        self._signals = signals
        self._folder: Path | None = None

    def make(self, cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RayAttempt:
        """An attempt that has not begun.

        Args:
            cfg: its resolved configuration.
            number: attempts before it.
            policy: not needed: all ranks start again together.
            log: not needed.
        """
        self._folder = Path(cfg.run_dir).absolute() / "logs" / "ray"
        records = self._folder / f"attempt_{number}"
        shutil.rmtree(records, ignore_errors=True)
        records.mkdir(parents=True)
        group, devices = self._room.place()
        if devices != cfg.devices:  # the first attempt of all, in a cluster without room for it
            cfg = resized(cfg, devices, None)
        return RayAttempt(cfg, self._verb, records, number, group, self._signals)

    def explain(self, failure: RankError) -> RankError:
        """The failure as it is."""
        return failure

    def end_attempt(self) -> None:
        """Nothing is left of it but its records."""

    def close(self) -> None:
        """Remove the records."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._room.release()


class RayAttempt:
    """The ranks of a run from their start to the end of the last, each held by an actor.

    Args:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for what the ranks write down; all machines see it.
        number: attempts before this one.
        group: Ray's placement group.
        signals: held while Ray is asked.
    """

    def __init__(
        self, cfg: DictConfig, verb: str, records: Path, number: int, group: Any, signals: HeldSignals
    ) -> None:
        self._cfg = cfg
        self._signals = signals
        self._verb = verb
        self._records = records
        self._number = number
        self._group = group
        self._run_dir = Path(cfg.run_dir).absolute()
        self._actors: list[Any] = []
        self._waiting: dict[Any, int] = {}  # what an actor will answer -> its rank
        self._codes: dict[int, int | None] = {}  # of ranks that have ended; None: with their actors
        self._losses: dict[int, str] = {}  # what Ray says of actors that are gone
        self._logs = Follower()

    @property
    def beginning(self) -> Beginning | None:
        """How it began to train; None as long as it has not."""
        return read_beginning(self._records)

    def run(
        self, grace_after_failure: float, look_seconds: float | None = None, enough: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Start the ranks and wait for the end of all.

        Args:
            grace_after_failure: seconds that the others have to end when one has failed.
            look_seconds: how often `enough` is asked; None = never.
            enough: whether the ranks shall be ended, to go on with other ones.

        Raises:
            Interrupted: if this process was told to end, or the ranks were; all have ended.
        """
        world = self._cfg.devices * self._cfg.nodes
        self._logs.add_ranks(self._run_dir, range(world))
        try:
            failure = self._start(world)
            if failure is not None:
                return Outcome(failure)
            failed = self._wait(look_seconds, enough)
            if failed:
                self._end(signal.SIGTERM, grace_after_failure)
                return self._after_failure()
            if len(self._codes) < world:
                self._end(signal.SIGTERM, patience(self._cfg, self._verb))
                return Outcome()
            return Outcome(metrics=self._result())
        except Interrupted as interrupted:
            return Outcome(metrics=self._after_signal(interrupted))
        finally:
            self._kill()
            self._logs.finish()

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        steps, beginning = read_steps(self._records), self.beginning
        step = steps.get(failure.rank, max(steps.values(), default=None))
        return setback_of(failure, step, None if beginning is None else beginning.step)

    # ---- start and end of the actors --------------------------------------------------------------------------------

    def _start(self, world: int) -> RankError | None:
        """Start actors and ranks; what Ray says where it cannot."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = [entry for entry in sys.path if entry]
        with self._signals.held():
            holder = ray.remote(RankHolder)
            for rank in range(world):
                node = rank // self._cfg.devices
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
                options = actor_options(self._cfg, rank)
                log = str(log_file(self._run_dir, rank))
                actor = holder.options(scheduling_strategy=place, **options).remote(rank, os.getcwd(), path, log)
                self._actors.append(actor)
        try:
            self._start_ranks()
        except ray.exceptions.RayError as error:
            return RankError(f"Ray could not start the ranks\n\n{str(error).strip()}", 0, None)
        with self._signals.held():
            self._waiting = {actor.wait.remote(_WAIT_SECONDS): rank for rank, actor in enumerate(self._actors)}
        return None

    def _start_ranks(self) -> None:
        actors = self._actors
        places: list[Place] = _answers(lambda: [actor.place.remote() for actor in actors], self._signals)
        [store] = _answers(lambda: [actors[0].open_store.remote(places[0].address)], self._signals)
        threads = os.environ.get("OMP_NUM_THREADS")
        told = [environment_of(self._cfg, rank, places, store, self._number, threads) for rank in range(len(places))]
        write_config_file(self._cfg, self._records)
        words = self._verb, str(self._records)
        _answers(
            lambda: [actor.start.remote(*words, each) for actor, each in zip(actors, told, strict=True)], self._signals
        )

    def _wait(self, look_seconds: float | None, enough: Callable[[], bool]) -> bool:
        """Wait for the end of all ranks, or for the first that fails and those that fail with it, or until it is
        enough; whether one has failed."""
        looked = time.monotonic()
        while self._waiting:
            if self._hear(_LOOK_SECONDS):
                self._hear(_TOGETHER_SECONDS, of_all=True)
                return True
            if look_seconds is not None and time.monotonic() - looked >= look_seconds:
                looked = time.monotonic()
                if enough():
                    return False
        return False

    def _hear(self, seconds: float, of_all: bool = False) -> bool:
        """Take the answers that come within that time; whether a rank has failed."""
        import ray

        wanted = len(self._waiting) if of_all else 1
        failed = False
        with self._signals.held():
            ready, _ = ray.wait(list(self._waiting), num_returns=wanted, timeout=seconds) if self._waiting else ([], [])
            for answer in ready:
                rank = self._waiting.pop(answer)
                code = self._answer(answer, rank)
                if rank in self._losses or code is not None:
                    self._codes[rank] = code
                    failed |= code != 0
                else:
                    self._waiting[self._actors[rank].wait.remote(_WAIT_SECONDS)] = rank
        self._logs.poll()
        return failed

    def _answer(self, answer: Any, rank: int) -> int | None:
        """The exit code of a rank, if that is what its actor says; None: it lives, or is lost with its actor."""
        import ray

        try:
            code: int | None = ray.get(answer)
            return code
        except ray.exceptions.RayError as error:
            self._losses[rank] = str(error)
            return None

    def _end(self, number: signal.Signals, grace: float) -> None:
        """End the ranks that live, and learn how they ended."""
        import ray

        living = {rank: self._actors[rank] for rank in range(len(self._actors)) if rank not in self._codes}
        with self._signals.held():
            answers = {actor.end.remote(int(number), grace): rank for rank, actor in living.items()}
        while answers:
            with self._signals.held():
                ready, _ = ray.wait(list(answers), num_returns=1, timeout=_LOOK_SECONDS)
                for answer in ready:
                    rank = answers.pop(answer)
                    self._codes[rank] = self._answer(answer, rank)
            self._logs.poll()
        self._waiting.clear()

    def _kill(self) -> None:
        """End the actors: ranks that still live end with them."""
        import ray

        with self._signals.held():
            for actor in self._actors:
                with contextlib.suppress(Exception):  # it may be gone, or the cluster
                    ray.kill(actor)

    # ---- how it ended ------------------------------------------------------------------------------------------------

    def _after_failure(self) -> Outcome:
        failure = self._failure()
        told = told_to_end(self._cfg, self._codes)
        if told is not None and not failure.is_cause and not self._losses:
            raise told
        return Outcome(failure)

    def _failure(self) -> RankError:
        failure = first_failure(self._records, self._codes, self._run_dir)
        if failure.is_cause or not self._losses:
            return failure
        rank, reason = next(iter(self._losses.items()))
        text = f"rank {rank} of {len(self._actors)} was lost with its actor; the others were ended\n\n{reason.strip()}"
        return RankError(text, rank, None)

    def _after_signal(self, interrupted: Interrupted) -> dict[str, float]:
        """Pass a signal on to the ranks; the metrics, where they were through already.

        Raises:
            Interrupted: where they were not.
            RankError: where they should have saved, and one failed at it.
        """
        try:
            self._end(interrupted.number, patience(self._cfg, self._verb, interrupted.number))
        except Interrupted:  # a second signal: at once
            raise interrupted from None
        if self._codes and not any(code != 0 for code in self._codes.values()):
            return self._result(interrupted)
        told = told_to_end(self._cfg, self._codes)
        if told is None and self._codes and interrupted.number in notices(self._cfg):
            failure = self._failure()
            if failure.is_cause:
                raise failure
        raise told or interrupted

    def _result(self, interrupted: Interrupted | None = None) -> dict[str, float]:
        """The metrics of ranks that have all ended well; none where the user's own code ended them.

        Raises:
            Interrupted: if they were told to end, which the configuration calls well.
        """
        try:
            return read_result(self._records)
        except FileNotFoundError:
            if self._cfg.preemption.exit_code == 0:
                raise Interrupted(interrupted.number if interrupted else signal.SIGTERM, 0) from None
            return {}
