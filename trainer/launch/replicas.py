"""A run whose replicas come and go: the launching process says who trains together, the members never restart.

When a member dies, the members that are left part (their connections break, or they are called), say which copies of
the state they have in memory, and go on from the newest that all of them have, as a new generation with fewer replicas.
A replacement is started meanwhile; when it stands ready the members are called to leave after a certain step, and it is
taken in with the state that one of them hands over.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.strategies.layout import Layout
from trainwright.trainer.launch.environment import rank_environment
from trainwright.trainer.launch.failure import RankError, first_failure
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.mailbox import NOW, Announcement, Left, Mailbox, records_of
from trainwright.trainer.launch.member import member_main
from trainwright.trainer.launch.membership import Membership
from trainwright.trainer.launch.rendezvous import LoopbackStore
from trainwright.trainer.launch.restarts import RestartPolicy, Setback, Stop
from trainwright.trainer.launch.scratch import scratch
from trainwright.trainer.launch.supervisor import Ended, Monitor, Supervisor

# Seconds between two looks at the mailbox; ends of processes are noticed at once.
_LOOK_SECONDS = 0.1
# Ranks that fail together are noticed one after the other; the one to blame may be the second.
_TOGETHER_SECONDS = 0.1
# A member that has broken connections and does not leave in this time hangs.
_LEAVE_SECONDS = 30.0
# How far ahead the step lies after which members are called to leave, so that none is beyond it when it hears of it.
_AHEAD_SECONDS, _AHEAD_STEPS = 0.3, 2


def run_replicas(
    cfg: DictConfig,
    verb: str,
    records: Path,
    policy: RestartPolicy,
    layout: Layout,
    end_all: Callable[[Supervisor, Interrupted], None],
    monitor: Monitor | None = None,
) -> RankError | None:
    """Train with replicas that come and go.

    Args:
        cfg: the resolved configuration.
        verb: fit.
        records: where ranks write down failures, and rank 0 the metrics of the end.
        policy: asked about every lost member, as about a restart.
        layout: closed; with several replicas.
        end_all: ends the members when this process is told to end.
        monitor: finds out who hangs; None = off.

    Returns:
        What ended the run, when it cannot go on in the memory of its members; None at the end of training.
    """
    folder = Path(tempfile.mkdtemp(prefix="members-", dir=scratch()))
    records_of(records, None).mkdir()
    with Supervisor(member_main, (verb, Path(cfg.run_dir), records, folder), monitor) as processes:
        run = _Run(cfg, records, policy, processes, Mailbox(folder, create=True), layout)
        try:
            return run.run()
        except Interrupted as interrupted:
            end_all(processes, interrupted)
            raise
        finally:
            run.close()


@dataclass
class _Run:
    cfg: DictConfig
    records: Path
    policy: RestartPolicy
    processes: Supervisor
    mailbox: Mailbox
    layout: Layout
    joining: list[int] = field(default_factory=list)
    _store: LoopbackStore | None = None
    _numbers: int = 0
    _start_at: float | None = None
    _begun: int = 0
    _pace: tuple[float, int] = (0.0, 0)
    _called: bool = False
    _last_error: RankError | None = None
    gave_up: bool = False

    def run(self) -> RankError | None:
        """The whole run."""
        self.now = Membership(0, self.layout, tuple(self._start(self.layout.world_size)))
        self.joining = self._start(self.cfg.launch.spares)
        self._announce(self.cfg, None, {})
        while True:
            ended = self.processes.wait(_LOOK_SECONDS)
            if any(each.failed for each in ended):
                ended += self.processes.wait(_TOGETHER_SECONDS)
            if any(each.rank in self.now.members and each.exit_code == 0 for each in ended):
                return self._finish(ended)
            failure = self._look_after(ended)
            if failure is not None:
                return failure

    def close(self) -> None:
        """Let go of the port."""
        if self._store is not None:
            self._store.close()

    def _look_after(self, ended: Sequence[Ended]) -> RankError | None:
        failed = [each for each in ended if each.failed]
        lost = {each.rank for each in failed} & set(self.now.members)
        self.joining = [member for member in self.joining if member not in {each.rank for each in failed}]
        if failed:
            self._last_error = error = self._blame(failed)
            decision = self.policy.decide(self._setback(error, failed))
            if isinstance(decision, Stop):
                self.processes.end(self.processes.living, grace=self.cfg.launch.grace_seconds)
                self.gave_up = True
                return error.because(decision.reason)
            self._start_at = time.monotonic() + decision.seconds
        left = self.mailbox.left(self.now.generation, self.now.members)
        if lost or any(each.error is not None for each in left) or len(left) == len(self.now.members):
            return self._regroup(lost, failed)
        self._start_missing()
        self._call_if_ready()
        return None

    def _setback(self, error: RankError, failed: Sequence[Ended]) -> Setback:
        steps = [self.mailbox.board.step_of(each.rank) for each in failed]
        step = max(steps) if max(steps) >= 0 else None
        message = error.hang.reason if error.hang is not None else error.failure.message if error.failure else ""
        begun = None if step is None else self._begun
        return Setback(error.rank, error.kind, message, step, begun, raised=error.failure is not None)

    def _blame(self, failed: Sequence[Ended]) -> RankError:
        """The error of the first that failed; of one that was to join, if no other did."""
        by_rank = {self.now.rank_of(each.rank): each for each in failed if each.rank in self.now.members}
        run_dir = Path(self.cfg.run_dir)
        if not by_rank:
            codes = {each.rank: each.exit_code for each in failed}
            return first_failure(records_of(self.records, None), codes, run_dir)
        codes: dict[int, int | None] = dict.fromkeys(range(len(self.now.members)))
        codes.update((rank, each.exit_code) for rank, each in by_rank.items() if rank is not None)
        hangs = {rank: each.hang for rank, each in by_rank.items() if rank is not None and each.hang is not None}
        return first_failure(records_of(self.records, self.now.generation), codes, run_dir, hangs)

    # ---- the next generation ----------------------------------------------------------------------------------------

    def _regroup(self, lost: set[int], failed: Sequence[Ended]) -> RankError | None:
        before = self.now
        if lost or not self._called:
            self.mailbox.board.call(before.generation, NOW)
        left, lost = self._all_left(lost)
        lost |= self._end_broken_replicas(lost)
        left = [each for each in left if each.member not in lost]
        ready = [member for member in self.joining if self.mailbox.is_ready(member)]
        wanted = (self.layout.replicate - len(before.whole_replicas(lost))) * before.replica_size
        after = before.next(lost, ready[:wanted])
        step = _common_step(left)
        if after is None or step is None:
            # Nobody has the state any more, or there is none yet: the run starts anew from a checkpoint.
            self.processes.end(self.processes.living, grace=0.0)
            return self._blame(failed or [Ended(before.members[0], 1)])
        self.now = after
        self.joining = [member for member in self.joining if member not in after.members]
        self._say(before, self._last_error if failed else None, step)
        self._announce(self._config(left), step, after.sources(before))
        return None

    def _all_left(self, lost: set[int]) -> tuple[list[Left], set[int]]:
        """Wait until every member has left or is lost; who does neither is ended."""
        generation, end = self.now.generation, time.monotonic() + _LEAVE_SECONDS
        while True:
            waiting = [member for member in self.now.members if member not in lost]
            left = self.mailbox.left(generation, waiting)
            if len(left) == len(waiting):
                return left, lost
            if time.monotonic() > end:
                late = set(waiting) - {each.member for each in left}
                self.processes.end(tuple(late & set(self.processes.living)), grace=0.0)
                return left, lost | late
            for each in self.processes.wait(0.02):
                if each.rank in self.now.members:
                    lost = lost | {each.rank}
                elif each.rank in self.joining:
                    self.joining.remove(each.rank)

    def _end_broken_replicas(self, lost: Collection[int]) -> set[int]:
        """End what is left of replicas that lost a member."""
        whole = {member for replica in self.now.whole_replicas(lost) for member in replica}
        broken = set(self.now.members) - whole - set(lost)
        self.processes.end(tuple(sorted(broken & set(self.processes.living))), grace=0.0)
        return broken

    def _config(self, left: Iterable[Left]) -> DictConfig:
        """The configuration of this generation: its layout, and the global batch of the first one."""
        cfg = self.cfg.copy()
        OmegaConf.set_readonly(cfg, False)
        cfg.devices = self.now.layout.world_size
        for axis, size in self.now.layout.sizes.items():
            if axis in cfg.strategy:
                cfg.strategy[axis] = size
        sizes = {each.global_batch_size for each in left} - {None}
        if sizes and cfg.global_batch_size is None:
            self.cfg.global_batch_size = cfg.global_batch_size = max(sizes)
            self.cfg.accumulation.steps = cfg.accumulation.steps = None
        cfg.trainer.uneven_steps = True
        return cfg

    def _announce(self, cfg: DictConfig, step: int | None, sources: dict[int, int]) -> None:
        old, self._store = self._store, LoopbackStore(self.cfg.launch.port if step is None else None)
        self._store.__enter__()
        self._called, self._begun = False, step or 0
        self._pace = time.monotonic(), self._begun
        records_of(self.records, self.now.generation).mkdir()
        text = OmegaConf.to_yaml(cfg, resolve=True)
        self.mailbox.announce(
            Announcement(self.now.generation, text, self.now.members, self._store.port, step, sources)
        )
        if old is not None:
            old.close()

    # ---- new members ------------------------------------------------------------------------------------------------

    def _start(self, count: int) -> list[int]:
        started = list(range(self._numbers, self._numbers + count))
        self._numbers += count
        for number in started:
            # Which rank it is, it learns when it is taken in.
            environment = rank_environment(self.cfg, 0, 0) | {"TRAINWRIGHT_MEMBER": str(number)}
            self.processes.start_rank(number, environment)
        return started

    def _start_missing(self) -> None:
        """Start replacements, as soon as the policy allows it."""
        wanted = (self.layout.replicate - self.now.layout.replicate) * self.now.replica_size + self.cfg.launch.spares
        missing = wanted - len(self.joining)
        if missing <= 0 or (self._start_at is not None and time.monotonic() < self._start_at):
            return
        self.joining += self._start(missing)

    def _call_if_ready(self) -> None:
        """Call the members to a step after which whole new replicas are taken in."""
        if self._called or self.now.layout.replicate == self.layout.replicate:
            return
        ready = [member for member in self.joining if self.mailbox.is_ready(member)]
        if len(ready) < self.now.replica_size:
            return
        step = max(self.mailbox.board.step_of(member) for member in self.now.members)
        if step <= self._begun:
            return  # the generation before is not under way yet: it would be left without a step
        begin, first = self._pace
        per_second = (step - first) / max(time.monotonic() - begin, 1e-3)
        self._called = True
        self.mailbox.board.call(self.now.generation, step + _AHEAD_STEPS + int(per_second * _AHEAD_SECONDS))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, ended: Sequence[Ended]) -> RankError | None:
        """A member has come to the end of training: so do the others."""
        ended = list(ended)
        self.processes.end(tuple(set(self.joining) & set(self.processes.living)), grace=0.0)
        while self.processes.living and not any(each.failed for each in ended):
            ended += self.processes.wait()
        failed = [each for each in ended if each.failed and each.rank in self.now.members]
        if not failed:
            return None
        self.processes.end(self.processes.living, grace=self.cfg.launch.grace_seconds)
        return self._blame(failed)

    def _say(self, before: Membership, error: RankError | None, step: int) -> None:
        size, full = self.now.layout.replicate, self.layout.replicate
        new = len(set(self.now.members) - set(before.members)) // self.now.replica_size
        told = [error.summary] if error is not None else ["connections broke"] if not new else []
        told += [f"{new} replica(s) joined"] if new else []
        text = f"{'; '.join(told)}; going on from step {step} with {size} of {full} replicas"
        print(f"trainwright: {text}", file=sys.stderr, flush=True)


def _common_step(left: Sequence[Left]) -> int | None:
    """The newest step of which all have a copy."""
    common = set(left[0].steps).intersection(*(each.steps for each in left)) if left else set()
    return max(common, default=None)
