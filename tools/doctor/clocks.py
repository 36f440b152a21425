"""Clocks of the machines, compared with that of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.tools.doctor.finding import Finding, error, ok, time_of, warning

AREA = "clocks"
# Beyond it, lines of several ranks' logs and traces are in a wrong order.
_CLOSE = 0.05
# Beyond it, deadlines and ages of files of other machines are wrong, and certificates may be refused.
_FAR = 30.0


@dataclass(frozen=True)
class Offset:
    """Of a rank's clock.

    Args:
        rank: global rank.
        seconds: ahead of rank 0.
        uncertain: seconds by which that may be wrong.
    """

    rank: int
    seconds: float
    uncertain: float


def judge_clocks(offsets: Sequence[Offset], hosts: Sequence[str]) -> list[Finding]:
    """One finding for each machine that is off, or one for all.

    Args:
        offsets: of ranks other than 0.
        hosts: of each rank.
    """
    worst: dict[str, Offset] = {}
    for offset in offsets:
        host = hosts[offset.rank]
        # What cannot be told apart from none counts as none.
        if host not in worst or _sure(offset) > _sure(worst[host]):
            worst[host] = offset
    found = []
    for host, offset in worst.items():
        if _sure(offset) <= _CLOSE:
            continue
        judge = error if _sure(offset) > _FAR else warning
        way = "ahead of" if offset.seconds > 0 else "behind"
        found.append(
            judge(
                AREA,
                "clock",
                f"the clock of {host} is {time_of(abs(offset.seconds))} {way} that of {hosts[0]}",
                f"at most {time_of(_CLOSE)}: logs, traces and ages of checkpoints are compared across machines",
                f"start time synchronisation on {host}: chronyc makestep, or timedatectl set-ntp true",
            )
        )
    if found or not offsets:
        return found
    most = max(offsets, key=lambda each: abs(each.seconds))
    text = f"{time_of(abs(most.seconds))} apart at most (measured to {time_of(most.uncertain)})"
    return [ok(AREA, "clock", text)]


def _sure(offset: Offset) -> float:
    return max(0.0, abs(offset.seconds) - offset.uncertain)
