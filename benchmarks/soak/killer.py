"""Kills of a run's processes from within, at planned instants, and reports of the checkpoints that it saved.

Python reports each change of the disk, and each file that is opened, just before it happens (``sys.addaudithook``).
That is where the instants are: nothing of the run is exchanged for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from trainwright.command.cli import main
from trainwright.core.processes.process import PARENT, children_of, stat_of

SAVE, DELETION, RECOVERY, STEP = "save", "deletion", "recovery", "step"
COMMAND = -1
"""In the place of a rank: the process that launches them."""
EVERY = -2
"""In the place of a rank: all of them."""
PLAN, REPORTS = "plan.json", "reports.jsonl"
_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open", "ctypes.dlsym"})
# A command's first one is to its fork server, which it asks for the first rank.
_CONNECTS = "socket.connect"


@dataclass(frozen=True)
class Kill:
    """One ``kill -9``.

    Args:
        phase: what is to be going on: a save, a deletion or a recovery.
        rank: in which process the instant is looked for, a rank or :data:`COMMAND`.
        number: so many changes of the disk (in a recovery: files opened too) of that phase come before it.
        delay: seconds after that instant.
        victim: a rank, :data:`EVERY` or :data:`COMMAND`.
    """

    phase: str
    rank: int
    number: int
    delay: float
    victim: int


class Instants:
    """Counts the changes of the disk of each phase in this process, and acts at one of them; an audit hook.

    Args:
        run_dir: as it is in all paths of its files, and in no others.
        kill: at which to act; ``None``: never.
        act: called with the phase.
    """

    def __init__(self, run_dir: str, kill: Kill | None, act: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """Changes so far, by phase."""
        self.phase = RECOVERY
        """Of the last change; steps have none."""
        self.recovers = True
        """Whether the run is still starting or resuming."""
        self._run_dir = run_dir
        self._kill = kill
        self._act = act
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._deleting = threading.local()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Hear of an event before it happens."""
        if event not in _CHANGES or os.getpid() != self._process:
            return
        phase = self._phase_of(event, [_text(each) for each in arguments])
        if phase is None:
            return
        with self._lock:
            number = self.counts[phase]
            self.counts[phase] += 1
            self.phase = phase
        kill = self._kill
        if kill is None or (phase, number) != (kill.phase, kill.number):
            return
        if kill.delay:
            threading.Thread(target=self._act_later, args=(kill.delay,), daemon=True).start()
        else:
            self._act(phase)

    def end_recovery_at_connection(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Hear of an event in the process of a command: from the start of its ranks on, training is theirs."""
        if event == _CONNECTS and os.getpid() == self._process:
            self.recovers = False

    def _act_later(self, seconds: float) -> None:
        time.sleep(seconds)
        self._act(self.phase)

    def _phase_of(self, event: str, texts: list[str]) -> str | None:
        if self.recovers:
            return RECOVERY if any(self._run_dir in text for text in texts[:2]) else None
        if event == "os.rename" and ".removed-" in texts[1] and os.path.lexists(texts[0]):
            self._deleting.now = True
        elif not getattr(self._deleting, "now", False):
            return SAVE if ".partial-" in texts[0] or texts[1:2] == ["renameat2"] else None
        if event == "os.rmdir":  # what it is made of is gone
            self._deleting.now = False
        return DELETION


def _text(argument: Any) -> str:
    return os.fsdecode(argument) if isinstance(argument, str | bytes | os.PathLike) else ""


class Reporter:
    """Appends lines to a file that outlives this process.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / REPORTS, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def report(self, **what: Any) -> None:
        """One line; whole or not at all."""
        os.write(self._file, (json.dumps(what) + "\n").encode())


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports written to the folder so far, in order."""
    return [json.loads(line) for line in (folder / REPORTS).read_text(encoding="utf-8").splitlines()]


def planned(folder: Path, attempt: int, rank: int) -> Kill | None:
    """The kill that a process of an attempt shall do."""
    plan: list[Mapping[str, Any]] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    kill = Kill(**plan[attempt]) if attempt < len(plan) else None
    return kill if kill is not None and kill.rank == rank else None


def run_watched(words: Sequence[str], folder: Path, run_dir: str) -> int:
    """Run a command in this process, kill it as planned, and return its exit code.

    Args:
        words: behind ``trainwright``.
        folder: of the plan and the reports.
        run_dir: of the run, see :class:`Instants`.
    """
    reporter = Reporter(folder)

    def strike(phase: str) -> None:
        reporter.report(kill=phase)
        os.kill(os.getpid(), signal.SIGKILL)

    instants = Instants(run_dir, planned(folder, 0, COMMAND), strike)
    sys.addaudithook(instants)
    sys.addaudithook(instants.end_recovery_at_connection)
    code = main(words)
    reporter.report(rank=COMMAND, counts=instants.counts)
    return code


class Killer(pl.Callback):
    """Callback that kills as planned and reports where training begins and which checkpoints are committed.

    Args:
        folder: of the plan and the reports.
        run_dir: of the run, see :class:`Instants`.
    """

    def __init__(self, folder: str, run_dir: str) -> None:
        self._reporter = Reporter(Path(folder))
        self._run_dir = run_dir
        self._rank = int(os.environ["RANK"])
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._kill = planned(Path(folder), self._attempt, self._rank)
        self._instants = Instants(run_dir, self._kill, self._strike)
        self._saved = 0
        sys.addaudithook(self._instants)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report where training starts and unfinished files among the checkpoints."""
        if self._rank == 0:
            hidden = [path.name for path in Path(self._run_dir, "checkpoints").glob(".*")]
            self._reporter.report(attempt=self._attempt, started=trainer.global_step, hidden=hidden)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report what was saved since."""
        self._instants.recovers = False
        callback: Any = trainer.checkpoint_callback
        if callback._saver.in_flight is None:
            self._instants.phase = STEP
        self._report_saved(callback)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last save and the number of instants."""
        self._report_saved(trainer.checkpoint_callback)
        self._reporter.report(rank=self._rank, counts=self._instants.counts)

    def _report_saved(self, callback: Any) -> None:
        last = callback._records.last
        if self._rank == 0 and last is not None and last.step > self._saved:
            self._saved = last.step
            self._reporter.report(saved=last.step)

    def _strike(self, phase: str) -> None:
        """Kill whom the plan says; this process last."""
        kill, server = self._kill, os.getppid()
        assert kill is not None
        others = [process for process in children_of(server) if process != os.getpid()]
        own = [os.getpid()]
        command = int(stat_of(server)[PARENT])
        victims = {COMMAND: [command], EVERY: [*others, *own], self._rank: own}.get(kill.victim, others)
        if victims:
            self._reporter.report(kill=phase)
        for process in victims:
            os.kill(process, signal.SIGKILL)
