"""The processes of a run whose replicas come and go, each of which is a member with a number of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from omegaconf import DictConfig

from trainwright.launch.members.mailbox import Mailbox, records_of
from trainwright.launch.members.member import member_main
from trainwright.launch.ranks.environment import rank_environment
from trainwright.launch.ranks.supervisor import Ended, Monitor, Supervisor


class Members(Supervisor):
    """Starts members and holds their processes; what the supervisor calls a rank is a member's number here.

    Args:
        cfg: the resolved configuration of the attempt.
        verb: fit.
        records: the folder for what the members write down.
        environment: variables of the members besides those that they need to meet.
        monitor: finds members that hang; None = off.

    Attributes:
        mailbox: messages between them and this process.
        joining: members that live and have never been taken in, the oldest first.
        exit_codes: of the members that ended without having been told to, by number.
    """

    def __init__(
        self, cfg: DictConfig, verb: str, records: Path, environment: Mapping[str, str], monitor: Monitor | None
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
        """Those of the joining ones that wait to be taken in."""
        return [member for member in self.joining if self.mailbox.is_ready(member)]

    def start(self, count: int) -> None:
        """Start so many that are to join."""
        for number in range(self._numbers, self._numbers + count):
            self._numbers += 1
            # Which rank it is, it learns when it is taken in.
            environment = rank_environment(self._cfg, 0, 0) | {"TRAINWRIGHT_MEMBER": str(number)}
            self.start_rank(number, environment | self._more)
            self.joining.append(number)

    def strike_off(self, members: Collection[int]) -> None:
        """Count these no longer among those that are to join."""
        self.joining = [member for member in self.joining if member not in members]

    def wait(self, timeout: float | None = None) -> list[Ended]:
        """Wait until a member ends; see :meth:`Supervisor.wait`."""
        ended = super().wait(timeout)
        self.exit_codes.update((each.rank, each.exit_code) for each in ended if not each.asked)
        self.strike_off({each.rank for each in ended})
        return ended

    def end_those(self, members: Collection[int]) -> None:
        """Kill those of them that live."""
        self.end(tuple(sorted(set(members) & set(self.living))), grace=0.0)

    def end_all(self, grace: float) -> None:
        """End all that live, within so many seconds."""
        self.end(self.living, grace)
