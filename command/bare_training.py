"""Configurations reduced to training, for short runs whose numbers or memory are measured."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.references import settled
from trainwright.core.processes.scratch import scratch
from trainwright.core.run.run_directory import write_config

# Work beside training, and counts in micro-batches of a rank, which cover different samples on each layout.
_OFF: dict[str, Any] = {
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "profiler": None,
    "enable_model_summary": False,
}


def only_training(planned: DictConfig, steps: int, run_dir: Path, callbacks: Mapping[str, Any]) -> DictConfig:
    """Resolve a configuration and reduce it to the training of `steps` optimizer steps.

    Args:
        planned: a checked configuration, interpolations included. Not changed.
        steps: optimizer steps.
        run_dir: of the run.
        callbacks: the only ones, by name; each with `_target_` and arguments.

    Returns:
        Module, data, strategy, precision, clipping and seed of `planned`; no validation, logger or checkpoint.
    """
    resolved = settled(planned)
    resolved.run_dir, resolved.max_steps, resolved.max_epochs = str(run_dir), steps, None
    resolved.checkpoint, resolved.monitor, resolved.guard, resolved.logger = {}, {}, {}, {}
    resolved.callbacks = dict(callbacks)
    resolved.trainer.update(_OFF)
    if "certificate" in resolved.strategy:
        resolved.strategy.certificate = "off"  # the caller compares numbers or measures memory itself
    return resolved


def train_in_subprocesses(cfg: DictConfig) -> None:
    """Train a configuration from :func:`only_training` in new processes.

    Raises:
        RankError: if a rank failed; all others have exited.
        Interrupted: if this process was interrupted; all ranks have exited.
    """
    from trainwright.launch.local.local import launch_local

    write_config(cfg)
    launch_local(cfg, "fit")


def temporary_folder(name: str) -> TemporaryDirectory[str]:
    """Create a temporary folder whose name starts with `name`; it is removed after the `with` block."""
    return TemporaryDirectory(prefix=f"{name}-", dir=scratch(), ignore_cleanup_errors=True)
