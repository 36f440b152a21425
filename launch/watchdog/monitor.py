"""Monitor of the ranks of one machine, by their progress rather than their liveness."""

import itertools
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.core.processes.process import RUNNING, SLEEPING, STOPPED, is_alive, state_of, stop_id
from trainwright.launch.watchdog.answers import FAILED, read_answer, stacks_text
from trainwright.launch.watchdog.boxes import SETUP, Boxes, HangLimits, Progress
from trainwright.launch.watchdog.evidence import Evidence
from trainwright.launch.watchdog.inquiry import Inquiry
from trainwright.launch.watchdog.report.report import first_lines, report_of
from trainwright.launch.watchdog.report.stacks import crash_in, place_of
from trainwright.launch.watchdog.report.verdict import HangVerdict, differing_calls, judge, last_call

# Variable with a rank's box and folder.
VARIABLE = "TRAINWRIGHT_WATCHDOG"
# Upper bound of the time counted between two checks, so that a suspended machine or job is no hang.
_LONGEST_LOOK = 2.0
# A process stopped for this long while others run was stopped alone: suspending or continuing a job signals one rank
# after the other, within much less time.
_STOPPED_SECONDS = 1.0
# Upper bound of the time counted between two checks, so that at least three checks have seen the stop, and a monitor
# that was suspended briefly, and continued before its ranks, checks once more.
_LONGEST_STOPPED_LOOK = 0.5
_NOTHING = Progress(process=0, rank=-1, running=False, phase=SETUP, step=0, micro_batches=0, changes=0, longest={})


@dataclass(frozen=True)
class DiagnosedHang:
    """A rank that blocks the others.

    Attributes:
        rank: to kill, by the number that the monitor knows it by.
        reason: in one line, equal for repetitions of the same hang.
        report: for a terminal: which rank blocks which others in what, a line per rank, and the path of the full
            report.
    """

    rank: int
    reason: str
    report: str


class Watched:
    """A process that is watched.

    Args:
        number: by which the monitor knows it.
        box: number of its box.

    Attributes:
        process: its id; 0 = not started yet.
        progress: its box.
        state: in the kernel, of a process within a run.
        stalled: seconds since the box changed.
        stop: identifies its present stop; ``None`` = none that counts.
    """

    def __init__(self, number: int, box: int) -> None:
        self.number = number
        self.box = box
        self.process = 0
        self.progress = _NOTHING
        self.state = ""
        self.stalled = 0.0
        self.stop: int | None = None
        self._stopped = 0.0

    @property
    def runs(self) -> bool:
        """Whether it is alive and within a run."""
        return self.progress.running and is_alive(self.progress.process, self.state)

    @property
    def stopped_alone(self) -> bool:
        """Whether a signal has stopped it, but not the others, for longer than a job takes to be suspended."""
        return self._stopped >= _STOPPED_SECONDS

    def look(self, progress: Progress) -> bool:
        """Update from the box; return whether it has changed."""
        if self.process and progress.process != self.process:
            progress = _NOTHING  # the box of the previous process
        changed = (progress.process, progress.changes) != (self.progress.process, self.progress.changes)
        if changed:
            self.stalled, self.stop = 0.0, None
        self.progress = progress
        self.state = state_of(progress.process) if progress.running else ""
        return changed

    def count_stop(self, passed: float | None) -> None:
        """Add to the time it has been stopped.

        Args:
            passed: seconds since the last check; ``None`` = restart the timing.
        """
        stop = stop_id(self.progress.process) if passed is not None and self.state == STOPPED else None
        same = stop is not None and stop == self.stop
        self._stopped = self._stopped + min(passed or 0.0, _LONGEST_STOPPED_LOOK) if same else 0.0
        self.stop = stop


def all_stopped(running: Sequence[Watched]) -> bool:
    """Return whether a signal has stopped all of several processes, like Ctrl-Z or a scheduler that suspends a job."""
    return len(running) > 1 and all(one.state == STOPPED for one in running)


def any_runs(running: Sequence[Watched]) -> bool:
    """Return whether any process is certainly not stopped; one that waits in the kernel may stop when it returns."""
    return any(one.state in (RUNNING, SLEEPING) for one in running)


class HangMonitor:
    """Detector of hangs among the ranks of this machine.

    Each rank records its current phase and its start in a box (:mod:`trainwright.launch.watchdog.boxes`). A rank that
    exceeds the limit of its phase raises a suspicion, and so does one that a signal has stopped while others of the
    machine run; then all ranks are asked what they are doing, and ``verdict`` determines the one at fault. Nothing here
    blocks: a question is sent in one call of :meth:`check`, and its answers are read in later ones.

    Processes are identified by numbers, which may be ranks or any other unique numbers.

    Args:
        count: processes that may live at the same time.
        folder: on this machine, private to this process and its ranks; removed by its creator.
        run_dir: reports are written to its ``logs/``.
        limits: time limits of phases.
        node: number of this machine; ``None`` = there is only one, and reports do not name it.
    """

    def __init__(
        self, count: int, folder: Path, run_dir: Path, limits: HangLimits | None = None, node: int | None = None
    ) -> None:
        self._limits = limits or HangLimits()
        self._folder, self._run_dir, self._node = folder, run_dir, node
        self._count = count
        self._boxes = Boxes(count, folder)
        self._watched: dict[int, Watched] = {}
        self._checked_at: float | None = None
        self._questions = 0
        self._inquiry: Inquiry | None = None
        self._next_inquiry_at = 0.0
        self._suspects: frozenset[int] = frozenset()
        self._known_stops: frozenset[tuple[int, int | None]] = frozenset()

    def environment(self, number: int) -> dict[str, str]:
        """Return the variables of a process to be watched; they name its box, which is cleared.

        Raises:
            RuntimeError: if more processes live than there are boxes.
        """
        box = self._watched[number].box if number in self._watched else self._free_box()
        self._watched[number] = Watched(number, box)
        place = {"boxes": self._boxes.address, "box": box, "folder": str(self._folder)}
        return {VARIABLE: json.dumps(place)}

    def _free_box(self) -> int:
        taken = {one.box for one in self._watched.values()}
        free = next((box for box in range(self._count) if box not in taken), None)
        if free is not None:
            return free
        gone = next((one for one in self._watched.values() if one.process and not is_alive(one.process)), None)
        if gone is None:
            raise RuntimeError(f"there are boxes for {self._count} processes, and all of them live")
        del self._watched[gone.number]
        return gone.box

    def watch(self, number: int, process: int) -> None:
        """Register a process that was started as ``number``, with its :meth:`environment`."""
        self._watched[number].process = process
        self._reset()

    def process_of(self, number: int) -> int:
        """Return the process id of a number; 0 = not reported yet."""
        one = self._watched[number]
        return one.process or one.progress.process

    def check(self) -> DiagnosedHang | None:
        """Return the process to kill, if any. To be called about twice a second; never blocks."""
        now = time.monotonic()
        passed = 0.0 if self._checked_at is None else min(now - self._checked_at, _LONGEST_LOOK)
        self._checked_at = now
        same = [one for one in self._watched.values() if not one.look(self._boxes.read(one.box))]
        running = self._running()
        # After the monitor itself was suspended, stops are timed anew.
        counts = passed < _LONGEST_LOOK and any_runs(running)
        for one in running:
            one.count_stop(passed if counts else None)
        if all_stopped(running):
            self._inquiry = None
            return None
        for one in same:
            one.stalled += passed
        if self._inquiry is not None:
            return self._advance_inquiry()
        if self._is_suspicious(running, now):
            self._questions += 1
            self._inquiry = Inquiry(self._folder, self._questions, self._known())
        return None

    def explain(self) -> str | None:
        """Return a comparison of the calls of ranks that failed or crashed; None if it shows nothing.

        All processes may be gone: each rank has recorded its state at the error, and Python's fault handler its stacks
        when native code ended it, as gloo does where a rank receives more than it asked for.
        """
        slow = self._limits.slow_limit()
        failed, crashed, crashes = [], [], []
        for one in self._watched.values():
            progress = self._boxes.read(one.box)
            answer = read_answer(self._folder, one.box, FAILED)
            if answer is not None:
                failed.append(Evidence(progress, 0.0, slow, slow, answer))
            crash = crash_in(stacks_text(self._folder, one.box))
            if crash is not None:
                crashed.append(f"rank {progress.rank} crashed in compiled code: {place_of(crash)}")
                crashes.append(f"---- rank {progress.rank}\n{crash}")
        differing = differing_calls(failed)
        if differing is not None:
            return f"calls that do not fit together: {differing}"
        if not crashed:
            return None
        path = _written(self._run_dir / "logs", "crash", self._node, "\n".join(crashes))
        stacks = "" if path is None else f"; the stacks: {path}"
        return "; ".join(filter(None, [*crashed, *map(last_call, failed)])) + stacks

    def close(self) -> None:
        """Release the boxes."""
        self._boxes.close()

    def _running(self) -> list[Watched]:
        return [one for one in self._watched.values() if one.runs]

    def _is_suspicious(self, running: Sequence[Watched], now: float) -> bool:
        """Return whether a rank is stopped alone, or exceeds its limit, and was not asked about recently."""
        stops = frozenset((one.progress.process, one.stop) for one in running if one.stopped_alone)
        if now >= self._next_inquiry_at:
            found = bool(stops) or any(one.stalled > self._limit(one.progress) for one in running)
        else:
            # The pause is for ranks that had a reason; a later stop was not covered.
            found = bool(stops - self._known_stops)
            if found:
                self._suspects = frozenset()  # too recent to count as seen before
        if found:
            self._known_stops = stops
        return found

    def _is_halted(self, one: Watched) -> bool:
        """Return whether a stop lasts too long; for a single running process, its own limit applies."""
        return one.stopped_alone or (len(self._running()) == 1 and one.stalled > self._limit(one.progress))

    def _known(self) -> dict[int, Evidence]:
        """Return the evidence in the boxes of all ranks that have started, by box."""
        slow = self._limits.slow_limit()
        running = self._running()
        # A rank of a process that left may belong to another one now.
        taken = {one.progress.rank for one in running}
        ended = [
            one
            for one in self._watched.values()
            if one.progress.process and not one.progress.running and one.progress.rank not in taken
        ]
        return {
            one.box: Evidence(one.progress, one.stalled, self._limit(one.progress), slow) for one in (*running, *ended)
        }

    def _limit(self, progress: Progress) -> float:
        return self._limits.limit(progress.phase, [one.progress for one in self._watched.values()])

    def _advance_inquiry(self) -> DiagnosedHang | None:
        assert self._inquiry is not None
        found = self._inquiry.advance()
        if found is None:
            return None
        self._inquiry = None
        ranks = [one for one in map(self._current, found) if one is not None]
        suspects = frozenset(one.rank for one in ranks if one.exceeds_limit)
        verdict = judge(ranks, seen_before=bool(suspects) and suspects == self._suspects)
        self._suspects = suspects
        self._next_inquiry_at = time.monotonic() + self._limits.pause()
        return None if verdict is None else self._report_hang(verdict, ranks)

    def _current(self, one: Evidence) -> Evidence | None:
        """Return the evidence with current times, or None if the rank is gone."""
        now = next((each for each in self._watched.values() if each.progress.process == one.progress.process), None)
        if now is None or not is_alive(one.progress.process):
            return None
        stalled = now.stalled if now.progress.changes == one.progress.changes else 0.0
        return replace(one, stalled=stalled, halted=self._is_halted(now))

    def _report_hang(self, verdict: HangVerdict, ranks: Sequence[Evidence]) -> DiagnosedHang:
        report = report_of(verdict, ranks)
        path = _written(self._run_dir / "logs", "hang", self._node, report)
        where = "" if path is None else f"\n\nThe whole report, with the stacks of every rank: {path}"
        process = next(one.progress.process for one in ranks if one.rank == verdict.ends)
        number = next(one.number for one in self._watched.values() if one.progress.process == process)
        self._reset()
        return DiagnosedHang(number, verdict.reason, first_lines(report) + where)

    def _reset(self) -> None:
        self._inquiry, self._suspects, self._next_inquiry_at = None, frozenset(), 0.0
        self._known_stops = frozenset()


def _written(folder: Path, kind: str, node: int | None, report: str) -> Path | None:
    """Write a report under the next free name; return None where that is impossible."""
    suffix = "" if node is None else f"_node_{node}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = folder / f"{kind}_{number}{suffix}.txt"
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(report)
                return path
    return None
