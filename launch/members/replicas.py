"""A run whose replicas come and go: the launching process says who trains together, the members never restart.

When a member dies, the members that are left part (their connections break, or they are called), say which copies of
the state they have in memory, and go on from the newest that all of them have, as a new generation with fewer replicas.
A replacement is started meanwhile; when it stands ready the members are called to leave after a certain step, and it is
taken in with the state that one of them hands over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import Beginning, read_result
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.local.attempt import pass_on
from trainwright.launch.members.generations import Generations, Parted, first_beginning
from trainwright.launch.members.member_ends import MemberEnds
from trainwright.launch.members.members import Members
from trainwright.launch.outcome.ending import patience
from trainwright.launch.outcome.outcome import Outcome
from trainwright.launch.ranks.supervisor import Ended, Monitor
from trainwright.launch.recovery.check_recovery import AUTO, REPLICAS
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy, Setback
from trainwright.strategies.compose.world import Surroundings, closed_layout

# Seconds between two looks at the mailbox; ends of processes are noticed at once.
_LOOK_SECONDS = 0.1
# Ranks that fail together are noticed one after the other; the one to blame may be the second.
_TOGETHER_SECONDS = 0.1


def keeps_replicas(cfg: DictConfig, verb: str) -> bool:
    """Whether a run goes on in the processes of the other replicas when it loses one.

    Args:
        cfg: the resolved configuration of an attempt.
        verb: fit, validate, test or predict.
    """
    if cfg.launch.recovery not in (REPLICAS, AUTO) or cfg.launch.max_restarts == 0 or verb != "fit":
        return False
    layout = closed_layout(cfg, Surroundings(verb))
    return layout is not None and layout.replicate > 1 and cfg.launch.min_devices is None


class ReplicaAttempt:
    """An attempt of a run whose members are exchanged while it goes on; stands in for an
    :class:`~trainwright.launch.local.attempt.Attempt`.

    Args:
        cfg: the resolved configuration of this attempt, of a layout with several replicas.
        verb: fit.
        records: an empty folder for what the members write down.
        environment: variables of the members besides those that they need to meet.
        monitor: finds members that hang; None = off.
        policy: asked about every lost member, as about a restart.
        log: told of every change.
    """

    def __init__(
        self,
        cfg: DictConfig,
        verb: str,
        records: Path,
        *,
        environment: Mapping[str, str],
        monitor: Monitor | None,
        policy: RestartPolicy,
        log: RestartLog,
    ) -> None:
        layout = closed_layout(cfg, Surroundings(verb))
        assert layout is not None
        self._cfg, self._verb, self._records, self._layout = cfg, verb, records, layout
        self._environment, self._monitor = dict(environment), monitor
        self._policy, self._log = policy, log
        self._start_at = 0.0  # when replacements may be started
        self._suspects = False
        self._setback: Setback | None = None

    @property
    def beginning(self) -> Beginning | None:
        """How it began to train; None as long as it has not."""
        return first_beginning(self._records)

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        assert self._setback is not None
        return replace(self._setback, rank=failure.rank)

    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """Start the members, and see them through to the end of training.

        Args:
            grace_after_failure: seconds that the others have to end when one has failed and they cannot go on.
            enough: whether the members shall be ended, to go on with other ones; None = never.

        Raises:
            Interrupted: if this process was told to end, or the members were; all have ended.
            RankError: if a member failed, and the policy says that it must not go on so.
        """
        self._grace = grace_after_failure
        self._enough = enough
        self._members = Members(self._cfg, self._verb, self._records, self._environment, self._monitor)
        with self._members:
            self._generations = Generations(self._cfg, self._layout, self._records, self._members)
            self._ends = MemberEnds(self._cfg, self._records, self._generations)
            try:
                return self._see_through()
            except Interrupted as interrupted:
                ended = pass_on(self._members, self._cfg, self._verb, interrupted)
                raise self._ends.told(ended) or interrupted from None
            finally:
                self._generations.close()

    def _see_through(self) -> Outcome:
        self._members.start(self._layout.world_size + self._cfg.launch.spares)
        self._generations.begin()
        while True:
            ended = self._members.wait(_LOOK_SECONDS)
            if any(each.failed for each in ended):
                ended += self._members.wait(_TOGETHER_SECONDS)
            members = self._ends.of_members(ended)
            if any(each.exit_code == 0 for each in members) or self._ends.told(members) is not None:
                return self._finish(ended)
            outcome = self._look_after(ended)
            if outcome is not None:
                return outcome

    def _look_after(self, ended: Sequence[Ended]) -> Outcome | None:
        """Do what is due: regroup, start replacements, call members; the outcome if there is no going on."""
        failed = [each for each in ended if each.failed]
        lost = {each.rank for each in self._ends.of_members(failed)}
        error = self._ends.blame(failed) if failed else None
        if error is not None:
            self._setback = self._ends.setback(error, failed)
            if not self._generations.now.whole_replicas(lost):
                return self._end_with(error)
            self._decide(error)
        left = self._generations.left
        errors = [each for each in left if each.error is not None]
        if errors and error is None:
            if not self._suspects:
                self._suspects = True
                return None  # the end of the one that broke them may not be noticed yet
            error, self._setback = self._ends.broken(errors[0])
            self._decide(error)
        if lost or errors or len(left) == len(self._generations.now.members):
            return self._regroup(lost, error)
        if self._enough is not None and self._enough():
            self._members.end_all(patience(self._cfg, self._verb))
            return Outcome()
        self._start_missing()
        self._generations.call_if_ready()
        return None

    def _decide(self, error: RankError) -> None:
        assert self._setback is not None
        try:
            self._start_at = time.monotonic() + self._policy.restart(error, self._setback, self._log).seconds
        except RankError:
            self._members.end_all(self._grace)
            raise

    def _start_missing(self) -> None:
        """Start replacements, as soon as the policy allows it."""
        missing = self._generations.lacking + self._cfg.launch.spares - len(self._members.joining)
        if missing > 0 and time.monotonic() >= self._start_at:
            self._members.start(missing)

    def _regroup(self, lost: set[int], error: RankError | None) -> Outcome | None:
        """Go on as the next generation; the outcome if that is not possible."""
        parted = self._generations.part(lost)
        step = self._generations.go_on(parted)
        if step is None:
            # Nobody has the state any more, or there is none yet: the run starts anew from a checkpoint.
            self._log.tell("; ".join([parted.why_not, *self._ends.lines(parted.lost, self._members.exit_codes)]))
            gone = sorted(parted.lost) or parted.before.members
            error = error or self._ends.blame([Ended(member, 1) for member in gone])
            self._setback = self._setback or Setback(error.rank, error.kind)
            return self._end_with(error)
        self._suspects = False
        self._say(parted, error, step)
        return None

    def _say(self, parted: Parted, error: RankError | None, step: int) -> None:
        now = self._generations.now
        new = len(set(now.members) - set(parted.before.members)) // now.replica_size
        told = [error.summary] if error is not None else ["connections broke"] if not new else []
        told += [f"{new} replica(s) joined"] if new else []
        text = f"{'; '.join(told)}; going on from step {step} with {self._generations.size}"
        self._log.tell(text, "" if error is None else str(error))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end_with(self, error: RankError) -> Outcome:
        self._members.end_all(self._grace)
        return Outcome(error)

    def _finish(self, ended: Sequence[Ended]) -> Outcome:
        """A member has come to the end of training, or was told to end: so do the others."""
        ended = list(ended)
        self._members.end_those(self._members.joining)
        while self._members.living and not self._ends.failed(ended):
            ended += self._members.wait(_LOOK_SECONDS)
            # Who lost its connections because others are through already waits for a generation that never comes.
            self._members.end_those({each.member for each in self._generations.left})
        failed = self._ends.of_members(self._ends.failed(ended))
        if failed:
            self._members.end_all(self._grace)
            error = self._ends.blame(failed)
            self._setback = self._ends.setback(error, failed)
            return Outcome(error)
        told = self._ends.told(ended)
        if told is not None:
            raise told
        metrics = read_result(self._records)
        if metrics is None:
            error = RankError("rank 0 lost its connections at the end of training", 0, None)
            self._setback = Setback(0, "broken connections")
            return Outcome(error)
        return Outcome(metrics=metrics)
