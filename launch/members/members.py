"""Processes of an elastic run, each a member with a number of its own."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from omegaconf import DictConfig

from trainwright.launch.members.mailbox import Mailbox, records_of
from trainwright.launch.members.member import member_main
from trainwright.launch.ranks.rendezvous import rank_environment
from trainwright.launch.ranks.supervisor import RankExit, Supervisor
from trainwright.launch.watchdog.monitor import HangMonitor


class Members(Supervisor):
    """Supervisor of members; its ranks are members' numbers.

    Args:
        cfg: the resolved configuration of the attempt.
        verb: fit.
        records: the folder for the records of members.
        environment: variables of the members besides those of the rendezvous.
        monitor: detects members that hang; None = off.

    Attributes:
        mailbox: messages between the members and this process.
        joining: living members that have not joined a generation, oldest first.
        exit_codes: of members that ended without being asked to, by number.
    """

    def __init__(
        self, cfg: DictConfig, verb: str, records: Path, environment: Mapping[str, str], monitor: HangMonitor | None
    ) -> None:
        folder = Path(tempfile.mkdtemp(prefix="members-", dir=records))
        records_of(records, None).mkdir()
        super().__init__(member_main, (verb, Path(cfg.run_dir), records, folder), monitor)
        self._cfg = cfg
        self._more = dict(environment)
        self._numbers = 0
        self.mailbox = Mailbox(folder, create=True)
        self.joining: list[int] = []
        self.exit_codes: dict[int, int] = {}

    @property
    def ready(self) -> list[int]:
        """Joining members that wait to be included."""
        return [member for member in self.joining if self.mailbox.is_ready(member)]

    def start(self, count: int) -> None:
        """Start `count` members that are to join."""
        for number in range(self._numbers, self._numbers + count):
            self._numbers += 1
            # It learns its rank when it joins.
            environment = rank_environment(self._cfg, 0, 0) | {"TRAINWRIGHT_MEMBER": str(number)}
            self.start_rank(number, environment | self._more)
            self.joining.append(number)

    def remove_joining(self, members: Collection[int]) -> None:
        """Remove these from the joining members."""
        self.joining = [member for member in self.joining if member not in members]

    def wait(self, timeout: float | None = None) -> list[RankExit]:
        """Wait until a member exits; see :meth:`Supervisor.wait`."""
        ended = super().wait(timeout)
        self.exit_codes.update((each.rank, each.exit_code) for each in ended if not each.asked)
        self.remove_joining({each.rank for each in ended})
        return ended

    def kill(self, members: Collection[int]) -> None:
        """Kill those that live."""
        self.end(tuple(sorted(set(members) & set(self.living))), grace=0.0)
