"""The actors of Ray that hold the ranks of an attempt: started, heard, ended."""

from __future__ import annotations

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
from trainwright.launch.engines.ray.places import Place, actor_options, environment_of
from trainwright.launch.ranks.forkserver import start_forkserver, stop_forkserver
from trainwright.launch.ranks.output import Output
from trainwright.launch.ranks.supervisor import Ended, Supervisor


class RankHolder:
    """Holds one rank.

    Args:
        rank: global rank.
        directory: to work in, where it is there: that of the command.
        path: where modules are looked for besides.
        log: file that the rank prints into.
    """

    def __init__(self, rank: int, directory: str, path: list[str], log: str) -> None:
        self._rank = rank
        if Path(directory).is_dir():
            os.chdir(directory)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Output().to(Path(log))
        start_forkserver()  # its imports go on while the others are placed
        self._supervisor: Supervisor | None = None
        self._code: int | None = None
        self._store: object = None

    def place(self) -> Place:
        """Where it is."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpus)))

    def open_store(self, address: str) -> tuple[str, int]:
        """Open the store in which the ranks meet, for as long as this actor lives; returns address and port.

        Args:
            address: of this machine.
        """
        from trainwright.launch.ranks.rendezvous import LocalStore

        store = LocalStore(address=address)
        self._store = store
        return store.address, store.port

    def start(self, verb: str, records: str, environment: Mapping[str, str]) -> int:
        """Start the rank; returns its process id.

        Args:
            verb: fit, validate, test or predict.
            records: folder with the configuration of this attempt, and for what the rank writes down; all machines see
                it.
            environment: its variables besides those of this process.
        """
        from trainwright.launch.rank import rank_main

        self._supervisor = Supervisor(rank_main, (verb, Path(records), Path(records)))
        self._supervisor.start_rank(self._rank, {**os.environ, **environment})
        return self._supervisor.pid(self._rank)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the rank; its exit code, None while it lives.

        Args:
            seconds: to wait at most.
        """
        if self._supervisor is not None and self._code is None:
            self._keep(self._supervisor.wait(seconds))
        return self._code

    def end(self, number: int, grace: float | None) -> int | None:
        """End the rank; its exit code, None where it has none.

        Args:
            number: of the signal.
            grace: seconds that it has after the signal, then it is killed; None = as long as it takes.
        """
        if self._supervisor is not None and self._code is None:
            seconds = 7 * 86400.0 if grace is None else grace
            self._keep(self._supervisor.end((self._rank,), seconds, signal.Signals(number)))
        return self._code

    def _keep(self, ended: list[Ended]) -> None:
        for each in ended:
            self._code = each.exit_code
            # Ray kills this process, which then cannot do so at its exit.
            stop_forkserver()
            shutil.rmtree(scratch(), ignore_errors=True)


# Seconds that an actor waits for its rank before it can be told something else.
_WAIT_SECONDS = 2.0
# Longest wait for Ray at a time, in seconds: a signal is heard between two.
_LOOK_SECONDS = 1.0


class RankActors:
    """An actor for each rank of an attempt.

    Args:
        cfg: the resolved configuration of this attempt.
        number: attempts before this one.
        group: Ray's placement group.
        signals: held while Ray is asked.

    Attributes:
        codes: exit codes of the ranks that have ended, by rank; None: with their actors.
        losses: what Ray says of actors that are gone, by rank.
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
        """Whether a rank is waited for."""
        return bool(self._waiting)

    def start(self, verb: str, records: Path) -> RankError | None:
        """Start actors and ranks; what Ray says where it cannot.

        Args:
            verb: fit, validate, test or predict.
            records: an empty folder for what the ranks write down; all machines see it.
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

    def hear(self, seconds: float, of_all: bool = False) -> bool:
        """Take the answers that come within that time, or that there are once one has come; whether a rank has failed.

        Args:
            seconds: to wait at most.
            of_all: wait for the answers of all.
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
        """End the ranks that live, and learn how they ended.

        Args:
            number: of the signal.
            grace: seconds that they have after it; then they are killed.
            meanwhile: called every so often.
        """
        living = {rank: self._actors[rank] for rank in range(len(self._actors)) if rank not in self.codes}
        with self._signals.deferred():
            answers = {actor.end.remote(int(number), grace): rank for rank, actor in living.items()}
        while answers:
            with self._signals.deferred():
                for answer in _ready(list(answers), _LOOK_SECONDS):
                    rank = answers.pop(answer)
                    self.codes[rank] = self._answer(answer, rank)
            meanwhile()
        self._waiting.clear()

    def kill(self) -> None:
        """End the actors: ranks that still live end with them."""
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
        places: list[Place] = self._asked(lambda: [actor.place.remote() for actor in actors])
        [store] = self._asked(lambda: [actors[0].open_store.remote(places[0].address)])
        threads = os.environ.get("OMP_NUM_THREADS")
        told = [environment_of(self._cfg, rank, places, store, self._number, threads) for rank in range(len(places))]
        write_config_file(self._cfg, records)
        words = verb, str(records)
        self._asked(lambda: [actor.start.remote(*words, each) for actor, each in zip(actors, told, strict=True)])

    def _asked(self, ask: Callable[[], list[Any]]) -> list[Any]:
        """What actors answer who are asked, in order."""
        import ray

        with self._signals.deferred():
            answers = ask()
        while True:
            with self._signals.deferred():
                ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_LOOK_SECONDS)
                if len(ready) == len(answers):
                    return list(ray.get(answers))

    def _answer(self, answer: Any, rank: int) -> int | None:
        """The exit code of a rank, if that is what its actor says; None: it lives, or is lost with its actor."""
        import ray

        try:
            code: int | None = ray.get(answer)
            return code
        except ray.exceptions.RayError as error:
            self.losses[rank] = str(error)
            return None


def _ready(answers: list[Any], seconds: float, of_all: bool = False) -> list[Any]:
    """Those answers that are there once one of them is, or all; fewer when the time is over."""
    import ray

    if not answers:
        return []
    ready, waiting = ray.wait(answers, num_returns=len(answers) if of_all else 1, timeout=seconds)
    if ready and waiting:
        # `wait` gives no more than it was asked for: thousands of ranks, which answer every other second, would be
        # heard one by one, each with a look at all others.
        ready += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
    return list(ready)
