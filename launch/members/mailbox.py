"""How the launching process and the members of a run whose replicas come and go talk: small files of this machine.

Everything is JSON in a folder that the launching process removes, and a *board* in shared memory that says whether the
members are called to leave. Reading it takes a microsecond, so members look at it at every step.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.core.failures.records import write_whole
from trainwright.core.text.bounded import parse_json
from trainwright.core.text.messages import LONGEST
from trainwright.core.text.plain import rebuilt

# Step at which members leave that are called to leave at once, wherever they are.
NOW = 0
_BOARD = "board"
_CALL = struct.Struct("qq")  # generation, step
_NUMBER = struct.Struct("q")
_POLL_SECONDS = 0.01


def records_of(records: Path, generation: int | None) -> Path:
    """Where members write down their failures in a generation; ``None``: before they are taken in."""
    return records / ("joining" if generation is None else f"generation_{generation}")


@dataclass(frozen=True)
class Announcement:
    """What a generation is.

    Args:
        generation: its number.
        config: the resolved configuration of the run in it, as yaml.
        members: number of each member, by rank.
        port: where the store of this generation listens, on the loopback interface.
        step: optimizer steps done in the state from which it goes on, which is in the memory of members; ``None``:
            from a checkpoint, or from the beginning, as the configuration says.
        sources: member that has no such state -> member that gives it one.
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
class Left:
    """What a member says when it has left a generation and waits for the next.

    Args:
        member: its number.
        steps: of the states in its memory, newest first.
        error: what made it leave; ``None``: it was called.
    """

    member: int
    steps: tuple[int, ...]
    error: str | None


class Board:
    """The call to leave, which all processes of this run see.

    Args:
        folder: of the mailbox.
        create: make it; the launching process does, once.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        path = folder / _BOARD
        if create:
            path.write_bytes(_CALL.pack(-1, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CALL.size)

    def call(self, generation: int, step: int) -> None:
        """Call the members of ``generation`` to leave when they have done ``step`` steps; :data:`NOW`: at once."""
        # The step first: whoever reads the generation must find the step that belongs to it.
        self._memory[8:16] = _NUMBER.pack(step)
        self._memory[0:8] = _NUMBER.pack(generation)

    def called(self, generation: int) -> int | None:
        """After which step the members of ``generation`` are to leave; ``None``: not at all."""
        of, step = _CALL.unpack_from(self._memory)
        return step if of == generation else None


class Mailbox:
    """Messages of one run.

    Args:
        folder: of this machine; exists.
        create: whether this is the launching process, which is the first to open it.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self._folder = folder
        self.board = Board(folder, create)

    def announce(self, announcement: Announcement) -> None:
        """Tell everybody of the next generation."""
        self._write(f"generation_{announcement.generation}", asdict(announcement))

    def announcement(self, generation: int) -> Announcement | None:
        """The announcement of a generation, if it has been made."""
        found: Announcement | None = rebuilt(Announcement, self._read(f"generation_{generation}"))
        return found

    def wait_to_be_in(self, member: int, generation: int) -> Announcement:
        """Wait for a generation after ``generation`` that has ``member``; without end: who waits may be ended."""
        found: Announcement = waited(lambda: self._latest_with(member, generation), None)
        return found

    def _latest_with(self, member: int, generation: int) -> Announcement | None:
        numbers = [int(path.stem.split("_")[1]) for path in self._folder.glob("generation_*.message")]
        found = self.announcement(max(numbers)) if max(numbers, default=-1) > generation else None
        return found if found is not None and member in found.members else None

    def say_ready(self, member: int) -> None:
        """Say that a new member waits to be taken in."""
        self._write(f"ready_{member}", {})

    def is_ready(self, member: int) -> bool:
        """Whether a new member waits to be taken in."""
        return self._path(f"ready_{member}").exists()

    def say_left(self, generation: int, left: Left) -> None:
        """Say that a member has left a generation."""
        self._write(f"left_{generation}_{left.member}", asdict(left))

    def left(self, generation: int, members: Sequence[int]) -> list[Left]:
        """Those of ``members`` that have left a generation."""
        found = (self._read(f"left_{generation}_{member}") for member in members)
        return [rebuilt(Left, plain) for plain in found if plain is not None]

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
    """What ``find`` finds, asked until it is not ``None`` or the time is over."""
    end = None if seconds is None else time.monotonic() + seconds
    while (found := find()) is None:
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(_POLL_SECONDS)
    return found
