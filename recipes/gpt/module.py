"""Module of the ``gpt`` recipe: a byte-level language model."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.recipes.language_model import LanguageModule, OptimizerFactory


class GPTModule(LanguageModule):
    """Next-byte prediction on windows of text.

    Logs ``train_loss`` (nats per byte of this rank's micro-batch), and over all held-out windows ``val_loss`` and
    ``val_bpb`` (bits per byte), likewise ``test_loss`` and ``test_bpb``.

    Args:
        config: sizes of the model; ``None``: the size ``nano``.
        optimizer: takes parameters (or parameter groups) and returns the optimizer; ``None``: AdamW with learning rate
            4e-3, betas (0.9, 0.95), weight decay 0.1. Weight decay always applies to matrices only.
        warmup_steps: optimizer steps of linear warm-up; 0 or ``None`` is off.
        schedule_steps: optimizer steps until the cosine reaches ``final_lr_factor``; ``None``: the run's own length.
        final_lr_factor: learning rate at the end as a part of the peak; 1 or ``None`` is off.
        meta: build the model in ``configure_model`` without memory (``torch.device("meta")``), for strategies that
            initialize it shard by shard; ``False`` builds it in the constructor.
        float8: see :func:`~trainwright.recipes.float8.to_float8`; ``None`` is off.
    """

    config_class: type[GPTConfig] = GPTConfig

    def __init__(
        self,
        config: GPTConfig | None = None,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int | None = 20,
        schedule_steps: int | None = None,
        final_lr_factor: float | None = 0.1,
        meta: bool = False,
        float8: str | None = None,
    ) -> None:
        sizes = config or self.config_class()
        super().__init__(sizes.seq_len, optimizer, warmup_steps, schedule_steps, final_lr_factor, float8)
        self.config = sizes
        self.model: GPT | None = None if meta else cast("GPT", self.make_model())

    def build(self) -> GPT:
        """Return a new network of the configured sizes."""
        return GPT(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next byte."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(tokens_BT)  # noqa: N806
        return logits_BTV
