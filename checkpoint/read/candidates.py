"""The checkpoints that a run may go on from: what a folder holds, newest first, and why one of them is passed over.

What is found here is judged by its manifest and the sizes of its files; contents are compared by the ranks
(`trainwright.trainer.resume`), so that the launching process starts fast.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainwright.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, verify
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store.paths import is_remote
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

LAST, AUTO = "last", "auto"
RUN_STATE = "run state"
# What Lightning's ModelCheckpoint writes.
_FILES = "*.ckpt"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that was found.

    Attributes:
        path: a run-state folder, or a file that Lightning wrote.
        manifest: of the folder; None for a file, which has nothing that it could be checked against.
        created: when it was written, as ISO time in UTC.
        damage: what is wrong with its manifest; None: nothing, or it is a file.
    """

    path: str
    manifest: Manifest | None
    created: str
    damage: str | None = None

    def problem(self, *, for_fit: bool = True) -> str | None:
        """Why it cannot be gone on from, as far as its manifest and the sizes of its files tell; None: it can.

        Args:
            for_fit: whether training goes on, which weights alone are not enough for.
        """
        if self.manifest is None:
            return self.damage
        kind = self.manifest.about.get("kind", RUN_STATE)
        if for_fit and kind != RUN_STATE:
            return f"holds {kind} alone, training cannot go on from that"
        try:
            return "; ".join(verify(self.path, self.manifest, deep=False)) or None
        except CheckpointError as error:
            return str(error)


def candidates_in(folder: str) -> list[Candidate]:
    """The checkpoints of one folder, newest first, see `newest_first`."""
    found = [Candidate(each.path, each.manifest, each.created) for each in list_checkpoints(folder)]
    if is_remote(folder):
        return found
    known = {os.path.realpath(each.path) for each in found}
    return newest_first([*found, *_others(Path(folder.removeprefix("file://")).expanduser(), known)])


def candidates_of(folders: Sequence[str]) -> Iterator[Candidate]:
    """The checkpoints of several folders, those of the first folder first; the others are not looked at before."""
    for folder in folders:
        yield from candidates_in(folder)


def newest_good(folders: Sequence[str], *, for_fit: bool = True) -> tuple[str | None, list[str]]:
    """The first that nothing speaks against.

    Returns:
        Its path, None when there is none, and why each one before it was passed over.
    """
    reasons: list[str] = []
    for candidate in candidates_of(folders):
        problem = candidate.problem(for_fit=for_fit)
        if problem is None:
            return candidate.path, reasons
        reasons.append(f"{candidate.path}: {problem}")
    return None, reasons


def newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By step, then by time; what does not tell its step stands before the first that was written earlier."""
    found = list(candidates)
    ordered = sorted((each for each in found if each.manifest is not None), key=_order, reverse=True)
    for other in sorted((each for each in found if each.manifest is None), key=_order):
        place = next((i for i, each in enumerate(ordered) if each.created <= other.created), len(ordered))
        ordered.insert(place, other)
    return ordered


def _order(candidate: Candidate) -> tuple[int, str]:
    return -1 if candidate.manifest is None else candidate.manifest.step, candidate.created


def candidate_at(path: str, written: datetime) -> Candidate:
    """What is at a path: a run state, whatever its name, or a file that Lightning wrote.

    Args:
        path: of a folder or file that exists.
        written: when it was changed last, for what does not tell itself.
    """
    created = written.astimezone(UTC).isoformat(timespec="microseconds")
    if not Folder(path).exists():
        return Candidate(path, None, created)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problems = error.problems if isinstance(error, DamagedCheckpoint) else [str(error)]
        return Candidate(path, None, created, "; ".join(problems))
    return Candidate(path, manifest, manifest.created)


def _others(folder: Path, known: set[str]) -> Iterator[Candidate]:
    """Files of Lightning's, and run states whose manifest is damaged."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in dict.fromkeys(map(_named, entries)):
        if path.name.startswith(".") or os.path.realpath(path) in known:
            continue
        if (path.is_file() and path.match(_FILES)) or os.path.isfile(path / MANIFEST):
            yield candidate_at(str(path), datetime.fromtimestamp(path.stat().st_mtime, UTC))


def _named(path: Path) -> Path:
    """What a link beside its target (`last.ckpt`) stands for, whose name says the step."""
    target = path.resolve()
    return path.parent / target.name if path.is_symlink() and target.parent == path.parent.resolve() else path
