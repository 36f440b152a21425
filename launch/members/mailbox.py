"""Messages between the launching process and the members of a run: small files on this machine.

All are JSON in a folder that the launching process removes, besides a *board* in shared memory that calls the members
to leave. Reading it takes a microsecond, so members do at every step.
"""

import json
import mmap
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.core.failures.records import write_whole
from trainwright.core.text.bounded import parse_json
from trainwright.core.text.messages import LONGEST
from trainwright.core.text.plain import rebuilt

# Step that means: leave at once.
NOW = 0
_BOARD = "board"
_POLL_SECONDS = 0.01


def records_of(records: Path, generation: int | None) -> Path:
    """Return the folder of members' failure records of a generation; None = before they joined one."""
    return records / ("joining" if generation is None else f"generation_{generation}")


@dataclass(frozen=True)
class Announcement:
    """Description of a generation.

    Args:
        generation: its number.
        config: its resolved configuration, as yaml.
        members: number of each member, by rank.
        port: of the store of this generation, on the loopback interface.
        step: optimizer steps of the in-memory snapshot it continues from; None = from a checkpoint or the start, as the
            configuration says.
        sources: member without that snapshot -> member that sends it.
        pids: process of each member, by rank.
    """

    generation: int
    config: str
    members: tuple[int, ...]
    port: int
    step: int | None
    sources: dict[int, int]
    pids: tuple[int, ...]


@dataclass(frozen=True)
class LeaveReport:
    """Report of a member that has left a generation and waits for the next.

    Args:
        member: its number.
        steps: of its snapshots, newest first.
        error: that made it leave; None = it was called.
    """

    member: int
    steps: tuple[int, ...]
    error: str | None


class Board:
    """The call to leave, in memory shared by all processes of a run.

    Args:
        folder: of the mailbox.
        create: create it; done once, by the launching process.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        path = folder / _BOARD
        if create:
            path.write_bytes(array("q", [-1, 0]))
        with path.open("r+b") as file:
            self._call = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # generation and step

    def call(self, generation: int, step: int) -> None:
        """Call the members of ``generation`` to leave after ``step`` steps; :data:`NOW` = at once."""
        # The step first: a reader that sees the generation must see its step.
        self._call[1] = step
        self._call[0] = generation

    def called(self, generation: int) -> int | None:
        """Return the step after which the members of ``generation`` must leave; None = there is no call."""
        return self._call[1] if self._call[0] == generation else None


class Mailbox:
    """Messages of one run.

    Args:
        folder: on this machine; exists.
        create: whether this is the launching process, which opens it first.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self._folder = folder
        self.board = Board(folder, create)

    def announce(self, announcement: Announcement) -> None:
        """Publish the next generation."""
        self._write(f"generation_{announcement.generation}", asdict(announcement))

    def announcement(self, generation: int) -> Announcement | None:
        """Return the announcement of a generation; None = not announced."""
        found: Announcement | None = rebuilt(Announcement, self._read(f"generation_{generation}"))
        return found

    def wait_for_generation(self, member: int, generation: int) -> Announcement:
        """Wait, without limit, for a generation after ``generation`` that includes ``member``."""
        found: Announcement = waited(lambda: self._latest_with(member, generation), None)
        return found

    def _latest_with(self, member: int, generation: int) -> Announcement | None:
        numbers = [int(path.stem.split("_")[1]) for path in self._folder.glob("generation_*.message")]
        found = self.announcement(max(numbers)) if max(numbers, default=-1) > generation else None
        return found if found is not None and member in found.members else None

    def report_ready(self, member: int) -> None:
        """Report that a new member waits to join."""
        self._write(f"ready_{member}", {})

    def is_ready(self, member: int) -> bool:
        """Return whether a new member waits to join."""
        return self._path(f"ready_{member}").exists()

    def report_leave(self, generation: int, report: LeaveReport) -> None:
        """Report that a member has left a generation."""
        self._write(f"left_{generation}_{report.member}", asdict(report))

    def reports(self, generation: int, members: Sequence[int]) -> list[LeaveReport]:
        """Return the reports of those ``members`` that have left a generation."""
        found = (self._read(f"left_{generation}_{member}") for member in members)
        return [rebuilt(LeaveReport, plain) for plain in found if plain is not None]

    def _write(self, name: str, plain: dict[str, Any]) -> None:
        write_whole(self._path(name), json.dumps(plain))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with self._path(name).open("rb") as file:
                plain: dict[str, Any] = parse_json(file.read(LONGEST + 1), LONGEST)
        except FileNotFoundError:
            return None
        return plain

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.message"


def waited(find: Callable[[], Any], seconds: float | None) -> Any:
    """Poll ``find`` until it returns a value, and return it; None after ``seconds``."""
    end = None if seconds is None else time.monotonic() + seconds
    while (found := find()) is None:
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(_POLL_SECONDS)
    return found
