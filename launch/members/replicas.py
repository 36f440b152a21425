"""Elastic runs: the launching process decides who trains together, and members never restart.

When a member dies, the others leave (their connections break, or they are called), report their in-memory snapshots,
and continue from the newest that all of them have, as a new generation with fewer replicas. A replacement is started
meanwhile; when it is ready the members are called to leave after a certain step, and it joins with a state sent by one
of them.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, end_summaries, first_failure
from trainwright.core.failures.records import AttemptStart, read_result
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.members.generations import EndedGeneration, Generations, first_beginning
from trainwright.launch.members.mailbox import LeaveReport, records_of
from trainwright.launch.members.members import Members
from trainwright.launch.outcome.attempt import Outcome, RankAttempt, forward_signal
from trainwright.launch.outcome.interruption import exit_timeout, interruption_in
from trainwright.launch.ranks.supervisor import RankExit
from trainwright.launch.recovery.check_recovery import AUTO, REPLICAS
from trainwright.launch.recovery.restarts import AttemptFailure, RestartLog, RestartPolicy, attempt_failure
from trainwright.strategies.compose.world import Surroundings, closed_layout


class MemberExits:
    """Interpretation of members' exits and records.

    Args:
        cfg: the resolved configuration of the attempt.
        records: the folder for the records of members.
        generations: maps members to ranks.
    """

    def __init__(self, cfg: DictConfig, records: Path, generations: Generations) -> None:
        self._cfg = cfg
        self._records = records
        self._generations = generations

    def interruption(self, ended: Iterable[RankExit]) -> Interrupted | None:
        """Return the signal that interrupted these, if one did."""
        return interruption_in(self._cfg, {each.rank: each.exit_code for each in ended})

    def of_members(self, ended: Iterable[RankExit]) -> list[RankExit]:
        """Return those that took part in this generation."""
        return [each for each in ended if each.rank in self._generations.now.members]

    def failed(self, ended: Iterable[RankExit]) -> list[RankExit]:
        """Return those that failed and were not interrupted."""
        return [each for each in ended if each.failed and self.interruption([each]) is None]

    def blame(self, failed: Sequence[RankExit]) -> RankError:
        """Return the error of the first that failed; of a joining one only if no other did."""
        now, run_dir = self._generations.now, Path(self._cfg.run_dir)
        by_rank = {now.members.index(each.rank): each for each in self.of_members(failed)}
        if not by_rank:
            exit_codes = {each.rank: each.exit_code for each in failed}
            return first_failure(records_of(self._records, None), exit_codes, run_dir)
        codes = {rank: by_rank[rank].exit_code if rank in by_rank else None for rank in range(len(now.members))}
        hangs = {rank: each.hang for rank, each in by_rank.items() if each.hang is not None}
        return first_failure(self._generations.folder, codes, run_dir, hangs)

    def setback(self, error: RankError, failed: Sequence[RankExit]) -> AttemptFailure:
        """Return an error, which made these fail, in the terms of the policy."""
        ranks, steps = {self._generations.now.rank_of(each.rank) for each in failed}, self._generations.steps
        step = max((step for rank, step in steps.items() if rank in ranks), default=None)
        return attempt_failure(error, step, self._generations.start_step)

    def connection_failure(self, report: LeaveReport) -> tuple[RankError, AttemptFailure]:
        """Return the error and setback of a member that lost its connections to living ones."""
        rank = self._generations.now.rank_of(report.member) or 0
        error = RankError(f"the connections of rank {rank} broke: {report.error}", rank, None)
        step = max(self._generations.steps.values(), default=None)
        return error, AttemptFailure(rank, "broken connections", step=step, start_step=self._generations.start_step)

    def lines(self, members: Collection[int], exit_codes: dict[int, int]) -> list[str]:
        """Return a line for each of those that ended without being asked to."""
        gone = {rank: member for rank, member in enumerate(self._generations.now.members) if member in members}
        codes = {rank: exit_codes[member] for rank, member in gone.items() if member in exit_codes}
        return end_summaries(self._generations.folder, codes)


# Seconds between two reads of the mailbox; exits of processes are noticed at once.
_POLL_SECONDS = 0.1
# Failures of several ranks arrive one after the other; the second may be the cause.
_TOGETHER_SECONDS = 0.1


def is_elastic_run(cfg: DictConfig, verb: str) -> bool:
    """Return whether a run continues in the processes of the other replicas when it loses one.

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
    """An attempt whose members are replaced while it runs, under a layout with several replicas.

    Attributes:
        environment: variables of the members besides those of the rendezvous.
        policy: decides about every lost member as about a restart.
        log: receives every change.
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
        self._setback: AttemptFailure | None = None

    @property
    def beginning(self) -> AttemptStart | None:
        """The start of training; None before it."""
        return first_beginning(self.records)

    def setback(self, failure: RankError) -> AttemptFailure:
        """Return a failure of this attempt in the terms of the policy."""
        assert self._setback is not None
        return replace(self._setback, rank=failure.rank)

    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Run the attempt as in the base class.

        Raises:
            RankError: if a member failed and the policy gives up.
        """
        self._grace = grace_after_failure
        self._should_stop = should_stop
        self._members = Members(self.cfg, self.verb, self.records, self.environment, self.monitor)
        with self._members:
            self._generations = Generations(self.cfg, self._layout, self.records, self._members)
            self._ends = MemberExits(self.cfg, self.records, self._generations)
            try:
                return self._supervise()
            except Interrupted as interrupted:
                ended = forward_signal(self._members, self.cfg, self.verb, interrupted)
                raise self._ends.interruption(ended) or interrupted from None
            finally:
                self._generations.close()

    def _supervise(self) -> Outcome:
        self._members.start(self._layout.world_size + self.cfg.launch.spares)
        self._generations.begin()
        while True:
            ended = self._members.wait(_POLL_SECONDS)
            if any(each.failed for each in ended):
                ended += self._members.wait(_TOGETHER_SECONDS)
            members = self._ends.of_members(ended)
            if any(each.exit_code == 0 for each in members) or self._ends.interruption(members) is not None:
                return self._finish(ended)
            outcome = self._handle(ended)
            if outcome is not None:
                return outcome

    def _handle(self, ended: Sequence[RankExit]) -> Outcome | None:
        """Regroup, start replacements or call members, as needed; return the outcome if the attempt is over."""
        failed = [each for each in ended if each.failed]
        lost = {each.rank for each in self._ends.of_members(failed)}
        error = self._ends.blame(failed) if failed else None
        if error is not None:
            self._setback = self._ends.setback(error, failed)
            if not self._generations.now.whole_replicas(lost):
                return self._fail(error)
            self._decide(error)
        reports = self._generations.reports
        errors = [each for each in reports if each.error is not None]
        if errors and error is None:
            if not self._suspects:
                self._suspects = True
                return None  # the exit of the member that broke them may not be noticed yet
            error, self._setback = self._ends.connection_failure(errors[0])
            self._decide(error)
        if lost or errors or len(reports) == len(self._generations.now.members):
            return self._regroup(lost, error)
        if self._should_stop is not None and self._should_stop():
            self._members.end(self._members.living, exit_timeout(self.cfg, self.verb))
            return Outcome()
        self._start_missing()
        self._generations.call_to_leave()
        return None

    def _decide(self, error: RankError) -> None:
        assert self._setback is not None
        try:
            self._start_at = time.monotonic() + self.policy.restart(error, self._setback, self.log).seconds
        except RankError:
            self._members.end(self._members.living, self._grace)
            raise

    def _start_missing(self) -> None:
        """Start replacements, as soon as the policy allows it."""
        missing = self._generations.lacking + self.cfg.launch.spares - len(self._members.joining)
        if missing > 0 and time.monotonic() >= self._start_at:
            self._members.start(missing)

    def _regroup(self, lost: set[int], error: RankError | None) -> Outcome | None:
        """Continue as the next generation; return the outcome if that is impossible."""
        parted = self._generations.end_generation(lost)
        step = self._generations.start_next(parted)
        if step is None:
            # The state is lost, or does not exist yet: the run restarts from a checkpoint.
            self.log.write("; ".join([parted.reason, *self._ends.lines(parted.lost, self._members.exit_codes)]))
            gone = sorted(parted.lost) or parted.before.members
            error = error or self._ends.blame([RankExit(member, 1) for member in gone])
            self._setback = self._setback or AttemptFailure(error.rank, error.kind)
            return self._fail(error)
        self._suspects = False
        self._log_change(parted, error, step)
        return None

    def _log_change(self, parted: EndedGeneration, error: RankError | None, step: int) -> None:
        now = self._generations.now
        new = len(set(now.members) - set(parted.before.members)) // now.replica_size
        parts = [error.summary] if error is not None else ["connections broke"] if not new else []
        parts += [f"{new} replica(s) joined"] if new else []
        text = f"{'; '.join(parts)}; resuming from step {step} with {self._generations.size}"
        self.log.write(text, "" if error is None else str(error))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, error: RankError) -> Outcome:
        self._members.end(self._members.living, self._grace)
        return Outcome(error)

    def _finish(self, ended: Sequence[RankExit]) -> Outcome:
        """Wait for the other members after one has finished training or was interrupted."""
        ended = list(ended)
        self._members.kill(self._members.joining)
        while self._members.living and not self._ends.failed(ended):
            ended += self._members.wait(_POLL_SECONDS)
            # Members whose connections broke because others have finished wait for a generation that never comes.
            self._members.kill({each.member for each in self._generations.reports})
        failed = self._ends.of_members(self._ends.failed(ended))
        if failed:
            self._members.end(self._members.living, self._grace)
            error = self._ends.blame(failed)
            self._setback = self._ends.setback(error, failed)
            return Outcome(error)
        interruption = self._ends.interruption(ended)
        if interruption is not None:
            raise interruption
        metrics = read_result(self.records)
        if metrics is None:
            error = RankError("rank 0 lost its connections at the end of training", 0, None)
            self._setback = AttemptFailure(0, "broken connections")
            return Outcome(error)
        return Outcome(metrics=metrics)
