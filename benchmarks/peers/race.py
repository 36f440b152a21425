"""Commands that train side by side, of which one computes at a time: each makes a piece, then waits for its turn."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.task import VARIABLE, Task
from benchmarks.peers.turns import SOCKET

PATIENCE = 180.0
"""Seconds after which a command that says nothing is taken to hang."""
_GRACE = 20.0
# torchrun repeats the errors of its ranks; the ranks' own messages come first.
_LAUNCHERS = ("ChildFailedError", "SignalException", "CalledProcessError", "ProcessExitedException")


@dataclass(frozen=True)
class Piece:
    """Cost of a few optimizer steps.

    Args:
        wall: seconds on the clock, of the slowest rank.
        cpu: CPU seconds of all ranks together.
        written: bytes that a rank gave to the kernel, mean of the ranks.
        peak: most bytes that a rank ever held so far.
        losses: of each step, mean over the ranks that have one.
        moment: when the last rank had ended, on the machine's monotonic clock.
    """

    wall: float
    cpu: float
    written: float
    peak: int
    losses: tuple[float, ...]
    moment: float

    @classmethod
    def of(cls, reports: Sequence[Mapping[str, Any]]) -> Piece:
        """Combine the reports of the ranks."""
        losses = [report["losses"] for report in reports if report["losses"]]
        return cls(
            wall=max(report["wall"] for report in reports),
            cpu=sum(report["cpu"] for report in reports),
            written=sum(report["written"] for report in reports) / len(reports),
            peak=max(report["peak"] for report in reports),
            losses=tuple(sum(step) / len(step) for step in zip(*losses, strict=True)),
            moment=max(report["moment"] for report in reports),
        )


class PeerError(Exception):
    """A peer did not train; says so in its own words."""


class Runner:
    """A command that has been started.

    Args:
        command: what is started.
        environment: added to this process's.
        ranks: processes that will train.
        task: what they train.
        folder: for what it prints and its socket; it is also its working directory.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], ranks: int, task: Task, folder: Path
    ) -> None:
        self.output = folder / "output.txt"
        self._ranks = ranks
        self._connections: list[socket.socket] = []
        self._unread: dict[socket.socket, bytes] = {}
        path = folder / "s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        self.started = time.monotonic()
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment, SOCKET: str(path), VARIABLE: task.write()},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def piece(self) -> Piece:
        """Wait for every rank to report its next piece.

        Raises:
            PeerError: if the command ended before, or said nothing for too long.
        """
        end = time.monotonic() + PATIENCE
        while len(self._connections) < self._ranks:
            self._wait_for([self._listener], end)
            connection, _ = self._listener.accept()
            self._connections.append(connection)
            self._unread[connection] = b""
        return Piece.of([self._line(connection, end) for connection in self._connections])

    def go(self) -> None:
        """It is this command's turn."""
        for connection in self._connections:
            connection.sendall(b".")

    def close(self, ended: bool) -> None:
        """Wait for its end if all its pieces have ``ended``, else terminate it."""
        for connection in self._connections:
            connection.close()
        self._listener.close()
        try:
            if ended:
                self._process.wait(_GRACE)
            else:
                self._signal(signal.SIGTERM)
                self._process.wait(_GRACE / 4)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)  # also what a launcher has left behind
            self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _line(self, connection: socket.socket, end: float) -> dict[str, Any]:
        while b"\n" not in self._unread[connection]:
            self._wait_for([connection], end)
            more = connection.recv(1 << 16)
            if not more:
                self._process.wait(_GRACE)
                raise PeerError(self._words())
            self._unread[connection] += more
        line, _, self._unread[connection] = self._unread[connection].partition(b"\n")
        report: dict[str, Any] = json.loads(line)
        return report

    def _wait_for(self, sockets: list[socket.socket], end: float) -> None:
        while not select.select(sockets, [], [], 0.5)[0]:
            if self._process.poll() is not None:
                raise PeerError(self._words())
            if time.monotonic() > end:
                raise PeerError(f"said nothing for {PATIENCE:.0f} s; its last words: {self._words()}")

    def _words(self) -> str:
        return last_error(self.output.read_text(errors="replace"))


def last_error(printed: str) -> str:
    """The error in what a command printed: the first one that is not its launcher's, else its last line.

    >>> last_error("Traceback:\\nValueError: no such thing\\n\\nroot.ChildFailedError: train.py FAILED")
    'ValueError: no such thing'
    """
    lines = [re.sub(r"^\s*(\[rank\d+\]:\s*)?", "", line).strip() for line in printed.splitlines()]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt): \S", line)]
    own = [line for line in errors if not any(name in line.partition(":")[0] for name in _LAUNCHERS)]
    said = [line for line in lines if line and not line.startswith("see https://")]
    words = [*own, *errors[-1:], *said[-1:], "it ended without a word"]
    return words[0]
