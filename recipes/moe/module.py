"""Module of the ``moe`` recipe: the ``gpt`` recipe with mixtures of experts as feed-forward layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.moe.model import MoEConfig, MoEGPT


class MoEModule(GPTModule):
    """Next-byte prediction by a mixture of experts.

    Trains on the loss in nats per byte plus ``config.balance`` times the mean load-balancing loss of the blocks, see
    :func:`~trainwright.recipes.moe.model.balance_statistics`. Both are means over sequences, so training does not
    depend on the division of a batch among ranks (except if a strategy splits sequences).

    Logs the metrics of ``GPTModule``, which exclude the load-balancing loss, and for each micro-batch of this rank
    ``balance_loss`` (at best 1) and ``expert_load`` (tokens of the busiest expert relative to the mean, at best 1, at
    worst ``experts / experts_per_token``).

    Args:
        config: sizes of the model; ``None``: the size ``nano`` with 8 experts, 2 per token.
        optimizer, warmup_steps, schedule_steps, final_lr_factor, meta, float8: see
            :class:`~trainwright.recipes.gpt.module.GPTModule`.
    """

    config_class = MoEConfig
    config: MoEConfig
    model: MoEGPT | None

    def build(self) -> MoEGPT:
        """Return a new network of the configured sizes."""
        return MoEGPT(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next byte."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(tokens_BT)[0]  # noqa: N806
        return logits_BTV

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss in nats per byte of windows ``(B, T + 1)``, plus the load-balancing loss."""
        assert self.model is not None, "configure_model has not run"
        ids = batch.long()
        logits_BTV, counted = self.model(ids[:, :-1])  # noqa: N806
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.log_dict({"train_loss": loss, "balance_loss": counted.balance, "expert_load": counted.load})
        return loss + self.config.balance * counted.balance if self.config.balance else loss
