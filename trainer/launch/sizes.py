"""With how many devices a run can go on, and what its configuration is then."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

from trainwright.trainer.batch import solve_accumulation
from trainwright.trainer.candidates import AUTO
from trainwright.trainer.launch.records import Beginning
from trainwright.trainer.validate import Surroundings, num_data_ranks, validate


def resized(cfg: DictConfig, size: int, beginning: Beginning | None = None) -> DictConfig:
    """The configuration for another number of devices, with the same samples in every optimizer step.

    Args:
        cfg: the resolved configuration that the run was begun with.
        size: devices of this machine.
        beginning: what the first attempt told of its batches; None = only what `cfg` says is known.
    """
    cfg = _copy(cfg)
    if size == cfg.devices:
        return cfg
    first = cfg.devices
    micro = cfg.micro_batch_size or (beginning and beginning.micro_batch_size)
    samples = cfg.global_batch_size or (beginning and beginning.global_batch_size)
    if not samples and micro:
        samples = micro * (cfg.accumulation.steps or 1) * num_data_ranks(cfg, first)
    cfg.devices = size
    if not samples:
        return cfg
    cfg.global_batch_size, cfg.accumulation.steps = samples, None
    try:
        ranks = num_data_ranks(cfg, size)
        if micro:
            solve_accumulation(samples, micro, ranks)
    except ValueError:
        # The layout is refused elsewhere; ranks that cannot share the batch evenly share it unevenly.
        cfg.trainer.uneven_steps = True
    return cfg


def problems_of_size(cfg: DictConfig, verb: str, size: int, beginning: Beginning | None = None) -> list[str]:
    """Why a run cannot go on with so many devices; empty when it can.

    Args:
        cfg: the resolved configuration that the run was begun with.
        verb: fit, validate, test or predict.
        size: devices of this machine.
        beginning: what the first attempt told of its batches.
    """
    changed = resized(cfg, size, beginning)
    # What it goes on from is decided when it does, and the port is taken: by this run.
    changed.ckpt_path, changed.resume_folders, changed.trust, changed.strict = None, [], False, True
    changed.resume = AUTO if verb == "fit" else None
    changed.launch.port = changed.launch.min_devices = None
    return validate(changed, Surroundings(verb))


def feasible(cfg: DictConfig, verb: str, sizes: Iterable[int], beginning: Beginning | None = None) -> int | None:
    """The first of these sizes with which the run can go on; None if there is none."""
    return next((size for size in sizes if not problems_of_size(cfg, verb, size, beginning)), None)


def size_problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is wrong with `launch.min_devices`, given that the configuration is possible as it is."""
    fewest = cfg.launch.min_devices
    if fewest is None:
        return []
    if fewest >= cfg.devices:
        return [
            f"launch.min_devices={fewest} with devices={cfg.devices}: there is no smaller number to go on with; type "
            f"launch.min_devices={max(1, cfg.devices - 1)}, or leave it out"
        ]
    resolved = _copy(cfg)
    if feasible(resolved, verb, range(cfg.devices - 1, fewest - 1, -1)) is not None:
        return []
    why = problems_of_size(resolved, verb, cfg.devices - 1)[0]
    return [
        f"launch.min_devices={fewest}: the run is possible with none of {fewest} to {cfg.devices - 1} devices, so it "
        f"could not go on with fewer ({why}); type -1 for an axis of the layout that may shrink, or leave it out"
    ]


def _copy(cfg: DictConfig) -> DictConfig:
    copy = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(copy, DictConfig)
    return copy
