"""Ray actors that hold the ranks of an attempt."""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, log_file
from trainwright.core.processes.scratch import scratch
from trainwright.core.run.interrupt import DeferredSignals
from trainwright.core.run.run_directory import write_config_file
from trainwright.launch.engines.ray.placement import Place, actor_options, rank_variables
from trainwright.launch.ranks.forkserver import start_forkserver, stop_forkserver
from trainwright.launch.ranks.output import Output
from trainwright.launch.ranks.supervisor import RankExit, Supervisor


class RankHolder:
    """Actor that holds one rank.

    Args:
        rank: global rank.
        directory: working directory of the command, used if it exists.
        path: additional module search path.
        log: file for the output of the rank.
    """

    def __init__(self, rank: int, directory: str, path: list[str], log: str) -> None:
        self._rank = rank
        if Path(directory).is_dir():
            os.chdir(directory)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Output().to(Path(log))
        start_forkserver()  # its imports run while the other actors are placed
        self._supervisor: Supervisor | None = None
        self._code: int | None = None
        self._store: object = None

    def place(self) -> Place:
        """Return where the actor runs."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Place(ray.util.get_node_ip_address(), tuple(map(str, gpus)))

    def open_store(self, address: str) -> tuple[str, int]:
        """Open the ranks' store, for as long as this actor lives; return address and port.

        Args:
            address: of this machine.
        """
        from trainwright.launch.ranks.rendezvous import LocalStore

        store = LocalStore(address=address)
        self._store = store
        return store.address, store.port

    def start(self, verb: str, records: str, environment: Mapping[str, str]) -> int:
        """Start the rank; return its process id.

        Args:
            verb: fit, validate, test or predict.
            records: folder with the configuration of this attempt, and for the rank's records; visible to all machines.
            environment: its variables besides those of this process.
        """
        from trainwright.launch.rank import rank_main

        self._supervisor = Supervisor(rank_main, (verb, Path(records), Path(records)))
        self._supervisor.start_rank(self._rank, {**os.environ, **environment})
        return self._supervisor.pid(self._rank)

    def wait(self, seconds: float) -> int | None:
        """Wait for the rank to exit; return its exit code, None while it lives.

        Args:
            seconds: to wait at most.
        """
        if self._supervisor is not None and self._code is None:
            self._record_exit(self._supervisor.wait(seconds))
        return self._code

    def end(self, number: int, grace: float) -> int | None:
        """End the rank; return its exit code, None if it was not started.

        Args:
            number: of the signal.
            grace: seconds after the signal before it is killed.
        """
        if self._supervisor is not None and self._code is None:
            self._record_exit(self._supervisor.end((self._rank,), grace, signal.Signals(number)))
        return self._code

    def _record_exit(self, ended: list[RankExit]) -> None:
        for each in ended:
            self._code = each.exit_code
            # Ray kills this process, which then cannot clean up at exit.
            stop_forkserver()
            shutil.rmtree(scratch(), ignore_errors=True)


# Seconds that an actor waits for its rank before it can take another call.
_WAIT_SECONDS = 2.0
# Longest uninterrupted wait for Ray, in seconds; signals are handled in between.
_POLL_SECONDS = 1.0


class RankActors:
    """The actors of an attempt, one per rank.

    Args:
        cfg: the resolved configuration of this attempt.
        number: earlier attempts.
        group: Ray's placement group.
        signals: held during calls of Ray.

    Attributes:
        codes: exit codes by rank; None = lost with the actor.
        losses: Ray's messages about lost actors, by rank.
    """

    def __init__(self, cfg: DictConfig, number: int, group: Any, signals: DeferredSignals) -> None:
        self.codes: dict[int, int | None] = {}
        self.losses: dict[int, str] = {}
        self._cfg = cfg
        self._number = number
        self._group = group
        self._signals = signals
        self._actors: list[Any] = []
        self._waiting: dict[Any, int] = {}  # what an actor will answer -> its rank

    @property
    def has_ranks(self) -> bool:
        """Whether ranks are running."""
        return bool(self._waiting)

    def start(self, verb: str, records: Path) -> RankError | None:
        """Start actors and ranks; return Ray's error if it cannot.

        Args:
            verb: fit, validate, test or predict.
            records: an empty folder for the ranks' records; visible to all machines.
        """
        import ray

        self._start_actors()
        try:
            self._start_ranks(verb, records)
        except ray.exceptions.RayError as error:
            return RankError(f"Ray could not start the ranks\n\n{str(error).strip()}", 0, None)
        with self._signals.deferred():
            self._waiting = {actor.wait.remote(_WAIT_SECONDS): rank for rank, actor in enumerate(self._actors)}
        return None

    def collect(self, seconds: float, of_all: bool = False) -> bool:
        """Process the results that arrive within `seconds`, or are ready once one has arrived; return whether a rank
        failed.

        Args:
            seconds: to wait at most.
            of_all: wait for the results of all.
        """
        failed = False
        with self._signals.deferred():
            for answer in _ready(list(self._waiting), seconds, of_all):
                rank = self._waiting.pop(answer)
                code = self._answer(answer, rank)
                if rank in self.losses or code is not None:
                    self.codes[rank] = code
                    failed |= code != 0
                else:
                    self._waiting[self._actors[rank].wait.remote(_WAIT_SECONDS)] = rank
        return failed

    def end(self, number: signal.Signals, grace: float, meanwhile: Callable[[], None]) -> None:
        """End the ranks that live, and collect their exit codes.

        Args:
            number: of the signal.
            grace: seconds after it before they are killed.
            meanwhile: called regularly during the wait.
        """
        living = {rank: self._actors[rank] for rank in range(len(self._actors)) if rank not in self.codes}
        with self._signals.deferred():
            answers = {actor.end.remote(int(number), grace): rank for rank, actor in living.items()}
        while answers:
            with self._signals.deferred():
                for answer in _ready(list(answers), _POLL_SECONDS):
                    rank = answers.pop(answer)
                    self.codes[rank] = self._answer(answer, rank)
            meanwhile()
        self._waiting.clear()

    def kill(self) -> None:
        """Kill the actors, and with them ranks that still live."""
        import ray

        with self._signals.deferred():
            for actor in self._actors:
                with contextlib.suppress(Exception):  # it may be gone, or the cluster
                    ray.kill(actor)

    def _start_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = [entry for entry in sys.path if entry]
        run_dir = Path(self._cfg.run_dir).absolute()
        with self._signals.deferred():
            holder = ray.remote(RankHolder)
            for rank in range(self._cfg.devices * self._cfg.nodes):
                node = rank // self._cfg.devices
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
                made = holder.options(scheduling_strategy=place, **actor_options(self._cfg, rank))
                self._actors.append(made.remote(rank, os.getcwd(), path, str(log_file(run_dir, rank))))

    def _start_ranks(self, verb: str, records: Path) -> None:
        actors = self._actors
        places: list[Place] = self._results(lambda: [actor.place.remote() for actor in actors])
        [store] = self._results(lambda: [actors[0].open_store.remote(places[0].address)])
        threads = os.environ.get("OMP_NUM_THREADS")
        environments = [
            rank_variables(self._cfg, rank, places, store, self._number, threads) for rank in range(len(places))
        ]
        write_config_file(self._cfg, records)
        words = verb, str(records)
        self._results(
            lambda: [actor.start.remote(*words, each) for actor, each in zip(actors, environments, strict=True)]
        )

    def _results(self, ask: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of calls to actors, in order."""
        import ray

        with self._signals.deferred():
            answers = ask()
        while True:
            with self._signals.deferred():
                ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_POLL_SECONDS)
                if len(ready) == len(answers):
                    return list(ray.get(answers))

    def _answer(self, answer: Any, rank: int) -> int | None:
        """Return a rank's exit code from its actor's result; None = it lives, or is lost with its actor."""
        import ray

        try:
            code: int | None = ray.get(answer)
            return code
        except ray.exceptions.RayError as error:
            self.losses[rank] = str(error)
            return None


def _ready(answers: list[Any], seconds: float, of_all: bool = False) -> list[Any]:
    """Return the ready results once one is ready, or all; fewer after `seconds`."""
    import ray

    if not answers:
        return []
    ready, waiting = ray.wait(answers, num_returns=len(answers) if of_all else 1, timeout=seconds)
    if ready and waiting:
        # `wait` returns no more than requested, so that thousands of ranks with results every other second would be
        # processed one by one, each with a scan of all others.
        ready += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
    return list(ready)
