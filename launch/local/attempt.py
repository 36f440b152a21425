"""One attempt of a local run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.outcome.attempt import POLL_SECONDS, Outcome, RankAttempt, metrics_after_signal, metrics_in
from trainwright.launch.outcome.interruption import exit_timeout, interruption_in
from trainwright.launch.rank import rank_main
from trainwright.launch.ranks.environment import rank_environment
from trainwright.launch.ranks.local_store import LocalStore
from trainwright.launch.ranks.supervisor import RankExit, Supervisor
from trainwright.launch.recovery.replacements import Replacements

# Failures of several ranks arrive one after the other; the second may be the cause.
_TOGETHER_SECONDS = 0.1


@dataclass(eq=False)
class Attempt(RankAttempt):
    """Local ranks of a run, which all end when one fails that cannot be replaced.

    Attributes:
        folder: with the `config.yaml` that the ranks read.
        number: earlier attempts.
        environment: variables of the ranks besides those of the rendezvous.
        replacements: restarts single ranks while the others continue.
    """

    folder: Path
    number: int
    environment: Mapping[str, str]
    replacements: Replacements

    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Run the attempt as in the base class, replacing lost ranks where possible."""
        with (
            LocalStore(self.cfg.launch.port) as store,
            Supervisor(rank_main, (self.verb, self.folder, self.records), self.monitor) as ranks,
        ):
            try:
                for rank in range(self.cfg.devices):
                    self._start(ranks, rank, store.port, self.replacements.environment)
                ended = self._wait(ranks, store.port, should_stop)
            except Interrupted as interrupted:
                ended = forward_signal(ranks, self.cfg, self.verb, interrupted)
                codes = {each.rank: each.exit_code for each in ended}
                failure = partial(first_failure, self.records, codes, Path(self.cfg.run_dir))
                return Outcome(metrics=metrics_after_signal(self.records, self.cfg, codes, interrupted, failure))
            if not any(each.failed for each in ended):
                if not ranks.living:
                    return Outcome(metrics=metrics_in(self.records, self.cfg))
                ranks.end(ranks.living, exit_timeout(self.cfg, self.verb))
                return Outcome()
            ended += ranks.end(ranks.living, grace_after_failure)
        return Outcome(self._failure(ended))

    def _start(self, ranks: Supervisor, rank: int, port: int, more: Mapping[str, str]) -> None:
        environment = rank_environment(self.cfg, rank, port, self.number)
        ranks.start_rank(rank, {**environment, **self.environment, **more})

    def _wait(self, ranks: Supervisor, port: int, should_stop: Callable[[], bool] | None) -> list[RankExit]:
        """Wait until all ranks have exited, one has failed that cannot be replaced, or `should_stop` returns True."""
        ended: list[RankExit] = []
        look = None if should_stop is None else POLL_SECONDS
        while ranks.living or self.replacements.pause is not None:
            pauses = [pause for pause in (look, self.replacements.pause) if pause is not None]
            some = _next_ends(ranks, min(pauses, default=None))
            failed = [each for each in some if each.failed]
            beginning = self.beginning if failed else None
            if failed and not self.replacements.take(failed, None if beginning is None else beginning.step):
                return ended + some
            ended += [each for each in some if not each.failed]
            for rank, more in self.replacements.due():
                self._start(ranks, rank, port, more)
            if should_stop is not None and ranks.living and should_stop():
                return ended
        return ended

    def _failure(self, ended: list[RankExit]) -> RankError:
        codes = {each.rank: None if each.asked else each.exit_code for each in ended}
        hangs = {each.rank: each.hang for each in ended if each.hang is not None}
        failure = first_failure(self.records, codes, Path(self.cfg.run_dir), hangs)
        interruption = interruption_in(self.cfg, codes)
        # A rank that did not save in time was killed, and the others lost their connections to it.
        if interruption is not None and not failure.is_cause:
            raise interruption
        return failure


def _next_ends(ranks: Supervisor, seconds: float | None) -> list[RankExit]:
    """Wait at most `seconds` for ranks to exit; after a failure, also for those that fail with it."""
    if not ranks.living:
        time.sleep(seconds or 0.0)  # all are lost, and replacements are due later
    ended = ranks.wait(seconds)
    return ended + ranks.wait(_TOGETHER_SECONDS) if any(each.failed for each in ended) else ended


def forward_signal(ranks: Supervisor, cfg: DictConfig, verb: str, interrupted: Interrupted) -> list[RankExit]:
    """Forward a signal to the ranks and wait for their exit; a second signal kills them at once."""
    try:
        return ranks.end(ranks.living, exit_timeout(cfg, verb, interrupted.number), interrupted.number)
    except Interrupted:
        return ranks.end(ranks.living, grace=0.0)
