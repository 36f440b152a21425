"""Checkpoint errors. They derive from ``Exception``, unlike torch's ``CheckpointException``, which escapes ``except
Exception``."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.core.text.printable import printable

_LONGEST = 8000


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or used.

    The message gives the file (and the rank that wrote it, where there is one), what is allowed and what to type
    instead.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


class DamagedCheckpoint(CheckpointError):  # noqa: N818 - the public name
    """A checkpoint whose files do not match its manifest.

    Args:
        path: the checkpoint.
        problems: one text per damaged file, naming the file and the rank that wrote it.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        shown = "".join(f"\n  {problem}" for problem in self.problems[:_SHOWN])
        more = f"\n  ... and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        super().__init__(f"The checkpoint {path} is damaged, so nothing of it was used; use another:{shown}{more}")


class ClearingError(CheckpointError):
    """Old checkpoints that could not be deleted; the newest one, which supersedes them, is saved."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):  # noqa: N818
    """No checkpoint at the given path; also a ``FileNotFoundError``, which Lightning raises in this case."""


class NotAFile(CheckpointError, OSError):  # noqa: N818
    """A pipe, a device or a socket where a regular file is expected.

    Args:
        path: of the file.
        kind: its kind, for the message.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(f"{path} is {kind}; only regular files are read. Remove it, or give another path.")
        self.strerror = kind


class DamagedFile(DamagedCheckpoint):
    """A damaged file of another tool.

    Args:
        path: the file.
        problem: predicate of the message, whose subject is the file.
    """

    def __init__(self, path: str, problem: str) -> None:
        CheckpointError.__init__(self, f"{path} {problem}.")
        self.path, self.problems = path, (problem,)


_SHOWN = 20
