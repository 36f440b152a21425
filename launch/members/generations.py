"""From one generation of members to the next: who is called to leave, what they hold, and who trains together then."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.references import settled
from trainwright.core.failures.records import AttemptStart, read_attempt_start, read_steps
from trainwright.core.layout import Layout
from trainwright.launch.members.mailbox import NOW, Announcement, Left, records_of
from trainwright.launch.members.members import Members
from trainwright.launch.ranks.rendezvous import LocalStore
from trainwright.launch.recovery.sizes import resized


@dataclass(frozen=True)
class Membership:
    """The members of one generation.

    Args:
        generation: 0 is the first.
        layout: closed; its replicas are what comes and goes.
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
        """Rank of a member; ``None`` if it takes no part."""
        return self.members.index(member) if member in self.members else None

    def whole_replicas(self, lost: Collection[int]) -> list[tuple[int, ...]]:
        """The replicas that have lost no member."""
        return [replica for replica in self.replicas if not set(replica) & set(lost)]

    def next(self, lost: Collection[int], joining: Sequence[int] = ()) -> Membership | None:
        """The members of the next generation.

        Args:
            lost: members that are gone; what is left of their replicas goes too.
            joining: new members; whole replicas of them are taken, after the old ones.

        Returns:
            ``None`` if no old replica is whole: nobody has the state of the run then.
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
        """New member -> the member that has what it is to hold: the one at its place in the first replica.

        Args:
            before: the generation before this one.
        """
        first = self.replicas[0]
        place = {member: index for replica in self.replicas for index, member in enumerate(replica)}
        return {member: first[place[member]] for member in self.members if member not in before.members}


# A member that has broken connections and does not leave in this time hangs.
_LEAVE_SECONDS = 30.0
# How far ahead the step lies after which members are called to leave, so that none is beyond it when it hears of it.
_AHEAD_SECONDS, _AHEAD_STEPS = 0.3, 2


@dataclass(frozen=True)
class Parted:
    """What is left of a generation whose members have left.

    Args:
        before: the generation.
        lost: its members that are gone.
        left: what the others said.
    """

    before: Membership
    lost: frozenset[int]
    left: tuple[Left, ...]

    @property
    def common_step(self) -> int | None:
        """The newest step of which all that are left have a copy; ``None``: there is none."""
        held = [set(each.steps) for each in self.left]
        return max(set.intersection(*held), default=None) if held else None

    @property
    def why_not(self) -> str:
        """Why those that are left cannot go on."""
        gone = ", ".join(str(self.before.rank_of(member)) for member in sorted(self.lost))
        if not self.before.whole_replicas(self.lost):
            return f"no replica is whole without rank(s) {gone}"
        held = "; ".join(f"rank {self.before.rank_of(each.member)}: {list(each.steps)}" for each in self.left)
        return f"without rank(s) {gone} there is no step of which all others have a copy in memory ({held or 'none'})"


class Generations:
    """Announces the generations of an attempt, one after the other, and knows the one that trains now.

    Args:
        cfg: the resolved configuration of the attempt.
        layout: closed, with all replicas.
        records: the folder for what the members write down.
        members: the processes; as many as the layout has ranks have been started.

    Attributes:
        now: the members that train.
        begun: optimizer steps that were done when they began.
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
        self.begun = 0

    @property
    def folder(self) -> Path:
        """For the records of this generation."""
        return records_of(self._records, self.now.generation)

    @property
    def size(self) -> str:
        """How many replicas train, in words."""
        return f"{self.now.layout.replicate} of {self._full} replicas"

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps that each rank of this generation has done; ranks that do not train yet are absent."""
        return read_steps(self.folder)

    @property
    def left(self) -> list[Left]:
        """What the members said that have left this generation."""
        return self._members.mailbox.left(self.now.generation, self.now.members)

    @property
    def lacking(self) -> int:
        """Members that this generation has less than all replicas would."""
        return (self._full - self.now.layout.replicate) * self.now.replica_size

    def begin(self) -> None:
        """Announce the first generation."""
        self._members.strike_off(self.now.members)
        self._announce(self._cfg, None, {})

    def close(self) -> None:
        """Free the port at which the members meet."""
        if self._store is not None:
            self._store.close()

    # ---- the end of a generation ------------------------------------------------------------------------------------

    def call_if_ready(self) -> None:
        """Call the members to a step after which whole new replicas are taken in, if any are ready."""
        if self._called or not self.lacking or len(self._members.ready) < self.now.replica_size:
            return
        step = max(self.steps.values(), default=self.begun)
        if step <= self.begun:
            return  # this generation is not under way yet: it would be left without a step
        per_second = (step - self.begun) / max(time.monotonic() - self._since, 1e-3)
        self._called = True
        self._members.mailbox.board.call(self.now.generation, step + _AHEAD_STEPS + int(per_second * _AHEAD_SECONDS))

    def part(self, lost: Collection[int]) -> Parted:
        """Have all members leave; what is left of replicas that lost one is ended.

        Args:
            lost: members that are gone.
        """
        if lost or not self._called:
            self._members.mailbox.board.call(self.now.generation, NOW)
        left, gone = self._all_left(set(lost))
        gone |= self._end_broken_replicas(gone)
        return Parted(self.now, frozenset(gone), tuple(each for each in left if each.member not in gone))

    def _all_left(self, lost: set[int]) -> tuple[list[Left], set[int]]:
        """Wait until every member has left or is lost; who does neither is ended."""
        end = time.monotonic() + _LEAVE_SECONDS
        while True:
            waiting = [member for member in self.now.members if member not in lost]
            left = self._members.mailbox.left(self.now.generation, waiting)
            if len(left) == len(waiting):
                return left, lost
            if time.monotonic() > end:
                late = set(waiting) - {each.member for each in left}
                self._members.end_those(late)
                return left, lost | late
            ended = {each.rank for each in self._members.wait(0.02)}
            lost |= ended & set(self.now.members)

    def _end_broken_replicas(self, lost: Collection[int]) -> set[int]:
        """End what is left of replicas that lost a member."""
        whole = {member for replica in self.now.whole_replicas(lost) for member in replica}
        broken = set(self.now.members) - whole - set(lost)
        self._members.end_those(broken)
        return broken

    # ---- the next generation ----------------------------------------------------------------------------------------

    def go_on(self, parted: Parted) -> int | None:
        """Announce the next generation: those that are left, and as many new replicas as are ready and lacking.

        Returns:
            Optimizer steps done in the state from which it goes on; ``None``: it is not possible, as nobody has the
            state of the run any more, or all have none yet.
        """
        before, step = parted.before, parted.common_step
        wanted = (self._full - len(before.whole_replicas(parted.lost))) * before.replica_size
        after = before.next(parted.lost, self._members.ready[:wanted])
        if after is None or step is None:
            return None
        self.now = after
        self._members.strike_off(after.members)
        self._announce(self._config(), step, after.sources(before))
        return step

    def _config(self) -> DictConfig:
        """The configuration of this generation: its layout, and the global batch of the first one."""
        first = first_beginning(self._records)
        samples = None if first is None else first.global_batch_size
        cfg = resized(self._cfg, self.now.layout.world_size, samples)
        for axis, size in self.now.layout.sizes.items():
            if axis in cfg.strategy:
                cfg.strategy[axis] = size
        if "start_summary" in cfg.monitor:
            cfg.monitor.start_summary = None  # the log tells what has changed
        return cfg

    def _announce(self, cfg: DictConfig, step: int | None, sources: dict[int, int]) -> None:
        old, self._store = self._store, LocalStore(self._cfg.launch.port if step is None else None)
        self._called = False
        self._since, self.begun = time.monotonic(), step or 0
        self.folder.mkdir()
        text = OmegaConf.to_yaml(settled(cfg))
        members, port = self.now.members, self._store.port
        pids = tuple(self._members.pid(member) for member in members)
        self._members.mailbox.announce(Announcement(self.now.generation, text, members, port, step, sources, pids))
        if old is not None:
            old.close()


def first_beginning(records: Path) -> AttemptStart | None:
    """How the members of the first generation began to train; ``None`` as long as they have not.

    Args:
        records: the folder for what the members write down.
    """
    return read_attempt_start(records_of(records, 0))
