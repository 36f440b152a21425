"""Errors of checkpoints. Both are ordinary exceptions: torch's own ``CheckpointException`` is none, and slips through
``except Exception``."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.core.text.printable import printable

_LONGEST = 8000


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or used.

    The message says what was given (the file and, where there is one, the rank that wrote it), what is allowed and what
    to type instead.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


class DamagedCheckpoint(CheckpointError):  # noqa: N818 - the name that everybody reads
    """A checkpoint whose files are not what its manifest says.

    Args:
        path: the checkpoint.
        problems: one text per damaged file, naming the file and the rank that wrote it.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        shown = "".join(f"\n  {problem}" for problem in self.problems[:_SHOWN])
        more = f"\n  ... and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        super().__init__(f"The checkpoint {path} is damaged, so nothing of it was used:{shown}{more}")


class ClearingError(CheckpointError):
    """Older checkpoints could not be deleted. The newest, which makes them needless, is saved."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):  # noqa: N818
    """There is nothing at the path that was given; what expects Lightning's error finds that."""


class NotAFile(CheckpointError, OSError):  # noqa: N818
    """A pipe, a device or a socket where a file is expected.

    Args:
        path: of it.
        kind: what it is, in words.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(f"{path} is {kind}; only regular files are read. Remove it, or give another path.")
        self.strerror = kind


class DamagedFile(DamagedCheckpoint):
    """A file of another tool that is damaged.

    Args:
        path: the file.
        problem: what is wrong, as what follows its name.
    """

    def __init__(self, path: str, problem: str) -> None:
        CheckpointError.__init__(self, f"{path} {problem}.")
        self.path, self.problems = path, (problem,)


_SHOWN = 20
