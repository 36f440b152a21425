"""One attempt of a run: its ranks from their start to the end of the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.failures.records import Beginning, read_beginning
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.outcome.ending import patience, told_to_end
from trainwright.launch.outcome.outcome import LOOK_SECONDS, Outcome, metrics_after_signal, metrics_in, setback_in
from trainwright.launch.rank import rank_main
from trainwright.launch.ranks.environment import rank_environment
from trainwright.launch.ranks.rendezvous import LocalStore
from trainwright.launch.ranks.supervisor import Ended, Monitor, Supervisor
from trainwright.launch.recovery.replacing import Replacements
from trainwright.launch.recovery.restarts import Setback

# Ranks that fail together are noticed one after the other; the one to blame may be the second.
_TOGETHER_SECONDS = 0.1


class Attempt:
    """Starts the ranks of a run, waits for them, and ends all when one fails that cannot be replaced.

    Args:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        folder: with the `config.yaml` that the ranks read.
        records: an empty folder for what the ranks write down.
        number: attempts before this one.
        environment: variables of the ranks besides those that they need to meet.
        monitor: finds ranks that hang; None = off.
        replacements: who starts lost ranks anew while the others go on, if any.
    """

    def __init__(
        self,
        cfg: DictConfig,
        verb: str,
        folder: Path,
        records: Path,
        number: int,
        environment: Mapping[str, str],
        monitor: Monitor | None,
        replacements: Replacements,
    ) -> None:
        self._cfg = cfg
        self._verb = verb
        self._folder = folder
        self._records = records
        self._number = number
        self._environment = environment
        self._monitor = monitor
        self._replacements = replacements

    @property
    def beginning(self) -> Beginning | None:
        """How it began to train; None as long as it has not."""
        return read_beginning(self._records)

    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """Start the ranks and wait for the end of all.

        Args:
            grace_after_failure: seconds that the others have to end when one has failed.
            enough: whether the ranks shall be ended, to go on with other ones; asked every second. None = never.

        Raises:
            Interrupted: if this process was told to end, or the ranks were; all have ended.
        """
        with (
            LocalStore(self._cfg.launch.port) as store,
            Supervisor(rank_main, (self._verb, self._folder, self._records), self._monitor) as ranks,
        ):
            try:
                for rank in range(self._cfg.devices):
                    self._start(ranks, rank, store.port, self._replacements.environment)
                ended = self._wait(ranks, store.port, enough)
            except Interrupted as interrupted:
                ended = pass_on(ranks, self._cfg, self._verb, interrupted)
                codes = {each.rank: each.exit_code for each in ended}
                failure = partial(first_failure, self._records, codes, Path(self._cfg.run_dir))
                return Outcome(metrics=metrics_after_signal(self._records, self._cfg, codes, interrupted, failure))
            if not any(each.failed for each in ended):
                if not ranks.living:
                    return Outcome(metrics=metrics_in(self._records, self._cfg))
                ranks.end(ranks.living, patience(self._cfg, self._verb))
                return Outcome()
            ended += ranks.end(ranks.living, grace_after_failure)
        return Outcome(self._failure(ended))

    def _start(self, ranks: Supervisor, rank: int, port: int, more: Mapping[str, str]) -> None:
        environment = rank_environment(self._cfg, rank, port, self._number)
        ranks.start_rank(rank, {**environment, **self._environment, **more})

    def _wait(self, ranks: Supervisor, port: int, enough: Callable[[], bool] | None) -> list[Ended]:
        """Wait for the end of all ranks, for the first that cannot be replaced and those that fail with it, or until it
        is enough."""
        ended: list[Ended] = []
        look = None if enough is None else LOOK_SECONDS
        while ranks.living or self._replacements.pause is not None:
            pauses = [pause for pause in (look, self._replacements.pause) if pause is not None]
            some = _next_ends(ranks, min(pauses, default=None))
            failed = [each for each in some if each.failed]
            if failed and not self._can_go_on(failed):
                return ended + some
            ended += [each for each in some if not each.failed]
            for rank, more in self._replacements.due():
                self._start(ranks, rank, port, more)
            if enough is not None and ranks.living and enough():
                return ended
        return ended

    def _can_go_on(self, failed: Sequence[Ended]) -> bool:
        beginning = self.beginning
        begun = None if beginning is None else beginning.step
        return self._replacements.take(failed, begun)

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        return setback_in(self._records, failure)

    def _failure(self, ended: list[Ended]) -> RankError:
        codes = {each.rank: None if each.asked else each.exit_code for each in ended}
        hangs = {each.rank: each.hang for each in ended if each.hang is not None}
        failure = first_failure(self._records, codes, Path(self._cfg.run_dir), hangs)
        told = told_to_end(self._cfg, codes)
        # A rank that did not save in time was ended, and the others lost their connections to it.
        if told is not None and not failure.is_cause:
            raise told
        return failure


def _next_ends(ranks: Supervisor, seconds: float | None) -> list[Ended]:
    """The ranks that end next, at most so many seconds from now; where one failed, those that fail with it, too."""
    if not ranks.living:
        time.sleep(seconds or 0.0)  # all are lost, and replacements are due later
    ended = ranks.wait(seconds)
    return ended + ranks.wait(_TOGETHER_SECONDS) if any(each.failed for each in ended) else ended


def pass_on(ranks: Supervisor, cfg: DictConfig, verb: str, interrupted: Interrupted) -> list[Ended]:
    """Pass a signal on to the ranks, and wait for their end; a second signal ends them at once."""
    try:
        return ranks.end(ranks.living, patience(cfg, verb, interrupted.number), interrupted.number)
    except Interrupted:
        return ranks.end(ranks.living, grace=0.0)
