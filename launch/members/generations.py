"""Generations of members: who leaves, which snapshots they hold, and who trains together next."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.references import settled
from trainwright.core.failures.records import AttemptStart, read_attempt_start, read_steps
from trainwright.core.layout import Layout
from trainwright.launch.members.mailbox import NOW, Announcement, LeaveReport, records_of
from trainwright.launch.members.members import Members
from trainwright.launch.ranks.rendezvous import LocalStore
from trainwright.launch.recovery.sizes import resized


@dataclass(frozen=True)
class Membership:
    """The members of one generation.

    Args:
        generation: counted from 0.
        layout: with all sizes resolved; its replicas come and go.
        members: number of each member, by rank.
    """

    generation: int
    layout: Layout
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.members) != self.layout.world_size or len(set(self.members)) != len(self.members):
            raise ValueError(f"{self.layout} has {self.layout.world_size} ranks, but the members are {self.members}.")

    @property
    def replicas(self) -> list[tuple[int, ...]]:
        """Members of each replica, in the order of its ranks."""
        found: list[list[int]] = [[] for _ in range(self.layout.replicate)]
        for rank, member in enumerate(self.members):
            found[self.layout.coordinates(rank)["replicate"]].append(member)
        return [tuple(replica) for replica in found]

    @property
    def replica_size(self) -> int:
        """Members of one replica."""
        return self.layout.world_size // self.layout.replicate

    def rank_of(self, member: int) -> int | None:
        """Return the rank of a member; None if it takes no part."""
        return self.members.index(member) if member in self.members else None

    def whole_replicas(self, lost: Collection[int]) -> list[tuple[int, ...]]:
        """Return the replicas without a lost member."""
        return [replica for replica in self.replicas if not set(replica) & set(lost)]

    def next(self, lost: Collection[int], joining: Sequence[int] = ()) -> Membership | None:
        """Return the members of the next generation.

        Args:
            lost: members that are gone; the rest of their replicas is dropped too.
            joining: new members; whole replicas of them are added after the old ones.

        Returns:
            None if no old replica is whole, because the state is lost then.
        """
        replicas = self.whole_replicas(lost)
        if not replicas:
            return None
        size = self.replica_size
        new = [tuple(joining[i : i + size]) for i in range(0, len(joining) - size + 1, size)]
        layout = replace(self.layout, replicate=len(replicas) + len(new))
        waiting = [iter(replica) for replica in (*replicas, *new)]
        places = (layout.coordinates(rank)["replicate"] for rank in range(layout.world_size))
        return Membership(self.generation + 1, layout, tuple(next(waiting[place]) for place in places))

    def sources(self, before: Membership) -> dict[int, int]:
        """Return for each new member the member that sends it its state: the one at the same place in the first
        replica.

        Args:
            before: the previous generation.
        """
        first = self.replicas[0]
        place = {member: index for replica in self.replicas for index, member in enumerate(replica)}
        return {member: first[place[member]] for member in self.members if member not in before.members}


# A member with broken connections that does not leave within this time hangs.
_LEAVE_SECONDS = 30.0
# Distance of the step after which members are called to leave, so that none is beyond it when it reads the call.
_AHEAD_SECONDS, _AHEAD_STEPS = 0.3, 2


@dataclass(frozen=True)
class EndedGeneration:
    """A generation after its members have left.

    Args:
        before: the generation.
        lost: its members that are gone.
        reports: of the others.
    """

    before: Membership
    lost: frozenset[int]
    reports: tuple[LeaveReport, ...]

    @property
    def common_step(self) -> int | None:
        """The newest step of which all remaining members have a snapshot; None = there is none."""
        held = [set(each.steps) for each in self.reports]
        return max(set.intersection(*held), default=None) if held else None

    @property
    def reason(self) -> str:
        """The reason why the remaining members cannot continue."""
        gone = ", ".join(str(self.before.rank_of(member)) for member in sorted(self.lost))
        if not self.before.whole_replicas(self.lost):
            return f"no replica is whole without rank(s) {gone}"
        held = "; ".join(f"rank {self.before.rank_of(each.member)}: {list(each.steps)}" for each in self.reports)
        return (
            f"without rank(s) {gone} there is no step of which all others have an in-memory snapshot ({held or 'none'})"
        )


class Generations:
    """The generations of an attempt.

    Args:
        cfg: the resolved configuration of the attempt.
        layout: with all sizes resolved and all replicas.
        records: the folder for the records of members.
        members: the processes; one per rank of the layout has been started.

    Attributes:
        now: the members that train.
        start_step: optimizer steps done when this generation started.
    """

    def __init__(self, cfg: DictConfig, layout: Layout, records: Path, members: Members) -> None:
        self._cfg = cfg
        self._records = records
        self._members = members
        self._full = layout.replicate
        self._store: LocalStore | None = None
        self._since = 0.0  # when this generation was announced
        self._called = False
        self.now = Membership(0, layout, tuple(range(layout.world_size)))
        self.start_step = 0

    @property
    def folder(self) -> Path:
        """Folder of the records of this generation."""
        return records_of(self._records, self.now.generation)

    @property
    def size(self) -> str:
        """The number of training replicas, in words."""
        return f"{self.now.layout.replicate} of {self._full} replicas"

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps of each rank of this generation; ranks that do not train yet are absent."""
        return read_steps(self.folder)

    @property
    def reports(self) -> list[LeaveReport]:
        """Reports of the members that have left this generation."""
        return self._members.mailbox.reports(self.now.generation, self.now.members)

    @property
    def lacking(self) -> int:
        """Members missing for all replicas."""
        return (self._full - self.now.layout.replicate) * self.now.replica_size

    def begin(self) -> None:
        """Announce the first generation."""
        self._members.remove_joining(self.now.members)
        self._announce(self._cfg, None, {})

    def close(self) -> None:
        """Close the store of this generation."""
        if self._store is not None:
            self._store.close()

    # ---- the end of a generation ------------------------------------------------------------------------------------

    def call_to_leave(self) -> None:
        """Call the members to leave after a coming step, if whole new replicas are ready."""
        if self._called or not self.lacking or len(self._members.ready) < self.now.replica_size:
            return
        step = max(self.steps.values(), default=self.start_step)
        if step <= self.start_step:
            return  # this generation has made no step yet
        per_second = (step - self.start_step) / max(time.monotonic() - self._since, 1e-3)
        self._called = True
        self._members.mailbox.board.call(self.now.generation, step + _AHEAD_STEPS + int(per_second * _AHEAD_SECONDS))

    def end_generation(self, lost: Collection[int]) -> EndedGeneration:
        """Make all members leave; end the rest of replicas that lost one.

        Args:
            lost: members that are gone.
        """
        if lost or not self._called:
            self._members.mailbox.board.call(self.now.generation, NOW)
        reports, gone = self._wait_until_left(set(lost))
        whole = {member for replica in self.now.whole_replicas(gone) for member in replica}
        broken = set(self.now.members) - whole - gone
        self._members.kill(broken)
        gone |= broken
        return EndedGeneration(self.now, frozenset(gone), tuple(each for each in reports if each.member not in gone))

    def _wait_until_left(self, lost: set[int]) -> tuple[list[LeaveReport], set[int]]:
        """Wait until every member has left or is lost; end those that do neither in time."""
        end = time.monotonic() + _LEAVE_SECONDS
        while True:
            waiting = [member for member in self.now.members if member not in lost]
            reports = self._members.mailbox.reports(self.now.generation, waiting)
            if len(reports) == len(waiting):
                return reports, lost
            if time.monotonic() > end:
                late = set(waiting) - {each.member for each in reports}
                self._members.kill(late)
                return reports, lost | late
            ended = {each.rank for each in self._members.wait(0.02)}
            lost |= ended & set(self.now.members)

    # ---- the next generation ----------------------------------------------------------------------------------------

    def start_next(self, parted: EndedGeneration) -> int | None:
        """Announce the next generation: the remaining members, and new replicas that are ready and needed.

        Returns:
            Optimizer steps of the state it continues from; None = impossible, because the state is lost or does not
            exist yet.
        """
        before, step = parted.before, parted.common_step
        wanted = (self._full - len(before.whole_replicas(parted.lost))) * before.replica_size
        after = before.next(parted.lost, self._members.ready[:wanted])
        if after is None or step is None:
            return None
        self.now = after
        self._members.remove_joining(after.members)
        self._announce(self._config(), step, after.sources(before))
        return step

    def _config(self) -> DictConfig:
        """Return the configuration of this generation: its layout, and the global batch of the first one."""
        first = first_beginning(self._records)
        samples = None if first is None else first.global_batch_size
        cfg = resized(self._cfg, self.now.layout.world_size, samples)
        for axis, size in self.now.layout.sizes.items():
            if axis in cfg.strategy:
                cfg.strategy[axis] = size
        if "start_summary" in cfg.monitor:
            cfg.monitor.start_summary = None  # the log reports the change
        return cfg

    def _announce(self, cfg: DictConfig, step: int | None, sources: dict[int, int]) -> None:
        old, self._store = self._store, LocalStore(self._cfg.launch.port if step is None else None)
        self._called = False
        self._since, self.start_step = time.monotonic(), step or 0
        self.folder.mkdir()
        text = OmegaConf.to_yaml(settled(cfg))
        members, port = self.now.members, self._store.port
        pids = tuple(self._members.pid(member) for member in members)
        self._members.mailbox.announce(Announcement(self.now.generation, text, members, port, step, sources, pids))
        if old is not None:
            old.close()


def first_beginning(records: Path) -> AttemptStart | None:
    """Return the start of training of the first generation; None before it.

    Args:
        records: the folder for the records of members.
    """
    return read_attempt_start(records_of(records, 0))
