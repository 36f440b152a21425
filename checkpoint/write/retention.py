"""Retention of checkpoints: deletes old ones without risking the last good one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.checkpoint.format.manifest import Manifest, read_manifest, verify
from trainwright.checkpoint.read.find import FoundCheckpoint, list_checkpoints
from trainwright.checkpoint.store.paths import is_remote, normal_path
from trainwright.checkpoint.store.presence import is_folder
from trainwright.checkpoint.store.storage import remove
from trainwright.core.config.options import number, refuse, value_problems
from trainwright.core.errors import DamagedCheckpoint


@dataclass(frozen=True)
class Retention:
    """Retention policy; a checkpoint is kept if any of the three rules keeps it.

    Args:
        keep_last: number of newest ones to keep, at least 1; ``None``: all.
        keep_every: keep those whose step is a multiple of it; ``None``: off.
        keep_best: number of best ones by ``metric`` to keep; 0: off.
        metric: name of a logged value; required by ``keep_best``. A checkpoint without it, or with NaN, is never among
            the best.
        mode: ``min``: the smallest value is the best; ``max``: the largest.

    Raises:
        ValueError: if a number is out of range, or ``metric`` is missing.
    """

    keep_last: int | None = number(1, least=1, null="to keep all")
    keep_every: int | None = number(None, least=1, unit="steps")
    keep_best: int = number(0, unit="0 is off")
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        refuse(value_problems(Retention, vars(self)))
        if self.keep_best and not self.metric:
            raise ValueError(f"keep_best={self.keep_best} needs the name of a logged value to rank by (monitor)")

    def doomed(self, found: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return the checkpoints that no rule keeps, oldest first.

        Args:
            found: all checkpoints, in any order.
        """
        newest_first = sorted(found, key=lambda each: each.order, reverse=True)
        kept = {each.path for each in newest_first[: self.keep_last]}
        kept |= {each.path for each in newest_first if self._is_milestone(each)}
        kept |= {each.path for each in self.best(newest_first)}
        return [each for each in reversed(newest_first) if each.path not in kept]

    def _is_milestone(self, found: FoundCheckpoint) -> bool:
        return self.keep_every is not None and found.step > 0 and found.step % self.keep_every == 0

    def best(self, newest_first: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return the best ones, best first, of checkpoints sorted by age."""
        if self.metric is None or not self.keep_best:
            return []
        values = [(each, each.manifest.metric(self.metric)) for each in newest_first]
        judged = [(each, value) for each, value in values if value is not None and not math.isnan(value)]
        sign = 1 if self.mode == "min" else -1
        # Sorting is stable: among equal values, the newer wins.
        return [each for each, _ in sorted(judged, key=lambda pair: sign * pair[1])[: self.keep_best]]


KEPT = "(older checkpoints were kept because of this)"
"""Note in messages when the newest checkpoint is damaged."""


def may_delete(
    folder: str | os.PathLike[str],
    retention: Retention,
    newest: str | os.PathLike[str],
    *,
    among: Callable[[FoundCheckpoint], bool] | None = None,
) -> list[FoundCheckpoint]:
    """Return what :func:`apply` with the same arguments would delete if the newest checkpoint is intact.

    Raises:
        CheckpointError: if the newest is missing.
    """
    newest = _real(newest)
    manifest = read_manifest(newest)
    rivals = [each for each in list_checkpoints(folder) if _kind(each.manifest) == _kind(manifest)]
    rivals = rivals if among is None else [each for each in rivals if among(each)]
    stays = {newest} | _linked(folder)
    return [each for each in retention.doomed(rivals) if _real(each.path) not in stays]


def apply(
    folder: str | os.PathLike[str],
    retention: Retention,
    newest: str | os.PathLike[str],
    *,
    verified: bool = False,
    among: Callable[[FoundCheckpoint], bool] | None = None,
) -> list[str]:
    """Delete checkpoints that no rule keeps, after verifying the newest one.

    Always kept are the newest itself, even if others have later steps (a run was resumed from an earlier one), and
    targets of symbolic links in the folder. Only checkpoints of its kind are deleted: weights alone do not replace a
    run state.

    Args:
        folder: of the checkpoints.
        retention: the policy.
        newest: path of the one written last.
        verified: the caller has already verified it deeply, e.g. by all ranks together.
        among: selects the checkpoints that count and may be deleted; ``None``: all.

    Returns:
        Paths of the deleted ones.

    Raises:
        DamagedCheckpoint: if the newest is damaged. Nothing is deleted then.
        CheckpointError: if the newest is missing, or something cannot be deleted.
    """
    doomed = may_delete(folder, retention, newest, among=among)
    # Verified only if something would be deleted.
    problems = verify(_real(newest)) if doomed and not verified else []
    if problems:
        raise DamagedCheckpoint(_real(newest), [*problems, KEPT])
    for each in doomed:
        remove(each.path)
    return [each.path for each in doomed]


def _kind(manifest: Manifest) -> str:
    return str(manifest.about.get("kind"))


def _real(path: str | os.PathLike[str]) -> str:
    path = normal_path(path)
    return path if is_remote(path) else os.path.realpath(path)


def _linked(folder: str | os.PathLike[str]) -> set[str]:
    """Return the targets of symbolic links in a folder."""
    path = normal_path(folder)
    if is_remote(path) or not is_folder(path):
        return set()
    with os.scandir(path) as entries:
        return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}
