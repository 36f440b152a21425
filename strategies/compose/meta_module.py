"""The configured module, built on the meta device without memory."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from trainwright.core.config.lightning_alias import instantiate

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def meta_module(cfg: DictConfig) -> LightningModule | None:
    """Build the whole module on the meta device; ``None`` if that fails."""
    try:
        return build_on_meta(cfg)
    except Exception:
        return None


def build_on_meta(cfg: DictConfig) -> LightningModule:
    """Build the whole module on the meta device, without output and without changing random states.

    Raises:
        Exception: from the module's constructor or `configure_model`, which may need real tensors.
    """
    import torch

    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(silence))
        stack.enter_context(contextlib.redirect_stderr(silence))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        module: LightningModule = instantiate(cfg.module)
        module.configure_model()
    return module
