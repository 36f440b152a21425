"""Numbers of devices that a run can continue on: fewer when one is lost, more when it is back."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.config.references import settled
from trainwright.core.processes.machine import num_gpus
from trainwright.launch.checks.validate import validate
from trainwright.launch.local.devices import LIMIT_FILE, Devices, Probe, is_device_failure
from trainwright.launch.recovery.restarts import AttemptFailure, RestartLog
from trainwright.strategies.compose.world import Surroundings, num_data_ranks


def resized(cfg: DictConfig, devices: int, samples: int | None, nodes: int = 1) -> DictConfig:
    """Return the configuration for another number of ranks, with the same samples per optimizer step.

    Args:
        cfg: the resolved configuration of the first attempt.
        devices: ranks per machine.
        samples: per optimizer step, as reported by the first attempt; None = as `cfg` says, if it does.
        nodes: machines.
    """
    cfg = settled(cfg)
    if (devices, nodes) == (cfg.devices, cfg.nodes):
        return cfg
    samples = global_batch(cfg) or samples
    cfg.devices, cfg.nodes = devices, nodes
    if samples is not None:
        cfg.global_batch_size, cfg.accumulation.steps = samples, None
        # Has no effect where the batch divides evenly.
        cfg.trainer.uneven_steps = True
    return cfg


def global_batch(cfg: DictConfig) -> int | None:
    """Return the samples per optimizer step of a valid, resolved configuration; None if only its data module knows."""
    if cfg.global_batch_size is not None:
        return int(cfg.global_batch_size)
    if cfg.micro_batch_size is None:
        return None
    return int(cfg.micro_batch_size * (cfg.accumulation.steps or 1) * num_data_ranks(cfg, cfg.devices * cfg.nodes))


def problems_of_size(cfg: DictConfig, verb: str, devices: int, samples: int | None = None) -> list[str]:
    """Return why a run cannot continue on this number of local devices; empty when it can.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        devices: ranks of this machine.
        samples: per optimizer step; None = as `cfg` says, if it does.
    """
    changed = resized(cfg, devices, samples)
    # The checkpoint is chosen on restart, and the port is in use by this run itself.
    changed.ckpt_path, changed.resume_folders, changed.trust, changed.strict = None, [], False, True
    changed.resume = AUTO if verb == "fit" else None
    changed.launch.port = changed.launch.min_devices = None
    return validate(changed, Surroundings(verb))


def feasible(cfg: DictConfig, verb: str, sizes: Iterable[int], samples: int | None) -> int | None:
    """Return the first of `sizes` with which the run can continue at the same global batch; None if there is none.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        sizes: numbers of devices, preferred first.
        samples: per optimizer step; None = as `cfg` says. If it is unknown, the number of devices cannot change.
    """
    known = verb != "fit" or samples is not None or global_batch(cfg) is not None
    possible = (size for size in sizes if known or size == cfg.devices)
    return next((size for size in possible if not problems_of_size(cfg, verb, size, samples)), None)


def size_problems(cfg: DictConfig, verb: str) -> list[str]:
    """Return the problems of `launch.min_devices` in an otherwise valid configuration."""
    fewest = cfg.launch.min_devices
    if fewest is None:
        return []
    if fewest >= cfg.devices:
        smaller = f"type launch.min_devices={cfg.devices - 1}, or " if cfg.devices > 1 else ""
        return [f"launch.min_devices={fewest} with devices={cfg.devices}: must be below devices; {smaller}leave it out"]
    problems = [problems_of_size(cfg, verb, size) for size in range(cfg.devices - 1, fewest - 1, -1)]
    if not all(problems):
        return []
    return [
        f"launch.min_devices={fewest}: the run is not possible with {fewest} to {cfg.devices - 1} devices "
        f"({problems[0][0]}); type -1 for an axis of the layout that may shrink, or leave launch.min_devices out"
    ]


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
        removed = [self._remove(each, samples) for each in lost]
        self._used = self._choose(samples) or self._used
        return any(removed)

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
            for device, works in answers.items():
                if works:
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
        return Probe(devices, self._cfg.devices, self._on_gpu)
