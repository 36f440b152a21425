"""The ``gpt`` recipe's module: a byte-level language model as an ordinary LightningModule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainwright.recipes.gpt_model import GPT, GPTConfig
from trainwright.recipes.schedule import learning_rate_factor

OptimizerFactory = Callable[[Any], Optimizer]


class Prefix(NamedTuple):
    """A batch that asks ``predict_step`` for the logits of the bytes after ``ids_BT``, integer ``(B, T)``."""

    ids_BT: Tensor  # noqa: N815


class GPTModule(LightningModule):
    """Next-byte prediction on windows of text.

    Logs ``train_loss`` (nats per byte of this rank's micro-batch), and over all held-out windows ``val_loss`` and
    ``val_bpb`` (bits per byte), likewise ``test_loss`` and ``test_bpb``.

    Args:
        config: sizes of the model; ``None``: the size ``nano``.
        optimizer: takes parameters (or parameter groups) and returns the optimizer; ``None``: AdamW with learning rate
            4e-3, betas (0.9, 0.95), weight decay 0.1. Weight decay, whoever sets it, is for matrices only.
        warmup_steps: optimizer steps of linear warm-up; 0 is off.
        schedule_steps: optimizer steps until the cosine reaches ``final_lr_factor``; ``None``: the run's own length.
        final_lr_factor: learning rate at the end as a part of the peak; 1 is off.
        meta: build the model in ``configure_model`` without memory (``torch.device("meta")``), for a strategy that
            fills it in shard by shard; ``False`` builds it here, as any module does.
    """

    sample_unit = "tokens"
    """What a sample consists of; a byte is a token here."""

    def __init__(
        self,
        config: GPTConfig | None = None,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 20,
        schedule_steps: int | None = None,
        final_lr_factor: float = 0.1,
        meta: bool = False,
    ) -> None:
        super().__init__()
        self.config = config or GPTConfig()
        self.optimizer_factory = optimizer or partial(AdamW, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.warmup_steps = warmup_steps
        self.schedule_steps = schedule_steps
        self.final_lr_factor = final_lr_factor
        self.model: GPT | None = None if meta else GPT(self.config)

    @property
    def units_per_sample(self) -> int:
        """Tokens that a window trains."""
        return self.config.seq_len

    def configure_model(self) -> None:
        """Build the model on the meta device, once, when that was asked for."""
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next byte."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(tokens_BT)  # noqa: N806
        return logits_BTV

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean loss in nats per byte of windows ``(B, T + 1)``."""
        loss = self._losses(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_bpb``."""
        self._log_held_out("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_bpb``."""
        self._log_held_out("test", batch)

    def predict_step(self, batch: Tensor | Prefix, batch_idx: int) -> Tensor:
        """Bits per byte of each window, float32 ``(B,)``; for a :class:`Prefix` the logits, ``(B, T, V)``."""
        if isinstance(batch, Prefix):
            logits_BTV: Tensor = self(batch.ids_BT)  # noqa: N806
            return logits_BTV
        return self._losses(batch).mean(dim=1) / math.log(2)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer with weight decay on matrices only, and a learning rate schedule that steps every step."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        optimizer = self.optimizer_factory([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        steps = self.trainer.estimated_stepping_batches if self.schedule_steps is None else self.schedule_steps
        factor = partial(
            learning_rate_factor,
            warmup_steps=self.warmup_steps,
            total_steps=steps,
            final_factor=self.final_lr_factor,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _losses(self, windows: Tensor) -> Tensor:
        """Nats per byte, float32 ``(B, T)``, of windows ``(B, T + 1)``."""
        ids = windows.long()
        logits_BTV = self(ids[:, :-1])  # noqa: N806
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view(
            len(ids), -1
        )

    def _log_held_out(self, stage: str, batch: Tensor) -> None:
        # All windows are equally long, so the mean weighted by windows is the exact mean over the bytes.
        loss = self._losses(batch).mean()
        shared: dict[str, Any] = {"batch_size": len(batch), "sync_dist": True}
        self.log(f"{stage}_loss", loss, **shared)
        self.log(f"{stage}_bpb", loss / math.log(2), prog_bar=True, **shared)
