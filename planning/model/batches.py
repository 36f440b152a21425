"""One batch of a configuration's training data: a plan needs its shapes."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from omegaconf import DictConfig, OmegaConf, open_dict

from trainwright.core.problems import ConfigError


def one_batch(cfg: DictConfig, module: LightningModule) -> tuple[Any, int]:
    """The first training batch, and how many samples it has.

    Args:
        cfg: resolved, with `data`.
        module: that brings its own data loader, where `data` is empty.

    Raises:
        ConfigError: if the data cannot be read here.
    """
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            batch = next(iter(_loader(cfg, module)))
            return batch, extract_batch_size(batch)
    except Exception as error:  # whatever a data module raises
        why = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(
            [f"data: no training batch can be read here, whose shapes a plan needs: {type(error).__name__}: {why}"]
        ) from error


def _loader(cfg: DictConfig, module: LightningModule) -> Any:
    from hydra.utils import instantiate

    if "_target_" not in cfg.data:
        return module.train_dataloader()
    data = OmegaConf.create(OmegaConf.to_container(cfg.data))
    assert isinstance(data, DictConfig)
    with open_dict(data):
        if "num_workers" in data:
            data.num_workers = 0  # one batch is not worth processes
    source = instantiate(data, _convert_="all")
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()
