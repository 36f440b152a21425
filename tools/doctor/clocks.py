"""Check of machine clocks against that of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.tools.doctor.finding import Finding, error, ok, time_of, warning

AREA = "clocks"
# Beyond it, log lines and traces of several ranks are misordered.
_CLOSE = 0.05
# Beyond it, deadlines and file ages of other machines are wrong, and certificates may be refused.
_FAR = 30.0


@dataclass(frozen=True)
class Offset:
    """Clock offset of a rank.

    Args:
        rank: global rank.
        seconds: ahead of rank 0.
        uncertain: error bound, seconds.
    """

    rank: int
    seconds: float
    uncertain: float


def judge_clocks(offsets: Sequence[Offset], hosts: Sequence[str]) -> list[Finding]:
    """Return one finding per machine whose clock is off, or one for all.

    Args:
        offsets: of all ranks but 0.
        hosts: host name by rank.
    """
    worst: dict[str, Offset] = {}
    for offset in offsets:
        host = hosts[offset.rank]
        if host not in worst or _certain(offset) > _certain(worst[host]):
            worst[host] = offset
    found = []
    for host, offset in worst.items():
        if _certain(offset) <= _CLOSE:
            continue
        judge = error if _certain(offset) > _FAR else warning
        way = "ahead of" if offset.seconds > 0 else "behind"
        found.append(
            judge(
                AREA,
                "clock",
                f"the clock of {host} is {time_of(abs(offset.seconds))} {way} that of {hosts[0]}",
                f"at most {time_of(_CLOSE)}: logs, traces and ages of checkpoints are compared across machines",
                f"start time synchronization on {host}: chronyc makestep, or timedatectl set-ntp true",
            )
        )
    if found or not offsets:
        return found
    most = max(offsets, key=lambda each: abs(each.seconds))
    text = f"at most {time_of(abs(most.seconds))} apart (measured to {time_of(most.uncertain)})"
    return [ok(AREA, "clock", text)]


def _certain(offset: Offset) -> float:
    return max(0.0, abs(offset.seconds) - offset.uncertain)
