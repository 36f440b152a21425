"""TensorBoard's event files: figures in groups, and what the run was asked for beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.masking import MaskedParameters, masked
from trainwright.core.config.references import plain_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Groups of the configuration that are no choice of how to train.
_NOT_ASKED_FOR = ("callbacks", "checkpoint", "device", "guard", "launch", "logger", "monitor", "preemption")
# What callbacks of this project log without a group of its own.
_RATES = ("step_seconds", "mfu")


class TensorBoard(MaskedParameters, TensorBoardLogger):
    """Lightning's ``TensorBoardLogger``, with the figures of speed in one group.

    TensorBoard groups scalars by what stands before the first slash. ``samples_per_second`` and its like are written as
    ``rate/samples_per_second``; other names stay as they are (``time/...``, ``memory/...``, ``norm/...``, ``loss``, and
    what a module logs).

    Args:
        save_dir: folder of the files.
        name: of the run: a folder in ``save_dir``; ``""``: none.
        version: a folder in that; ``""``: none.
        **options: of Lightning's logger; ``default_hp_metric`` is off.
    """

    def __init__(self, save_dir: str, name: str | None = "", version: int | str | None = "", **options: Any) -> None:
        super().__init__(save_dir, name=name, version=version, **{"default_hp_metric": False, **options})

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """What writes the file; on the first rank alone."""
        if self._experiment is None:
            from trainwright.trainer.loggers.event_writer import LenientSummaryWriter

            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = LenientSummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def save(self) -> None:
        """Write ``hparams.yaml``, unless it is there."""
        try:
            super().save()
        except (OSError, RuntimeError) as error:  # Lightning's for a folder that the disk does not show
            warnings.warn(
                f"{self.log_dir}/{self.NAME_HPARAMS_FILE} cannot be written ({error}); training goes on, and "
                "config.yaml has the same values. Free space on the disk.",
                RuntimeWarning,
                stacklevel=2,
            )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write values under the names that put them in groups; plain numbers as one event."""
        named = {grouped(name): value for name, value in metrics.items()}
        if not named or self._prefix or not all(isinstance(value, (int, float)) for value in named.values()):
            super().log_metrics(named, step)
            return
        from torch.utils.tensorboard.summary import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in named.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)


def grouped(name: str) -> str:
    """The name of a scalar with its group."""
    is_rate = "/" not in name and (name.endswith("_per_second") or name in _RATES)
    return f"rate/{name}" if is_rate else name


class HyperParameters(Callback):
    """Write to TensorBoard, once when training starts, what the run was asked for: its page of hyper-parameters.

    What a module keeps of its own arguments (``save_hyperparameters``) is there too, where the configuration does not
    have it. The page shows the last ``loss`` beside them; no value is logged for it.

    Args:
        cfg: the resolved configuration.
    """

    looks_at_parameters = False

    def __init__(self, cfg: DictConfig) -> None:
        self.values = hyper_parameters(cfg)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        from torch.utils.tensorboard.summary import hparams

        if not trainer.is_global_zero:
            return
        kept = {f"module.{name}": value for name, value in _leaves(masked(dict(pl_module.hparams_initial)))}
        values = {**kept, **self.values}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                writer = logger.experiment._get_file_writer()
                for summary in hparams(values, {"loss": 0}):
                    writer.add_summary(summary)


def references_of(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of module and data that hold values of the environment, with references in their place, by name."""
    found: dict[str, Any] = {}
    for group in (cfg.data, cfg.module):
        values: Any = OmegaConf.to_container(group, resolve=True) if group else {}
        written = plain_values(group) if group else {}
        found |= {key: text for key, text in written.items() if text != values[key]}
    return found


def hyper_parameters(cfg: DictConfig) -> dict[str, int | float | str | bool]:
    """Values of a configuration by their key, like ``strategy.stage``; secrets are masked, and what is null or no plain
    value is left out."""
    plain: Any = masked(plain_values(cfg))
    return dict(_leaves({key: value for key, value in plain.items() if key not in _NOT_ASKED_FOR}))


def _leaves(values: Mapping[str, Any], before: str = "") -> list[tuple[str, int | float | str | bool]]:
    found: list[tuple[str, int | float | str | bool]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{before}{key}.")
        elif isinstance(value, (list, tuple)) and value:
            found.append((f"{before}{key}", str(value)))
        elif isinstance(value, (int, float, str, bool)):
            found.append((f"{before}{key}", value))
    return found
