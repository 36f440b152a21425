"""TensorBoard logger: metrics in groups, and hyper-parameters."""

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

# Groups of the configuration that are not hyper-parameters.
_NOT_HYPER_PARAMETERS = ("callbacks", "checkpoint", "device", "guard", "launch", "logger", "monitor", "preemption")
# Ungrouped metrics of callbacks of this project.
_RATES = ("step_seconds", "mfu")


class TensorBoard(MaskedParameters, TensorBoardLogger):
    """Lightning's ``TensorBoardLogger``, with rates in one group.

    TensorBoard groups scalars by the part before the first slash. ``samples_per_second`` and the like are written as
    ``rate/samples_per_second``; other names stay (``time/...``, ``memory/...``, ``norm/...``, ``loss``, and the
    module's own).

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
        """The writer of the file; on rank 0 only."""
        if self._experiment is None:
            from trainwright.trainer.loggers.event_writer import LenientSummaryWriter

            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = LenientSummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def save(self) -> None:
        """Write ``hparams.yaml``, unless it exists."""
        try:
            super().save()
        except (OSError, RuntimeError) as error:  # Lightning raises RuntimeError for an unreadable folder
            warnings.warn(
                f"{self.log_dir}/{self.NAME_HPARAMS_FILE} cannot be written ({error}); training continues, and "
                "config.yaml has the same values. Free space on the disk.",
                RuntimeWarning,
                stacklevel=2,
            )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write values under their grouped names; plain numbers as one event."""
        named = {grouped(name): value for name, value in metrics.items()}
        if not named or self._prefix or not all(isinstance(value, (int, float)) for value in named.values()):
            super().log_metrics(named, step)
            return
        from torch.utils.tensorboard.summary import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in named.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)


def grouped(name: str) -> str:
    """Return the name of a scalar with its group."""
    is_rate = "/" not in name and (name.endswith("_per_second") or name in _RATES)
    return f"rate/{name}" if is_rate else name


class HyperParameters(Callback):
    """Write hyper-parameters to TensorBoard once, when training starts.

    They include the module's own (``save_hyperparameters``) if the configuration does not have them. The page shows the
    last ``loss`` beside them; no value is logged for it.

    Args:
        cfg: the resolved configuration.
    """

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
    """Return the arguments of module and data with values from the environment, replaced by references, by name."""
    found: dict[str, Any] = {}
    for group in (cfg.data, cfg.module):
        values: Any = OmegaConf.to_container(group, resolve=True) if group else {}
        written = plain_values(group) if group else {}
        found |= {key: text for key, text in written.items() if text != values[key]}
    return found


def hyper_parameters(cfg: DictConfig) -> dict[str, int | float | str | bool]:
    """Return the values of a configuration by key, like ``strategy.stage``; secrets are masked, and what is null or not
    a plain value is left out."""
    plain: Any = masked(plain_values(cfg))
    return dict(_leaves({key: value for key, value in plain.items() if key not in _NOT_HYPER_PARAMETERS}))


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
