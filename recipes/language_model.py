"""Next-token prediction as a LightningModule, shared by the recipes on text."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trainwright import RunSchedule
from trainwright.recipes.float8 import to_float8
from trainwright.recipes.muon import OptimizerFactory, build_optimizer


class LanguageModule(LightningModule):
    """Next-token prediction on windows of text. A subclass defines :meth:`build` and :meth:`forward`.

    Logs ``train_loss`` (nats per token of this rank's micro-batch), and over all held-out windows ``val_loss`` and
    ``val_bpb`` (bits per token; a token is a byte unless the data say otherwise), likewise ``test_loss`` and
    ``test_bpb``.

    Args:
        seq_len: trained tokens per window.
        optimizer: takes parameters (or parameter groups) and returns the optimizer; ``None``: AdamW with learning rate
            4e-3, betas (0.9, 0.95), weight decay 0.1. Weight decay always applies to matrices only.
        warmup_steps: optimizer steps of linear warm-up; 0 or ``None`` is off.
        schedule_steps: optimizer steps until the cosine reaches ``final_lr_factor``; ``None``: the run's own length.
        final_lr_factor: learning rate at the end as a part of the peak; 1 or ``None`` is off.
        float8: see :func:`~trainwright.recipes.float8.to_float8`; ``None`` is off.
    """

    sample_unit = "tokens"
    """Unit of a sample's contents."""
    model: nn.Module | None
    """The network, set by a subclass; if ``None``, ``configure_model`` builds it on the meta device."""

    def __init__(
        self,
        seq_len: int,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int | None = 20,
        schedule_steps: int | None = None,
        final_lr_factor: float | None = 0.1,
        float8: str | None = None,
    ) -> None:
        super().__init__()
        self.seq_len, self.float8 = seq_len, float8
        self.optimizer_factory = optimizer or partial(AdamW, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.warmup_steps = warmup_steps
        self.schedule_steps = schedule_steps
        self.final_lr_factor = final_lr_factor

    @property
    def units_per_sample(self) -> int:
        """Trained tokens per window."""
        return self.seq_len

    def build(self) -> nn.Module:
        """Return a new network on the default device."""
        raise NotImplementedError

    def make_model(self) -> nn.Module:
        """Build the network, with linear layers in float8 if requested."""
        network = self.build()
        if self.float8 is not None:
            to_float8(network, self.float8)
        return network

    def configure_model(self) -> None:
        """Build the network on the meta device, once, if requested."""
        if self.model is None:
            with torch.device("meta"):
                self.model = self.make_model()

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next token."""
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss in nats per token of windows ``(B, T + 1)``."""
        # One call including the mean: layouts that split logits compute their part of it.
        loss = F.cross_entropy(*self._logits_and_targets(batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_bpb``."""
        self._log_held_out("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_bpb``."""
        self._log_held_out("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return bits per token of windows ``(B, T + 1)``, float32 ``(B,)``."""
        return self._losses(batch).mean(dim=1) / math.log(2)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with weight decay on matrices only, and a schedule stepped every optimizer step."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = build_optimizer(self, self.optimizer_factory, [group for group in groups if group["params"]])
        if self.warmup_steps is None and self.final_lr_factor is None:
            return optimizer
        schedule = RunSchedule(
            "cosine",
            self.warmup_steps or 0,
            final_factor=1.0 if self.final_lr_factor is None else self.final_lr_factor,
            total_steps=self.schedule_steps,
        )
        if schedule.total_steps is None:
            schedule = schedule.of_run(self.trainer.estimated_stepping_batches)
        rates = LambdaLR(optimizer, schedule.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    def _losses(self, windows: Tensor) -> Tensor:
        """Return nats per token, float32 ``(B, T)``, of windows ``(B, T + 1)``."""
        return F.cross_entropy(*self._logits_and_targets(windows), reduction="none").view(len(windows), -1)

    def _logits_and_targets(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 logits ``(B * T, V)`` and next ids ``(B * T,)`` of windows ``(B, T + 1)``."""
        ids = windows.long()
        logits_BTV: Tensor = self(ids[:, :-1])  # noqa: N806
        return logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten()

    def _log_held_out(self, stage: str, batch: Tensor) -> None:
        # Windows have equal length, so the mean over windows is the exact mean over tokens.
        loss = self._losses(batch).mean()
        shared: dict[str, Any] = {"batch_size": len(batch), "sync_dist": True}
        self.log(f"{stage}_loss", loss, **shared)
        self.log(f"{stage}_bpb", loss / math.log(2), prog_bar=True, **shared)
