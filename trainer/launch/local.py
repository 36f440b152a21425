"""Ranks of one machine, started and watched by the launching process."""

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from omegaconf import DictConfig

from trainwright.trainer.launch.environment import rank_environment
from trainwright.trainer.launch.failure import RankError, first_failure
from trainwright.trainer.launch.forkserver import start_forkserver
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.rank import rank_main
from trainwright.trainer.launch.records import read_result
from trainwright.trainer.launch.rendezvous import LoopbackStore
from trainwright.trainer.launch.scratch import scratch
from trainwright.trainer.launch.supervisor import Ended, Supervisor

# Beyond what a rank gives itself (`ShutdownWatch`), so that it ends by itself where it can.
_MARGIN_SECONDS = 2.0
# Ranks that fail together are noticed one after the other; the one to blame may be the second.
_TOGETHER_SECONDS = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch_local(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Start the ranks of a run on this machine and wait for their end.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
    """
    start_forkserver()
    records = Path(tempfile.mkdtemp(prefix="records-", dir=scratch()))
    with _interrupted_by_signals():
        failure = _attempt(cfg, verb, records)
    if failure is not None:
        raise failure
    return read_result(records)


def _attempt(cfg: DictConfig, verb: str, records: Path) -> RankError | None:
    """Start every rank and wait for the end of all; what ended them, if it was a failure."""
    grace = cfg.launch.grace_seconds + _MARGIN_SECONDS
    with (
        LoopbackStore(cfg.launch.port) as store,
        Supervisor(rank_main, (verb, Path(cfg.run_dir), records)) as ranks,
    ):
        try:
            for rank in range(cfg.devices):
                ranks.start_rank(rank, rank_environment(cfg, rank, store.port))
            ended = _until_failure(ranks)
        except Interrupted as interrupted:
            _end_all(ranks, grace, interrupted)
            raise
        if not any(each.failed for each in ended):
            return None
        ended += ranks.end(ranks.living, grace)
    codes = {each.rank: None if each.asked else each.exit_code for each in ended}
    return first_failure(records, codes, Path(cfg.run_dir))


def _until_failure(ranks: Supervisor) -> list[Ended]:
    """Wait for the end of all ranks, or the first that fails and those that fail with it."""
    ended: list[Ended] = []
    while ranks.living:
        ended += ranks.wait()
        if any(each.failed for each in ended):
            return ended + ranks.wait(_TOGETHER_SECONDS)
    return ended


def _end_all(ranks: Supervisor, grace: float, interrupted: Interrupted) -> None:
    """Pass the signal on to the ranks; a second one ends them at once."""
    try:
        ranks.end(ranks.living, grace, interrupted.number)
    except Interrupted:
        ranks.end(ranks.living, grace=0.0)


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise `Interrupted` where this process is told to end, and put the handlers of the caller back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)
