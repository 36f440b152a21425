"""Devices of this machine that a run may use: those that work, up to a limit set in a file."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.launch.ranks.supervisor import Supervisor
from trainwright.launch.recovery.restarts import AttemptFailure

# A number in this file of the run directory limits the devices in use.
LIMIT_FILE = "devices"
# Consecutive failures on the same device without progress after which it counts as lost.
_STRIKES = 2
# Longest interval between probes of a lost device, in seconds.
_LONGEST_PROBE_INTERVAL = 3600.0
# Time limit of a probe, in seconds.
_PROBE_SECONDS = 60.0
# Messages of drivers and libraries about a broken device. Out of memory is the program's fault, not the device's.
_OF_DEVICE = re.compile(r"AcceleratorError|(CUDA|HIP|cu\w+|NVLink) error|uncorrectable|ECC|no kernel image|Xid", re.I)
_OF_MEMORY = re.compile(r"OutOfMemory|out of memory", re.IGNORECASE)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_device_failure(setback: AttemptFailure) -> bool:
    """Return whether a failure may come from the device: a kill, crash or hang, or an error of its driver."""
    if not setback.raised:
        return True
    text = f"{setback.kind}: {setback.message}"
    return _OF_DEVICE.search(text) is not None and _OF_MEMORY.search(text) is None


@dataclass(eq=False)
class Devices:
    """The devices of one machine, numbered as the ranks of a run that uses them all.

    A device is lost after :data:`_STRIKES` failures of its rank in a row that may come from the device, without
    progress, or when a probe fails. It is probed every `probe_seconds`, half as often after each further loss, and used
    again once it answers.

    Args:
        count: devices of the run.
        fewest: lower bound of the limit.
        limit_file: contains the limit, if there is one.
        probe_seconds: between two probes of a lost device.
        on_gpu: whether they are GPUs; else they are shares of the CPU, which always answer.
        clock: monotonic, in seconds.
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
        """Return the devices that a run may use now, in order."""
        working = [device for device in range(self.count) if device not in self._probe_at]
        limit = self.limit()
        return working if limit is None else working[:limit]

    def limit(self) -> int | None:
        """Return the limit in the file; None = there is no file, or no number in it."""
        try:
            text = self.limit_file.read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return max(self.fewest, int(text)) if text.isdecimal() else None

    def count_failure(self, device: int, setback: AttemptFailure) -> bool:
        """Count a failure of the rank on a device; return whether the device counts as lost."""
        if setback.trained or not is_device_failure(setback):
            self._strikes = None, 0
            return False
        before, strikes = self._strikes
        strikes = strikes + 1 if before == device else 1
        self._strikes = (None, 0) if strikes == _STRIKES else (device, strikes)
        return strikes == _STRIKES

    def mark_lost(self, device: int) -> None:
        """Take a device out of use until a later probe succeeds."""
        before = self._intervals.get(device)
        interval = self.probe_seconds if before is None else min(2 * before, _LONGEST_PROBE_INTERVAL)
        self._intervals[device], self._probe_at[device] = interval, self.clock() + interval

    def due(self) -> list[int]:
        """Return the lost devices to probe now, each once per interval."""
        now = self.clock()
        found = [device for device, moment in self._probe_at.items() if moment <= now]
        self._probe_at.update((device, now + self._intervals[device]) for device in found)
        return found

    def mark_working(self, device: int) -> None:
        """Use a lost device again."""
        self._probe_at.pop(device, None)

    def environment(self, used: list[int]) -> dict[str, str]:
        """Return the variables that give ranks 0, 1, ... the devices `used`; empty for the first ones, the default."""
        if not self.on_gpu or used == list(range(len(used))):
            return {}
        names = _visible(self.count)
        return {_VISIBLE: ",".join(names[device] for device in used)}


class Probe:
    """Test of devices, each in a process of its own, while the run continues.

    Args:
        devices: to probe.
        count: devices of the run.
        on_gpu: whether they are GPUs.
        seconds: time limit.
    """

    def __init__(self, devices: list[int], count: int, on_gpu: bool, seconds: float = _PROBE_SECONDS) -> None:
        self._end = time.monotonic() + seconds
        self._answers: dict[int, bool] = {}
        self._ranks = Supervisor(probe_main, (on_gpu,))
        for device in devices:
            self._ranks.start_rank(device, probe_environment(device, count, on_gpu))

    def answers(self, wait: bool = False) -> dict[int, bool] | None:
        """Return whether each device works; None while some have not answered and time is left.

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
        """Kill the probes that have not answered."""
        self._ranks.end(self._ranks.living, grace=0.0)


def probe_main(environment: Mapping[str, str], on_gpu: bool) -> None:
    """Check a computation on the first visible device.

    Raises:
        SystemExit: with exit code 1 if it fails or the result is wrong.
    """
    os.environ.update(environment)
    try:
        works = _computes(on_gpu)
    except Exception as error:  # any error of a driver
        print(f"trainwright: a device does not respond: {error}", file=sys.stderr)
        works = False
    raise SystemExit(0 if works else 1)


def _computes(on_gpu: bool) -> bool:
    import torch

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    numbers = torch.arange(1024, device=device, dtype=torch.float64)
    total = float((numbers.view(32, 32) @ torch.ones(32, 1, device=device, dtype=torch.float64)).sum())
    return total == 1023 * 1024 / 2


def probe_environment(device: int, count: int, on_gpu: bool) -> dict[str, str]:
    """Return the variables of a process that sees one device only."""
    return {**os.environ, **({_VISIBLE: _visible(count)[device]} if on_gpu else {})}


def _visible(count: int) -> list[str]:
    """Return the names of the devices: numbers, or the user's selection."""
    chosen = os.environ.get(_VISIBLE)
    return [str(device) for device in range(count)] if not chosen else [name.strip() for name in chosen.split(",")]
