"""Checkpoints that a run may resume from, newest first, and why some are skipped.

Only manifests and file sizes are checked here, so that the launching process starts fast; ranks compare contents
(`trainwright.trainer.resume`).
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
from trainwright.checkpoint.write.retention import Retention
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

LAST, BEST, AUTO, INITIAL = "last", "best", "auto", "initial"
RUN_STATE = "run state"
# Files of Lightning's ModelCheckpoint.
_FILES = "*.ckpt"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that was found.

    Attributes:
        path: a run-state folder, or a file of Lightning.
        manifest: of the folder; None for a file, which cannot be verified.
        created: ISO time of writing, in UTC.
        damage: problem of its manifest; None: none, or a file.
    """

    path: str
    manifest: Manifest | None
    created: str
    damage: str | None = None

    def problem(self, *, for_fit: bool = True) -> str | None:
        """Return why it cannot be resumed from, by its manifest and file sizes; None: it can.

        Args:
            for_fit: whether to resume training, for which weights alone do not suffice.
        """
        if self.manifest is None:
            return self.damage
        kind = self.manifest.about.get("kind", RUN_STATE)
        if for_fit and kind != RUN_STATE:
            return f"holds {kind} alone, training cannot resume from that"
        try:
            return "; ".join(verify(self.path, self.manifest, deep=False)) or None
        except CheckpointError as error:
            return str(error)


def candidates_in(folder: str) -> list[Candidate]:
    """Return the checkpoints of one folder, newest first, see `newest_first`."""
    found = [Candidate(each.path, each.manifest, each.created) for each in list_checkpoints(folder)]
    if is_remote(folder):
        return found
    known = {os.path.realpath(each.path) for each in found}
    return newest_first([*found, *_others(Path(folder.removeprefix("file://")).expanduser(), known)])


def candidates_of(folders: Sequence[str]) -> Iterator[Candidate]:
    """Yield the checkpoints of several folders in order; later folders are read lazily."""
    for folder in folders:
        yield from candidates_in(folder)


def newest_good(folders: Sequence[str], *, for_fit: bool = True) -> tuple[str | None, list[str]]:
    """Return the first usable checkpoint.

    Returns:
        Its path, None when there is none, and why those before it were skipped.
    """
    reasons: list[str] = []
    for candidate in candidates_of(folders):
        problem = candidate.problem(for_fit=for_fit)
        if problem is None:
            return candidate.path, reasons
        reasons.append(f"{candidate.path}: {problem}")
    return None, reasons


def best_of(folder: str) -> str | None:
    """Return the usable checkpoint with the best value that the run monitored; None if it monitored none."""
    found = list_checkpoints(folder)
    usable = [e for e in found if not Candidate(e.path, e.manifest, e.created).problem(for_fit=False)]
    about = next((each.manifest.about for each in usable if each.manifest.about.get("monitor")), None)
    if about is None:
        return None
    best = Retention(keep_best=1, metric=about["monitor"], mode=about["mode"]).best(usable)
    return best[0].path if best else None


def newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by step, then time; those of unknown step go before the first that was written earlier."""
    found = list(candidates)
    ordered = sorted((each for each in found if each.manifest is not None), key=_order, reverse=True)
    for other in sorted((each for each in found if each.manifest is None), key=_order):
        place = next((i for i, each in enumerate(ordered) if each.created <= other.created), len(ordered))
        ordered.insert(place, other)
    return ordered


def _order(candidate: Candidate) -> tuple[int, str]:
    return -1 if candidate.manifest is None else candidate.manifest.step, candidate.created


def candidate_at(path: str, written: datetime) -> Candidate:
    """Return the checkpoint at a path: a run state, whatever its name, or a file of Lightning.

    Args:
        path: of an existing folder or file.
        written: time of its last change, for checkpoints without their own.
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
    """Yield Lightning's files, and run states with a damaged manifest."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in dict.fromkeys(map(_named, entries)):
        if path.name.startswith(".") or os.path.realpath(path) in known:
            continue
        if (path.is_file() and path.match(_FILES)) or os.path.isfile(path / MANIFEST):
            yield candidate_at(str(path), datetime.fromtimestamp(path.stat().st_mtime, UTC))


def _named(path: Path) -> Path:
    """Return the target of a link beside it (`last.ckpt`), whose name has the step."""
    target = path.resolve()
    return path.parent / target.name if path.is_symlink() and target.parent == path.parent.resolve() else path
