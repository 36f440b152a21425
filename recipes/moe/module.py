"""The ``moe`` recipe's module: the ``gpt`` recipe with mixtures of experts for feed-forward layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.moe.model import MoEConfig, MoEGPT


class MoEModule(GPTModule):
    """Next-byte prediction by a mixture of experts.

    Trains on the loss in nats per byte plus ``config.balance`` times the mean over the blocks of
    :func:`~trainwright.recipes.moe.model.tally`'s loss of imbalance. Both are means over sequences, so training does
    not depend on how a batch is dealt out to ranks (except where a strategy splits the sequences themselves).

    Logs what ``GPTModule`` logs (``train_loss``, ``val_bpb`` and the others are without
    the imbalance), and of each micro-batch of this rank ``balance_loss`` (1 at best) and ``expert_load`` (tokens of the
    busiest expert over the mean, 1 at best, ``experts / experts_per_token`` at worst).

    Args:
        config: sizes of the model; ``None``: the size ``nano`` with 8 experts, 2 per token.
        optimizer, warmup_steps, schedule_steps, final_lr_factor, meta: see
            :class:`~trainwright.recipes.gpt.module.GPTModule`.
    """

    config_class = MoEConfig
    config: MoEConfig
    model: MoEGPT | None  # type: ignore[assignment]

    def build(self) -> MoEGPT:  # type: ignore[override]
        """A new network of the configured sizes."""
        return MoEGPT(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next byte."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(tokens_BT)[0]  # noqa: N806
        return logits_BTV

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean loss in nats per byte of windows ``(B, T + 1)``, with that of imbalance."""
        assert self.model is not None, "configure_model has not run"
        ids = batch.long()
        logits_BTV, counted = self.model(ids[:, :-1])  # noqa: N806
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.log_dict({"train_loss": loss, "balance_loss": counted.balance, "expert_load": counted.load})
        return loss + self.config.balance * counted.balance if self.config.balance else loss
