"""A run whose replicas come and go: the launching process says who trains together, the members never restart.

When a member dies, the members that are left part (their connections break, or they are called), say which copies of
the state they have in memory, and go on from the newest that all of them have, as a new generation with fewer replicas.
A replacement is started meanwhile; when it stands ready the members are called to leave after a certain step, and it is
taken in with the state that one of them hands over.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.strategies.layout import Layout
from trainwright.trainer.check_recovery import RESTART
from trainwright.trainer.launch.attempt import Outcome, pass_on, patience, setback_of
from trainwright.trainer.launch.ending import told_to_end
from trainwright.trainer.launch.environment import rank_environment
from trainwright.trainer.launch.failure import RankError, ends, first_failure
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.mailbox import NOW, Announcement, Left, Mailbox, records_of
from trainwright.trainer.launch.member import member_main
from trainwright.trainer.launch.membership import Membership
from trainwright.trainer.launch.records import Beginning, read_beginning, read_result, read_steps
from trainwright.trainer.launch.rendezvous import LocalStore
from trainwright.trainer.launch.restart_log import RestartLog
from trainwright.trainer.launch.restarts import RestartPolicy, Setback, Stop
from trainwright.trainer.launch.sizes import resized
from trainwright.trainer.launch.supervisor import Ended, Monitor, Supervisor
from trainwright.trainer.validate import Surroundings, closed_layout

# Seconds between two looks at the mailbox; ends of processes are noticed at once.
_LOOK_SECONDS = 0.1
# Ranks that fail together are noticed one after the other; the one to blame may be the second.
_TOGETHER_SECONDS = 0.1
# A member that has broken connections and does not leave in this time hangs.
_LEAVE_SECONDS = 30.0
# How far ahead the step lies after which members are called to leave, so that none is beyond it when it hears of it.
_AHEAD_SECONDS, _AHEAD_STEPS = 0.3, 2


def keeps_replicas(cfg: DictConfig, verb: str) -> bool:
    """Whether a run goes on in the processes of the other replicas when it loses one.

    Args:
        cfg: the resolved configuration of an attempt.
        verb: fit, validate, test or predict.
    """
    if cfg.launch.recovery == RESTART or cfg.launch.max_restarts == 0 or verb != "fit":
        return False
    layout = closed_layout(cfg, Surroundings(verb))
    return layout is not None and layout.replicate > 1 and cfg.launch.min_devices is None


class ReplicaAttempt:
    """An attempt of a run whose members are exchanged while it goes on; stands in for an
    :class:`~trainwright.trainer.launch.attempt.Attempt`.

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
        self._cfg, self._verb, self._records = cfg, verb, records
        self._environment, self._monitor = dict(environment), monitor
        self._policy, self._log = policy, log
        self._full: Layout = layout
        self._now = Membership(0, layout, tuple(range(layout.world_size)))
        self._joining: list[int] = []
        self._numbers = 0
        self._store: LocalStore | None = None
        self._start_at = 0.0  # when replacements may be started
        self._since = (0.0, 0)  # when this generation was announced, and its first step
        self._called = self._suspects = False
        self._setback: Setback | None = None
        self._codes: dict[int, int] = {}  # exit codes of members that ended by themselves

    @property
    def beginning(self) -> Beginning | None:
        """How it began to train; None as long as it has not."""
        return read_beginning(records_of(self._records, 0))

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        assert self._setback is not None
        return replace(self._setback, rank=failure.rank)

    def run(
        self, grace_after_failure: float, look_seconds: float | None = None, enough: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Start the members, and see them through to the end of training.

        Args:
            grace_after_failure: seconds that the others have to end when one has failed and they cannot go on.
            look_seconds: how often `enough` is asked; None = never.
            enough: whether the members shall be ended, to go on with other ones.

        Raises:
            Interrupted: if this process was told to end, or the members were; all have ended.
            RankError: if a member failed, and the policy says that it must not go on so.
        """
        self._grace = grace_after_failure
        self._enough = enough if look_seconds is not None else lambda: False
        mailbox = Path(tempfile.mkdtemp(prefix="members-", dir=self._records))
        records_of(self._records, None).mkdir()
        arguments = (self._verb, Path(self._cfg.run_dir), self._records, mailbox)
        with Supervisor(member_main, arguments, self._monitor) as self._processes:
            self._mailbox = Mailbox(mailbox, create=True)
            try:
                return self._see_through()
            except Interrupted as interrupted:
                ended = pass_on(self._processes, self._cfg, self._verb, interrupted)
                raise self._told(ended) or interrupted from None
            finally:
                if self._store is not None:
                    self._store.close()

    def _told(self, ended: Iterable[Ended]) -> Interrupted | None:
        """The signal that these were told to end by, if they were."""
        return told_to_end(self._cfg, {each.rank: each.exit_code for each in ended})

    def _failed(self, ended: Iterable[Ended]) -> list[Ended]:
        """Those that ended badly, and not because they were told to."""
        return [each for each in ended if each.failed and self._told([each]) is None]

    def _see_through(self) -> Outcome:
        self._start(len(self._now.members))
        self._joining = self._start(self._cfg.launch.spares)
        self._announce(self._cfg, None, {})
        while True:
            ended = self._processes.wait(_LOOK_SECONDS)
            if any(each.failed for each in ended):
                ended += self._processes.wait(_TOGETHER_SECONDS)
            members = [each for each in ended if each.rank in self._now.members]
            if any(each.exit_code == 0 for each in members) or self._told(members) is not None:
                return self._finish(ended)
            outcome = self._look_after(ended)
            if outcome is not None:
                return outcome

    def _look_after(self, ended: Sequence[Ended]) -> Outcome | None:
        """Do what is due: regroup, start replacements, call members; the outcome if there is no going on."""
        failed = [each for each in ended if each.failed]
        self._codes.update((each.rank, each.exit_code) for each in failed)
        gone = {each.rank for each in failed}
        self._joining = [member for member in self._joining if member not in gone]
        error = self._blame(failed) if failed else None
        if error is not None:
            self._setback = self._setback_of(error, failed)
            if not self._now.whole_replicas(gone):
                return self._end_with(error)
            self._decide(error)
        left = self._mailbox.left(self._now.generation, self._now.members)
        errors = [each for each in left if each.error is not None]
        if errors and error is None:
            if not self._suspects:
                self._suspects = True
                return None  # the end of the one that broke them may not be noticed yet
            error = self._broken(errors[0])
        if gone & set(self._now.members) or errors or self._have_all(left):
            return self._regroup(gone & set(self._now.members), error)
        if self._enough():
            self._processes.end(self._processes.living, patience(self._cfg, self._verb))
            return Outcome()
        self._start_missing()
        self._call_if_ready()
        return None

    def _broken(self, left: Left) -> RankError:
        """A member that lives has lost its connections to others that live."""
        rank = self._now.rank_of(left.member) or 0
        text = f"the connections of rank {rank} broke: {left.error}"
        error = RankError(text, rank, None)
        step = max(self._steps().values(), default=None)
        self._setback = Setback(rank, "broken connections", step=step, begun=self._since[1])
        self._decide(error)
        return error

    def _have_all(self, left: Sequence[Left]) -> bool:
        return len(left) == len(self._now.members)

    def _decide(self, error: RankError) -> None:
        assert self._setback is not None
        decision = self._policy.decide(self._setback)
        if isinstance(decision, Stop):
            self._processes.end(self._processes.living, self._grace)
            self._log.tell(f"given up: {decision.reason}", str(error))
            raise error.because(f"the run was given up: {decision.reason}")
        self._start_at = time.monotonic() + decision.seconds

    def _setback_of(self, error: RankError, failed: Sequence[Ended]) -> Setback:
        ranks, steps = {self._now.rank_of(each.rank) for each in failed}, self._steps()
        step = max((step for rank, step in steps.items() if rank in ranks), default=None)
        return setback_of(error, step, self._since[1])

    def _steps(self) -> dict[int, int]:
        """Optimizer steps that each rank of this generation has done; ranks that do not train yet are absent."""
        return read_steps(records_of(self._records, self._now.generation))

    def _end_with(self, error: RankError) -> Outcome:
        self._processes.end(self._processes.living, self._grace)
        return Outcome(error)

    def _blame(self, failed: Sequence[Ended]) -> RankError:
        """The error of the first that failed; of one that was to join, if no other did."""
        by_rank = {self._now.rank_of(each.rank): each for each in failed if each.rank in self._now.members}
        run_dir = Path(self._cfg.run_dir)
        if not by_rank:
            ends = {each.rank: each.exit_code for each in failed}
            return first_failure(records_of(self._records, None), ends, run_dir)
        codes: dict[int, int | None] = dict.fromkeys(range(len(self._now.members)))
        codes.update((rank, each.exit_code) for rank, each in by_rank.items() if rank is not None)
        hangs = {rank: each.hang for rank, each in by_rank.items() if rank is not None and each.hang is not None}
        return first_failure(records_of(self._records, self._now.generation), codes, run_dir, hangs)

    # ---- the next generation ----------------------------------------------------------------------------------------

    def _regroup(self, lost: set[int], error: RankError | None) -> Outcome | None:
        before = self._now
        if lost or not self._called:
            self._mailbox.board.call(before.generation, NOW)
        left, lost = self._all_left(lost)
        lost |= self._end_broken_replicas(lost)
        left = [each for each in left if each.member not in lost]
        ready = [member for member in self._joining if self._mailbox.is_ready(member)]
        wanted = (self._full.replicate - len(before.whole_replicas(lost))) * before.replica_size
        after = before.next(lost, ready[:wanted])
        step = _common_step(left)
        if after is None or step is None:
            # Nobody has the state any more, or there is none yet: the run starts anew from a checkpoint.
            self._log.tell("; ".join([_why_not(lost, before, left), *self._ends_of(lost)]))
            error = error or self._blame([Ended(member, 1) for member in sorted(lost) or before.members])
            self._setback = self._setback or Setback(error.rank, error.kind)
            return self._end_with(error)
        self._now = after
        self._joining = [member for member in self._joining if member not in after.members]
        self._say(before, error, step)
        self._announce(self._config(), step, after.sources(before))
        return None

    def _all_left(self, lost: set[int]) -> tuple[list[Left], set[int]]:
        """Wait until every member has left or is lost; who does neither is ended."""
        generation, end = self._now.generation, time.monotonic() + _LEAVE_SECONDS
        while True:
            waiting = [member for member in self._now.members if member not in lost]
            left = self._mailbox.left(generation, waiting)
            if len(left) == len(waiting):
                return left, lost
            if time.monotonic() > end:
                late = set(waiting) - {each.member for each in left}
                self._processes.end(tuple(late & set(self._processes.living)), grace=0.0)
                return left, lost | late
            for each in self._processes.wait(0.02):
                if each.rank in self._now.members:
                    lost = lost | {each.rank}
                    self._codes[each.rank] = each.exit_code
                elif each.rank in self._joining:
                    self._joining.remove(each.rank)

    def _ends_of(self, lost: Collection[int]) -> list[str]:
        """How those of them ended that were not told to: a line each."""
        codes = {rank: self._codes[m] for rank, m in enumerate(self._now.members) if m in lost and m in self._codes}
        return ends(records_of(self._records, self._now.generation), codes)

    def _end_broken_replicas(self, lost: Collection[int]) -> set[int]:
        """End what is left of replicas that lost a member."""
        whole = {member for replica in self._now.whole_replicas(lost) for member in replica}
        broken = set(self._now.members) - whole - set(lost)
        self._processes.end(tuple(sorted(broken & set(self._processes.living))), grace=0.0)
        return broken

    def _config(self) -> DictConfig:
        """The configuration of this generation: its layout, and the global batch of the first one."""
        beginning = self.beginning
        samples = None if beginning is None else beginning.global_batch_size
        cfg = resized(self._cfg, self._now.layout.world_size, samples)
        for axis, size in self._now.layout.sizes.items():
            if axis in cfg.strategy:
                cfg.strategy[axis] = size
        if "start_summary" in cfg.monitor:
            cfg.monitor.start_summary = None  # the log tells what has changed
        return cfg

    def _announce(self, cfg: DictConfig, step: int | None, sources: dict[int, int]) -> None:
        old, self._store = self._store, LocalStore(self._cfg.launch.port if step is None else None)
        self._store.__enter__()
        self._called = self._suspects = False
        self._since = (time.monotonic(), step or 0)
        records_of(self._records, self._now.generation).mkdir()
        text = OmegaConf.to_yaml(cfg, resolve=True)
        members, port = self._now.members, self._store.port
        pids = tuple(self._processes.pid(member) for member in members)
        self._mailbox.announce(Announcement(self._now.generation, text, members, port, step, sources, pids))
        if old is not None:
            old.close()

    # ---- new members ------------------------------------------------------------------------------------------------

    def _start(self, count: int) -> list[int]:
        started = list(range(self._numbers, self._numbers + count))
        self._numbers += count
        for number in started:
            # Which rank it is, it learns when it is taken in.
            environment = rank_environment(self._cfg, 0, 0) | {"TRAINWRIGHT_MEMBER": str(number)}
            self._processes.start_rank(number, environment | self._environment)
        return started

    def _start_missing(self) -> None:
        """Start replacements, as soon as the policy allows it."""
        wanted = (self._full.replicate - self._now.layout.replicate) * self._now.replica_size + self._cfg.launch.spares
        missing = wanted - len(self._joining)
        if missing > 0 and time.monotonic() >= self._start_at:
            self._joining += self._start(missing)

    def _call_if_ready(self) -> None:
        """Call the members to a step after which whole new replicas are taken in."""
        if self._called or self._now.layout.replicate == self._full.replicate:
            return
        ready = [member for member in self._joining if self._mailbox.is_ready(member)]
        if len(ready) < self._now.replica_size:
            return
        begin, first = self._since
        step = max(self._steps().values(), default=first)
        if step <= first:
            return  # this generation is not under way yet: it would be left without a step
        per_second = (step - first) / max(time.monotonic() - begin, 1e-3)
        self._called = True
        self._mailbox.board.call(self._now.generation, step + _AHEAD_STEPS + int(per_second * _AHEAD_SECONDS))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, ended: Sequence[Ended]) -> Outcome:
        """A member has come to the end of training, or was told to end: so do the others."""
        ended = list(ended)
        self._processes.end(tuple(set(self._joining) & set(self._processes.living)), grace=0.0)
        while self._processes.living and not self._failed(ended):
            ended += self._processes.wait(_LOOK_SECONDS)
            # Who lost its connections because others are through already waits for a generation that never comes.
            stranded = {each.member for each in self._mailbox.left(self._now.generation, self._now.members)}
            self._processes.end(tuple(stranded & set(self._processes.living)), grace=0.0)
        failed = [each for each in self._failed(ended) if each.rank in self._now.members]
        if failed:
            self._processes.end(self._processes.living, self._grace)
            error = self._blame(failed)
            self._setback = self._setback_of(error, failed)
            return Outcome(error)
        told = self._told(ended)
        if told is not None:
            raise told
        try:
            return Outcome(metrics=read_result(self._records))
        except FileNotFoundError:
            error = RankError("rank 0 lost its connections at the end of training", 0, None)
            self._setback = Setback(0, "broken connections")
            return Outcome(error)

    def _say(self, before: Membership, error: RankError | None, step: int) -> None:
        size, full = self._now.layout.replicate, self._full.replicate
        new = len(set(self._now.members) - set(before.members)) // self._now.replica_size
        told = [error.summary] if error is not None else ["connections broke"] if not new else []
        told += [f"{new} replica(s) joined"] if new else []
        text = f"{'; '.join(told)}; going on from step {step} with {size} of {full} replicas"
        self._log.tell(text, "" if error is None else str(error))


def _why_not(lost: Collection[int], before: Membership, left: Sequence[Left]) -> str:
    """Why the members that are left cannot go on."""
    gone = ", ".join(str(before.rank_of(member)) for member in sorted(lost))
    if not before.whole_replicas(lost):
        return f"no replica is whole without rank(s) {gone}"
    held = "; ".join(f"rank {before.rank_of(each.member)}: {list(each.steps)}" for each in left)
    return f"without rank(s) {gone} there is no step of which all others have a copy in memory ({held or 'none'})"


def _common_step(left: Sequence[Left]) -> int | None:
    """The newest step of which all have a copy."""
    common = set(left[0].steps).intersection(*(each.steps for each in left)) if left else set()
    return max(common, default=None)
