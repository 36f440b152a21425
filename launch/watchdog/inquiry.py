"""Questions to all ranks of a machine, without blocking."""

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainwright.core.processes.process import STOPPED, catches, children_of, name_of, state_of
from trainwright.core.run import phases
from trainwright.launch.watchdog.answers import SIGNAL, ask, read_answer, stacks_file, stacks_text
from trainwright.launch.watchdog.boxes import FIRST_DATA
from trainwright.launch.watchdog.evidence import DATA, Child, Evidence

# A healthy rank answers within milliseconds, on a fully loaded machine within a second.
ANSWER_SECONDS = 3.0
# Time for the interpreter's C handler to write.
_STACK_SECONDS = 0.5


class Inquiry:
    """One question to all ranks of a machine. It is sent on creation; :meth:`advance` polls for the answers.

    Args:
        folder: for questions and answers.
        number: of the question, unique in the run.
        ranks: evidence so far, by number of the box.
    """

    def __init__(self, folder: Path, number: int, ranks: dict[int, Evidence]) -> None:
        self._folder = folder
        self._question = f"{number}"
        self._ranks = dict(ranks)
        self._open = {box for box in ranks if ask(folder, box, self._question)}
        for box in ranks:
            self._ranks[box] = replace(ranks[box], asked=box in self._open)
        self._end = time.monotonic() + ANSWER_SECONDS
        # Box and process -> offset of its stacks in the file of the box, of the processes that were sent the signal.
        self._signals: dict[tuple[int, int], int] | None = None

    def advance(self) -> list[Evidence] | None:
        """Return all evidence ordered by box; ``None`` = answers are outstanding."""
        if self._signals is None:
            self._read()
            only_halted = all(state_of(self._ranks[box].progress.process) == STOPPED for box in self._open)
            if not only_halted and time.monotonic() < self._end:
                return None
            self._signals = self._send_signals()
            self._end = time.monotonic() + _STACK_SECONDS
        if self._signals and time.monotonic() < self._end:
            return None
        return [self._complete(box) for box in sorted(self._ranks)]

    def _read(self) -> None:
        for box in sorted(self._open):
            answer = read_answer(self._folder, box, self._question)
            if answer is not None:
                self._open.discard(box)
                self._ranks[box] = replace(self._ranks[box], answer=answer)

    def _send_signals(self) -> dict[tuple[int, int], int]:
        """Signal the interpreters of silent ranks, and the worker processes of ranks that wait for data."""
        found: dict[tuple[int, int], int] = {}
        for box, one in self._ranks.items():
            process = one.progress.process
            silent = one.answer is None and one.asked and one.progress.running
            self._ranks[box] = one = replace(one, state=state_of(process))
            asked = [process] if silent else []
            if self._waits_for_data(one):
                asked += children_of(process)
            for each in asked:
                if (begin := self._signal(box, each)) is not None:
                    found[box, each] = begin
        return found

    def _signal(self, box: int, process: int) -> int | None:
        # Without a handler the signal would kill it; a stopped process would get it when it continues.
        if SIGNAL is None or not catches(process, SIGNAL) or state_of(process) == STOPPED:
            return None
        path = stacks_file(self._folder, box)
        begin = path.stat().st_size if path.is_file() else 0
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, SIGNAL)
        # One after the other, so that their lines do not mix: a process writes within a millisecond, if it can.
        end = time.monotonic() + 0.05
        while time.monotonic() < end and path.is_file() and path.stat().st_size == begin:
            time.sleep(0.002)
        return begin

    def _complete(self, box: int) -> Evidence:
        one = self._ranks[box]
        children = tuple(
            Child(each, name_of(each), state_of(each), self._stacks_of(box, each))
            for each in (children_of(one.progress.process) if self._waits_for_data(one) else ())
        )
        return replace(one, stacks=self._stacks_of(box, one.progress.process), children=children)

    def _waits_for_data(self, one: Evidence) -> bool:
        return one.progress.phase in (phases.DATA, FIRST_DATA) or one.wait.kind == DATA

    def _stacks_of(self, box: int, process: int) -> str:
        """Return the stacks of one process from the file of its box, up to the start of the next one's."""
        signals = self._signals or {}
        if (box, process) not in signals:
            return ""
        begin = signals[box, process]
        later = [other for (of, _), other in signals.items() if of == box and other > begin]
        return stacks_text(self._folder, box, begin, min(later, default=None))
