"""Which devices of this machine a run may use: those that work, and as many as whoever runs it allows."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.launch.ranks.supervisor import Supervisor
from trainwright.launch.recovery.restarts import Setback

# A number in this file of the run directory says how many devices may be used now.
LIMIT_FILE = "devices"
# Failures in a row of the rank on the same device, none of which came further, after which the device counts as lost.
_STRIKES = 2
# Longest time between two probes of a lost device, in seconds.
_LONGEST_PROBE_INTERVAL = 3600.0
# Seconds that a device may take to answer.
_PROBE_SECONDS = 60.0
# What drivers and libraries say of a device that is broken. Out of memory is the program's fault, not the device's.
_OF_DEVICE = re.compile(r"AcceleratorError|(CUDA|HIP|cu\w+|NVLink) error|uncorrectable|ECC|no kernel image|Xid", re.I)
_OF_MEMORY = re.compile(r"OutOfMemory|out of memory", re.IGNORECASE)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def speaks_of_device(setback: Setback) -> bool:
    """Whether a failure may come from the device: the process was killed, crashed or hung, or its driver says so."""
    if not setback.raised:
        return True
    text = f"{setback.kind}: {setback.message}"
    return _OF_DEVICE.search(text) is not None and _OF_MEMORY.search(text) is None


@dataclass(eq=False)
class Devices:
    """The devices of one machine, numbered from 0 as ranks would be if all took part.

    A device is lost when its rank has failed :data:`_STRIKES` times in a row in a way that may come from the device,
    without getting further, or when a probe of it fails. It is asked again every `probe_seconds`, each time it is lost
    anew half as often, and is used again once it answers.

    Args:
        count: of the run.
        fewest: a limit below it counts as this.
        limit_file: holds a number when somebody limits the run.
        probe_seconds: between two probes of a lost device.
        on_gpu: whether they are GPUs; else they are shares of the CPU, which a probe finds answering.
        clock: seconds that never go back.
    """

    count: int
    fewest: int
    limit_file: Path
    probe_seconds: float
    on_gpu: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._probe_at: dict[int, float] = {}  # of lost devices
        self._intervals: dict[int, float] = {}
        self._strikes: tuple[int | None, int] = (None, 0)

    def usable(self) -> list[int]:
        """Devices that a run may use now, in order."""
        working = [device for device in range(self.count) if device not in self._probe_at]
        limit = self.limit()
        return working if limit is None else working[:limit]

    def limit(self) -> int | None:
        """How many may be used, as the file says; None: it is not there, or holds no number."""
        try:
            text = self.limit_file.read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return max(self.fewest, int(text)) if text.isdecimal() else None

    def strike(self, device: int, setback: Setback) -> bool:
        """Count a failure of the rank on a device; True if the device is to be taken for lost."""
        if setback.trained or not speaks_of_device(setback):
            self._strikes = None, 0
            return False
        before, strikes = self._strikes
        strikes = strikes + 1 if before == device else 1
        self._strikes = (None, 0) if strikes == _STRIKES else (device, strikes)
        return strikes == _STRIKES

    def lose(self, device: int) -> None:
        """Use a device no longer, until it answers a later probe."""
        before = self._intervals.get(device)
        interval = self.probe_seconds if before is None else min(2 * before, _LONGEST_PROBE_INTERVAL)
        self._intervals[device], self._probe_at[device] = interval, self.clock() + interval

    def due(self) -> list[int]:
        """Lost devices that are to be probed now; each is told once per interval."""
        now = self.clock()
        found = [device for device, moment in self._probe_at.items() if moment <= now]
        self._probe_at.update((device, now + self._intervals[device]) for device in found)
        return found

    def found(self, device: int) -> None:
        """Use a lost device again."""
        self._probe_at.pop(device, None)

    def environment(self, used: list[int]) -> dict[str, str]:
        """Variables by which ranks 0, 1, ... take the devices `used`; none where these are the first ones anyway."""
        if not self.on_gpu or used == list(range(len(used))):
            return {}
        names = _visible(os.environ, self.count)
        return {_VISIBLE: ",".join(names[device] for device in used)}


class Probe:
    """Asks devices whether they answer, each in a process of its own, while the run goes on.

    Args:
        devices: to ask.
        on_gpu: whether they are GPUs.
        environment: of the processes, by device.
        seconds: that they have.
    """

    def __init__(
        self,
        devices: list[int],
        on_gpu: bool,
        environment: Callable[[int], Mapping[str, str]],
        seconds: float = _PROBE_SECONDS,
    ) -> None:
        self._end = time.monotonic() + seconds
        self._answers: dict[int, bool] = {}
        self._ranks = Supervisor(probe_main, (on_gpu,))
        for device in devices:
            self._ranks.start_rank(device, environment(device))

    def answers(self, wait: bool = False) -> dict[int, bool] | None:
        """Whether each device works; None while some have not answered and there is time left.

        Args:
            wait: wait for the answers.
        """
        while self._ranks.living:
            rest = max(0.0, self._end - time.monotonic())
            ended = self._ranks.wait(rest if wait else 0.0) if rest else self._ranks.end(self._ranks.living, grace=0.0)
            self._answers.update((each.rank, each.exit_code == 0) for each in ended)
            if not ended and not wait:
                return None
        return self._answers

    def close(self) -> None:
        """End what has not answered."""
        self._ranks.end(self._ranks.living, grace=0.0)


def probe_main(environment: Mapping[str, str], on_gpu: bool) -> None:
    """Compute something on the first device that the environment shows.

    Raises:
        SystemExit: with exit code 1 if that fails, or the result is wrong.
    """
    os.environ.update(environment)
    try:
        works = _computes(on_gpu)
    except Exception as error:  # whatever a driver raises
        print(f"trainwright: a device does not answer: {error}", file=sys.stderr)
        works = False
    raise SystemExit(0 if works else 1)


def _computes(on_gpu: bool) -> bool:
    import torch

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    numbers = torch.arange(1024, device=device, dtype=torch.float64)
    total = float((numbers.view(32, 32) @ torch.ones(32, 1, device=device, dtype=torch.float64)).sum())
    return total == 1023 * 1024 / 2


def probe_environment(device: int, count: int, on_gpu: bool) -> dict[str, str]:
    """Variables of a process that shall see one device alone."""
    names = _visible(os.environ, count)
    return {**os.environ, **({_VISIBLE: names[device]} if on_gpu else {})}


def _visible(environment: Mapping[str, str], count: int) -> list[str]:
    """Names of the devices: numbers, or what the user has chosen from."""
    chosen = environment.get(_VISIBLE)
    return [str(device) for device in range(count)] if not chosen else [name.strip() for name in chosen.split(",")]
