"""Records that an engine's ranks and machines leave for the launching process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import Failure, RankError, first_failure, log_file
from trainwright.core.failures.records import read_result, write_whole
from trainwright.core.run.interrupt import Interrupted
from trainwright.core.text.plain import rebuilt
from trainwright.launch.outcome.interruption import interruption_in

_FOLDER = Path("logs") / "ends"
_BEGUN = "begun"
LOCAL_RANKS = "TRAINWRIGHT_LOCAL_RANKS"
"""Variable with a folder of this machine for the sizes of its ranks' logs; unset = not recorded."""


def ends_folder(run_dir: Path) -> Path:
    """Return the folder of the ranks' failures and rank 0's final metrics."""
    return run_dir / _FOLDER


def empty_ends(run_dir: Path) -> Path:
    """Return the same folder, without the records of an earlier run in this directory."""
    folder = ends_folder(run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def forget_rank(run_dir: Path, rank: int, world_size: int) -> Path:
    """Delete the record of a rank that is being (re)started; rank 0 also deletes those of ranks that no longer exist.

    Returns:
        The folder.
    """
    folder = ends_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    gone = [int(path.stem) for path in folder.glob("*.json") if rank == 0 and int(path.stem) >= world_size]
    for each in (rank, *gone):
        (folder / f"{each}.json").unlink(missing_ok=True)
    return folder


def is_restart(run_dir: Path) -> bool:
    """Return whether the ranks of this run were started before, as after a failure or a requeued job.

    Called once per attempt, by rank 0 or its launcher, because it marks the run as started.
    """
    mark = ends_folder(run_dir) / _BEGUN
    was_there = mark.exists()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return was_there


def record_local_rank(run_dir: Path, rank: int) -> None:
    """Record that a rank starts on this machine, and the size of its log before."""
    folder = os.environ.get(LOCAL_RANKS)
    if folder is None:
        return
    path = Path(folder) / str(rank)
    if not path.exists():  # the output of restarted ranks is shown once, from their first start
        log = log_file(run_dir, rank)
        write_whole(path, str(log.stat().st_size if log.is_file() else 0))


def local_ranks(folder: Path) -> dict[int, int]:
    """Return the size of each local rank's log at its start, by rank."""
    return {int(path.name): int(path.read_text()) for path in sorted(folder.glob("[0-9]*"))}


@dataclass(frozen=True)
class NodeOutcome:
    """The outcome of one machine's ranks.

    Attributes:
        exit_code: of the task.
        signal: number of the signal that interrupted it; None = none.
        error: message of a failure for the user; None = no failure, or recorded by the ranks.
        rank: that failed first, with `error`.
        rank_exit_code: of its process; None = unknown.
        failure: the exception; None = it ended without one.
        codes: exit codes of this machine's ranks by rank, as far as known.
    """

    exit_code: int
    signal: int | None = None
    error: str | None = None
    rank: int = 0
    rank_exit_code: int | None = None
    failure: Failure | None = None
    codes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_error(cls, error: RankError) -> NodeOutcome:
        """Return the outcome for a rank's failure."""
        code = error.exit_code_of_user or 1
        return cls(code, error=str(error), rank=error.rank, rank_exit_code=error.exit_code, failure=error.failure)


def _path(folder: Path, node: int) -> Path:
    return folder / f"node_{node}"


def forget_node(folder: Path, node: int) -> None:
    """Delete the outcome of a machine whose ranks are being (re)started."""
    _path(folder, node).unlink(missing_ok=True)


def write_node(folder: Path, node: int, end: NodeOutcome) -> None:
    """Record the outcome of a machine's ranks."""
    write_whole(_path(folder, node), json.dumps(asdict(end)))


def read_node(folder: Path, node: int) -> NodeOutcome | None:
    """Return the outcome of a machine's ranks; None = not recorded."""
    path = _path(folder, node)
    if not path.is_file():
        return None
    end: NodeOutcome = rebuilt(NodeOutcome, json.loads(path.read_text(encoding="utf-8")))
    return end


def metrics_of(folder: Path, cfg: DictConfig, ends: Sequence[NodeOutcome | None], silence: str) -> dict[str, float]:
    """Return the final metrics of rank 0 by name; empty where the user's code exited successfully.

    Args:
        folder: with the records of ranks and machines.
        cfg: the resolved configuration.
        ends: of all machines, in order; None = not recorded.
        silence: message for the user if a machine has no record and no rank failed.

    Raises:
        RankError: of the first failed rank, or if a machine has no record.
        Interrupted: if the ranks were interrupted.
    """
    said = [end for end in ends if end is not None]
    for end in said:
        if end.error is not None:
            raise RankError(end.error, end.rank, end.rank_exit_code, end.failure)
    codes: dict[int, int | None] = dict.fromkeys(range(cfg.devices * cfg.nodes))
    codes |= {rank: code for end in said for rank, code in end.codes.items()}
    interruption = next((Interrupted(end.signal, end.exit_code) for end in said if end.signal is not None), None)
    interruption = interruption or interruption_in(cfg, codes)
    if any(codes.values()) or any(folder.glob("*.json")):
        failure = first_failure(folder, codes, Path(cfg.run_dir))
        if failure.is_cause or interruption is None:
            raise failure
    if interruption is not None:
        raise interruption
    failed = next((end.exit_code for end in said if end.exit_code), None)
    if len(said) < len(ends) or failed is not None:
        raise RankError(silence, 0, failed)
    return read_result(folder) or {}
