"""Checks of the checkpoints and files that a killed command leaves."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.killer import COMMAND, Kill
from trainwright.checkpoint.format.manifest import records_of, verify
from trainwright.checkpoint.read.find import FoundCheckpoint, list_checkpoints
from trainwright.core.errors import CheckpointError

LOST, PROCESSES, FILES, SEGMENTS, ENDS = "lost", "processes", "files", "segments", "ends"

Hashes = Mapping[int, Mapping[str, str]]
"""Step -> file of its checkpoint -> hash."""


@dataclass(frozen=True)
class Wrong:
    """A violation.

    Args:
        kind: a checkpoint that is ``lost`` or not as it was written; ``processes``, ``files`` or shared-memory
            ``segments`` that are left; a command that ``ends`` otherwise than it should.
        text: which.
    """

    kind: str
    text: str


def hashes_of(found: FoundCheckpoint) -> dict[str, str]:
    """Hashes of the files of a checkpoint, by name."""
    return {record.name: record.hash for record in records_of(found.path, found.manifest)}


def check_checkpoints(
    folder: Path, at_least: int, keeps: int, known: Hashes, one_name: bool
) -> tuple[int, list[Wrong]]:
    """Compare every checkpoint of a folder with that of an undisturbed run.

    Args:
        folder: of the checkpoints.
        at_least: step of the newest checkpoint reported as saved.
        keeps: so many of the newest are kept.
        known: what checkpoints hold.
        one_name: whether all have one name; that is in their ``state.json``.

    Returns:
        Step of the newest valid checkpoint (0: none), and the violations.
    """
    unreadable: list[str] = []
    found = list_checkpoints(folder, unreadable.append)
    wrong = [Wrong(LOST, text) for text in unreadable]
    whole = set()
    for each in found:
        problems = _problems_of(each, known, {"state.json"} if one_name else set())
        wrong += [Wrong(LOST, f"{each.path}: {problem}") for problem in problems]
        whole |= set() if problems else {each.step}
    newest = max(whole, default=0)
    kept = range(max(1, newest - keeps + 1), newest + 1)
    wrong += [Wrong(LOST, f"step {step} is not there; there are {sorted(whole)}") for step in kept if step not in whole]
    if newest < at_least:
        wrong.append(Wrong(LOST, f"step {at_least} was saved; there are {sorted(whole)}"))
    return newest, wrong


def _problems_of(found: FoundCheckpoint, known: Hashes, but: Collection[str]) -> list[str]:
    try:
        problems = verify(found.path, found.manifest)
    except CheckpointError as error:
        problems = [str(error)]
    if problems:
        return problems
    own, other = hashes_of(found), known.get(found.step, {})
    names = sorted((own.keys() | other.keys()) - set(but))
    return [f"{name} is not that of an undisturbed run" for name in names if own.get(name) != other.get(name)]


def check_story(reports: Sequence[Mapping[str, Any]], newest: int) -> tuple[int, list[Wrong]]:
    """Check that each attempt started from the newest checkpoint saved before.

    Args:
        reports: of the processes of one command, in order.
        newest: step of the newest good checkpoint before the command.

    Returns:
        Step of the newest checkpoint reported, and the violations.
    """
    wrong: list[Wrong] = []
    for each in reports:
        started = each.get("started", newest)
        # Ranks that are restarted may find a checkpoint that was published but not reported.
        if started < newest or (started > newest and each["attempt"] == 0):
            wrong.append(Wrong(LOST, f"step {newest} was saved, attempt {each['attempt']} began at step {started}"))
        if each.get("hidden"):
            wrong.append(Wrong(FILES, f"attempt {each['attempt']} left {each['hidden']} among the checkpoints"))
        newest = max(newest, started, each.get("saved", 0))
    return newest, wrong


def check_end(code: int | None, kills: Sequence[Kill], done: int) -> list[Wrong]:
    """Hold the exit code of a command against what was done to it.

    Args:
        code: of the command; ``None``: it did not end.
        kills: that were planned.
        done: how many of them were done.
    """
    expected = 0
    if kills and done == len(kills):
        expected = -signal.SIGKILL if kills[-1].victim == COMMAND else 1
    return [] if code == expected else [Wrong(ENDS, f"exit code {code} where {expected} was expected")]


def check_temporary(folder: Path, killed: int | None) -> list[Wrong]:
    """Return violations in the folder of temporary files after a command.

    Args:
        folder: named by TMPDIR.
        killed: process id of the command, if it was killed: what it leaves, the next one removes.
    """
    names = sorted(path.name for path in folder.iterdir())
    left = [name for name in names if killed is None or not name.startswith(f"trainwright-{killed}-")]
    return [Wrong(FILES, f"{left} in TMPDIR")] if left else []


def check_files(run_dir: Path, known: Collection[str]) -> list[Wrong]:
    """Return files of a run directory that an undisturbed run does not have."""
    left = sorted(set(kinds_of_files(run_dir)) - set(known))
    return [Wrong(FILES, f"{left} in the run directory")] if left else []


def kinds_of_files(run_dir: Path) -> Iterator[str]:
    """Paths in a run directory, with # for numbers and * for names of checkpoints: of a kind there may be several."""
    for path in run_dir.rglob("*"):
        name = re.sub(r"^checkpoints/[^./][^/]*", "checkpoints/*", str(path.relative_to(run_dir)))
        yield re.sub(r"\d+", "#", name)
