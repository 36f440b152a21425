"""A run whose replicas come and go: the launching process says who trains together, the members never restart.

When a member dies, the members that are left part (their connections break, or they are called), say which copies of
the state they have in memory, and go on from the newest that all of them have, as a new generation with fewer replicas.
A replacement is started meanwhile; when it stands ready the members are called to leave after a certain step, and it is
taken in with the state that one of them hands over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, end_summaries, first_failure
from trainwright.core.failures.records import AttemptStart, read_result
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.local.attempt import pass_on
from trainwright.launch.members.generations import Generations, Parted, first_beginning
from trainwright.launch.members.mailbox import Left, records_of
from trainwright.launch.members.members import Members
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.ending import patience, told_to_end
from trainwright.launch.outcome.outcome import Outcome
from trainwright.launch.ranks.supervisor import Ended
from trainwright.launch.recovery.check_recovery import AUTO, REPLICAS
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy, Setback, setback_of
from trainwright.strategies.compose.world import Surroundings, closed_layout


class MemberEnds:
    """Reads the ends of members, and what they wrote down before.

    Args:
        cfg: the resolved configuration of the attempt.
        records: the folder for what the members write down.
        generations: knows which member is which rank.
    """

    def __init__(self, cfg: DictConfig, records: Path, generations: Generations) -> None:
        self._cfg = cfg
        self._records = records
        self._generations = generations

    def told(self, ended: Iterable[Ended]) -> Interrupted | None:
        """The signal that these were told to end by, if they were."""
        return told_to_end(self._cfg, {each.rank: each.exit_code for each in ended})

    def of_members(self, ended: Iterable[Ended]) -> list[Ended]:
        """Those of them that took part in this generation."""
        return [each for each in ended if each.rank in self._generations.now.members]

    def failed(self, ended: Iterable[Ended]) -> list[Ended]:
        """Those that ended badly, and not because they were told to."""
        return [each for each in ended if each.failed and self.told([each]) is None]

    def blame(self, failed: Sequence[Ended]) -> RankError:
        """The error of the first that failed; of one that was to join, if no other did."""
        now, run_dir = self._generations.now, Path(self._cfg.run_dir)
        by_rank = {now.members.index(each.rank): each for each in self.of_members(failed)}
        if not by_rank:
            exit_codes = {each.rank: each.exit_code for each in failed}
            return first_failure(records_of(self._records, None), exit_codes, run_dir)
        codes = {rank: by_rank[rank].exit_code if rank in by_rank else None for rank in range(len(now.members))}
        hangs = {rank: each.hang for rank, each in by_rank.items() if each.hang is not None}
        return first_failure(self._generations.folder, codes, run_dir, hangs)

    def setback(self, error: RankError, failed: Sequence[Ended]) -> Setback:
        """What the policy must know of an error, by which these failed."""
        ranks, steps = {self._generations.now.rank_of(each.rank) for each in failed}, self._generations.steps
        step = max((step for rank, step in steps.items() if rank in ranks), default=None)
        return setback_of(error, step, self._generations.begun)

    def broken(self, left: Left) -> tuple[RankError, Setback]:
        """The error, and what the policy must know, of a member that lost its connections to others that live."""
        rank = self._generations.now.rank_of(left.member) or 0
        error = RankError(f"the connections of rank {rank} broke: {left.error}", rank, None)
        step = max(self._generations.steps.values(), default=None)
        return error, Setback(rank, "broken connections", step=step, begun=self._generations.begun)

    def lines(self, members: Collection[int], exit_codes: dict[int, int]) -> list[str]:
        """How those of them ended that were not told to, in a line each."""
        gone = {rank: member for rank, member in enumerate(self._generations.now.members) if member in members}
        codes = {rank: exit_codes[member] for rank, member in gone.items() if member in exit_codes}
        return end_summaries(self._generations.folder, codes)


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


@dataclass(eq=False)
class ReplicaAttempt(RankAttempt):
    """An attempt of a run whose members are exchanged while it goes on, under a layout with several replicas.

    Attributes:
        environment: variables of the members besides those that they need to meet.
        policy: asked about every lost member, as about a restart.
        log: told of every change.
    """

    environment: Mapping[str, str]
    policy: RestartPolicy
    log: RestartLog

    def __post_init__(self) -> None:
        layout = closed_layout(self.cfg, Surroundings(self.verb))
        assert layout is not None
        self._layout = layout
        self._start_at = 0.0  # when replacements may be started
        self._suspects = False
        self._setback: Setback | None = None

    @property
    def beginning(self) -> AttemptStart | None:
        """How it began to train; None as long as it has not."""
        return first_beginning(self.records)

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        assert self._setback is not None
        return replace(self._setback, rank=failure.rank)

    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """See the base class.

        Raises:
            RankError: if a member failed, and the policy says that it must not go on so.
        """
        self._grace = grace_after_failure
        self._enough = enough
        self._members = Members(self.cfg, self.verb, self.records, self.environment, self.monitor)
        with self._members:
            self._generations = Generations(self.cfg, self._layout, self.records, self._members)
            self._ends = MemberEnds(self.cfg, self.records, self._generations)
            try:
                return self._see_through()
            except Interrupted as interrupted:
                ended = pass_on(self._members, self.cfg, self.verb, interrupted)
                raise self._ends.told(ended) or interrupted from None
            finally:
                self._generations.close()

    def _see_through(self) -> Outcome:
        self._members.start(self._layout.world_size + self.cfg.launch.spares)
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
            self._members.end_all(patience(self.cfg, self.verb))
            return Outcome()
        self._start_missing()
        self._generations.call_if_ready()
        return None

    def _decide(self, error: RankError) -> None:
        assert self._setback is not None
        try:
            self._start_at = time.monotonic() + self.policy.restart(error, self._setback, self.log).seconds
        except RankError:
            self._members.end_all(self._grace)
            raise

    def _start_missing(self) -> None:
        """Start replacements, as soon as the policy allows it."""
        missing = self._generations.lacking + self.cfg.launch.spares - len(self._members.joining)
        if missing > 0 and time.monotonic() >= self._start_at:
            self._members.start(missing)

    def _regroup(self, lost: set[int], error: RankError | None) -> Outcome | None:
        """Go on as the next generation; the outcome if that is not possible."""
        parted = self._generations.part(lost)
        step = self._generations.go_on(parted)
        if step is None:
            # Nobody has the state any more, or there is none yet: the run starts anew from a checkpoint.
            self.log.tell("; ".join([parted.why_not, *self._ends.lines(parted.lost, self._members.exit_codes)]))
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
        self.log.tell(text, "" if error is None else str(error))

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
        metrics = read_result(self.records)
        if metrics is None:
            error = RankError("rank 0 lost its connections at the end of training", 0, None)
            self._setback = Setback(0, "broken connections")
            return Outcome(error)
        return Outcome(metrics=metrics)
