"""Elastic number of devices: fewer when one is lost, more when it is back."""

from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.processes.machine import num_gpus
from trainwright.launch.local.devices import LIMIT_FILE, Devices, Probe, is_device_failure, probe_environment
from trainwright.launch.recovery.restarts import AttemptFailure, RestartLog
from trainwright.launch.recovery.sizes import feasible


class Shrinking:
    """Choice of the devices of each attempt.

    Args:
        cfg: the resolved configuration of the first attempt; `launch.min_devices` is set.
        verb: fit, validate, test or predict.
        log: receives every change.
    """

    def __init__(self, cfg: DictConfig, verb: str, log: RestartLog) -> None:
        self._cfg = cfg
        self._verb = verb
        self._log = log
        self._on_gpu = cfg.accelerator != "cpu" and num_gpus() > 0
        limit_file = Path(cfg.run_dir) / LIMIT_FILE
        self._devices = Devices(
            cfg.devices, cfg.launch.min_devices, limit_file, cfg.launch.probe_seconds, on_gpu=self._on_gpu
        )
        self._used = list(range(cfg.devices))
        self._probe: Probe | None = None
        self._feasible: dict[tuple[int, int | None], int | None] = {}

    @property
    def size(self) -> int:
        """Devices of the next attempt."""
        return len(self._used)

    def environment(self) -> dict[str, str]:
        """Return the variables that make the used devices visible to the ranks."""
        return self._devices.environment(self._used)

    def look(self, samples: int | None) -> bool:
        """Update the devices from probes and the limit file; return whether their number changes.

        Args:
            samples: per optimizer step, as reported by the ranks.
        """
        self._read_probe()
        wanted = self._choose(samples)
        if wanted is None or len(wanted) == len(self._used):
            return False
        self._log.write(f"devices: {len(wanted)} instead of {len(self._used)}")
        self._used = wanted
        return True

    def blame(self, setback: AttemptFailure, samples: int | None) -> bool:
        """Account for a failure; return whether it makes a device count as lost, so that the next attempt omits it.

        Args:
            setback: the failure.
            samples: per optimizer step, as reported by the ranks.
        """
        device = self._used[setback.rank]
        lost = [device] if self._devices.count_failure(device, setback) else []
        if self._on_gpu and is_device_failure(setback):
            lost += self._unresponsive()
        before = list(self._used)
        changed = False
        for each in lost:
            changed |= self._remove(each, samples)
        wanted = self._choose(samples)
        self._used = before if wanted is None else wanted
        return changed

    def close(self) -> None:
        """End the probes."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _remove(self, device: int, samples: int | None) -> bool:
        self._devices.mark_lost(device)
        if self._choose(samples) is not None:
            self._log.write(f"device {device} is taken out of use; it is probed regularly")
            return True
        self._devices.mark_working(device)
        self._log.write(f"device {device} seems lost, but the other devices are too few (launch.min_devices)")
        return False

    def _choose(self, samples: int | None) -> list[int] | None:
        """Return as many usable devices as the run can use; None if that is too few."""
        usable = self._devices.usable()
        key = len(usable), samples
        if key not in self._feasible:
            sizes = range(len(usable), self._cfg.launch.min_devices - 1, -1)
            self._feasible[key] = feasible(self._cfg, self._verb, sizes, samples)
        size = self._feasible[key]
        return None if size is None else usable[:size]

    def _read_probe(self) -> None:
        if self._probe is None:
            due = self._devices.due()
            self._probe = self._start_probe(due) if due else None
            return
        answers = self._probe.answers()
        if answers is not None:
            self._probe = None
            for device in (device for device, works in answers.items() if works):
                self._log.write(f"device {device} answers again")
                self._devices.mark_working(device)

    def _unresponsive(self) -> list[int]:
        """Return the devices in use that do not answer."""
        probe = self._start_probe(self._used)
        try:
            answers = probe.answers(wait=True) or {}
        finally:
            probe.close()
        return [device for device in self._used if not answers.get(device, False)]

    def _start_probe(self, devices: list[int]) -> Probe:
        return Probe(devices, self._on_gpu, lambda device: probe_environment(device, self._cfg.devices, self._on_gpu))
