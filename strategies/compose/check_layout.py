"""The module of a configuration, built in this process on the meta device, where it takes no memory."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def meta_module(cfg: DictConfig) -> LightningModule | None:
    """The module of a configuration, whole, on the meta device; None if it cannot be built there."""
    try:
        return build_on_meta(cfg)
    except Exception:
        return None


def build_on_meta(cfg: DictConfig) -> LightningModule:
    """The module of a configuration, whole, on the meta device.

    What its constructor prints is dropped, and random numbers are drawn as if it had not been built.

    Raises:
        Exception: whatever the module's constructor or `configure_model` raises where tensors have no values.
    """
    import torch
    from hydra.utils import instantiate

    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(silence))
        stack.enter_context(contextlib.redirect_stderr(silence))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        module: LightningModule = instantiate(cfg.module, _convert_="all")
        module.configure_model()
    return module
