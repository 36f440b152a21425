"""Supervision of one process per rank on this machine: start, wait, end."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from trainwright.core.failures.failure import FoundHang
from trainwright.core.processes.process import kill_with_workers
from trainwright.launch.ranks.forkserver import hidden_main, start_forkserver
from trainwright.launch.watchdog.monitor import HangMonitor

# Seconds between two checks of the monitor.
_MONITOR_INTERVAL = 0.5
# A process inside the kernel (an unresponsive driver) survives SIGKILL; the launching process then continues.
_SECONDS_TO_DIE = 30.0
# Exit code of multiprocessing for children of a killed fork server: their real state is unknown.
_SERVER_KILLED = 255


@dataclass(frozen=True)
class RankExit:
    """Exit of one rank's process.

    Attributes:
        rank: global rank.
        exit_code: of the process; negative = minus the number of the signal that killed it.
        asked: whether it was asked to exit, so that its exit code means nothing.
        hang: the monitor's reason for killing it; None = the monitor did not.
    """

    rank: int
    exit_code: int
    asked: bool = False
    hang: FoundHang | None = None

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return self.exit_code != 0 and not self.asked


class Supervisor:
    """The processes of the ranks of this machine.

    Every rank is a process of its own and may exit, be ended or be restarted while the others live; decisions about
    failures are made elsewhere. Exits are noticed at once, through the kernel, without polling. If the launching
    process is killed, the kernel kills the fork server and then the ranks (`trainwright.core.processes.orphans`); where
    it cannot, ranks watch that process themselves (`trainwright.core.processes.watch`).

    As a context manager it kills processes that still live at its end.

    Args:
        entry: module-level function that a rank runs; called with a rank's environment, then `arguments`.
        arguments: the same for every rank; pickled.
        monitor: checked for hangs during :meth:`wait`; None = off.
    """

    def __init__(
        self, entry: Callable[..., None], arguments: tuple[Any, ...] = (), monitor: HangMonitor | None = None
    ) -> None:
        self._entry = entry
        self._arguments = arguments
        self._monitor = monitor
        self._processes: dict[int, BaseProcess] = {}
        self._asked: set[int] = set()
        self._hangs: dict[int, FoundHang] = {}
        self._context = multiprocessing.get_context("forkserver")

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self.living, grace=0.0)

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks whose exit has not been returned by :meth:`wait` or :meth:`end` yet."""
        return tuple(sorted(self._processes))

    def pid(self, rank: int) -> int:
        """Return the process id of a living rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def start_rank(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start the process of a rank, and the fork server if needed.

        Args:
            rank: global rank.
            environment: variables of the process, see `trainwright.launch.ranks.rendezvous`.

        Raises:
            ValueError: if the rank lives.
        """
        if rank in self._processes:
            raise ValueError(f"rank {rank} lives as process {self.pid(rank)}; end it first")
        start_forkserver()
        watched = {} if self._monitor is None else self._monitor.environment(rank)
        process = self._context.Process(target=self._entry, args=({**environment, **watched}, *self._arguments))
        self._processes[rank] = process
        try:
            with hidden_main():
                process.start()
        except BaseException:
            # Interrupted before the fork server answered: the process, if there is one, exits with its parent.
            if process.pid is None:
                del self._processes[rank]
            raise
        if self._monitor is not None:
            self._monitor.watch(rank, self.pid(rank))

    def end(self, ranks: tuple[int, ...], grace: float, number: signal.Signals = signal.SIGTERM) -> list[RankExit]:
        """End some ranks together; the others continue.

        Args:
            ranks: living ranks.
            grace: seconds to exit after the signal before they are killed; 0 = killed at once.
            number: the signal.
        """
        self._asked.update(ranks)
        ended: list[RankExit] = []
        if grace > 0:
            for rank in ranks:
                self._send(rank, number)
            ended += self._wait_for(ranks, grace)
        remaining = tuple(rank for rank in ranks if rank in self._processes)
        for rank in remaining:
            self._send(rank, signal.SIGKILL)
        ended += self._wait_for(remaining, _SECONDS_TO_DIE)
        return sorted(ended, key=lambda each: each.rank)

    def wait(self, timeout: float | None = None) -> list[RankExit]:
        """Wait until a rank exits.

        Args:
            timeout: longest wait in seconds; None = no limit.

        Returns:
            The ranks that have exited since the last call; empty on timeout or if none lives.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._processes:
            rest = None if end is None else max(0.0, end - time.monotonic())
            pauses = [rest, None if self._monitor is None else _MONITOR_INTERVAL]
            ended = self._wait_any(self.living, min((each for each in pauses if each is not None), default=None))
            if ended or rest == 0.0:
                return ended
            hang = None if self._monitor is None else self._monitor.check()
            if hang is not None and hang.rank in self._processes and hang.rank not in self._hangs:
                self._hangs[hang.rank] = hang
                self._send(hang.rank, signal.SIGKILL)
        return []

    def _wait_for(self, ranks: tuple[int, ...], seconds: float) -> list[RankExit]:
        """Wait at most `seconds` until all of these have exited."""
        end = time.monotonic() + seconds
        ended: list[RankExit] = []
        while remaining := tuple(rank for rank in ranks if rank in self._processes):
            rest = end - time.monotonic()
            if rest <= 0:
                break
            ended += self._wait_any(remaining, rest)
        return ended

    def _wait_any(self, ranks: tuple[int, ...], seconds: float | None) -> list[RankExit]:
        """Wait at most `seconds` until one of these has exited, and remove those that have."""
        sentinels = {self._processes[rank].sentinel: rank for rank in ranks}
        ready = connection.wait(list(sentinels), seconds)
        return [self._reap(sentinels[sentinel]) for sentinel in sentinels if sentinel in ready]

    def _reap(self, rank: int) -> RankExit:
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        assert code is not None
        if code == _SERVER_KILLED:
            self._send(rank, signal.SIGKILL)  # it may still live
        del self._processes[rank]
        process.close()
        asked = rank in self._asked
        self._asked.discard(rank)
        return RankExit(rank, code, asked, self._hangs.pop(rank, None))

    def _send(self, rank: int, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            kill_with_workers(self.pid(rank))
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)
