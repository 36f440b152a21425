"""Numbers of devices that a run can continue on, and its configuration for each."""

from collections.abc import Iterable

from omegaconf import DictConfig

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.config.references import settled
from trainwright.launch.checks.validate import validate
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
        return [
            f"launch.min_devices={fewest} with devices={cfg.devices}: there is no smaller number of devices to "
            f"continue with; {smaller}leave it out"
        ]
    problems = [problems_of_size(cfg, verb, size) for size in range(cfg.devices - 1, fewest - 1, -1)]
    if not all(problems):
        return []
    return [
        f"launch.min_devices={fewest}: the run is not possible with {fewest} to {cfg.devices - 1} devices "
        f"({problems[0][0]}); type -1 for an axis of the layout that may shrink, or leave launch.min_devices out"
    ]
