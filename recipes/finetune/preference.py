"""Direct preference optimization (DPO) on pairs of answers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.recipes.finetune.data import TokenRows
from trainwright.recipes.finetune.module import Batch, FineTuneModule

_CHECKPOINT_KEY = "reference_log_probabilities"


class PreferenceModule(FineTuneModule):
    """DPO (Rafailov et al., 2023, equation 7) on pairs of answers in the two halves of rows, the chosen one first.

    The reference is the model at the start of training. Its log-probabilities are computed once, distributed over the
    data ranks, and stored in checkpoints. Logs ``train_loss`` and, for validation pairs, ``val_loss``, ``val_accuracy``
    (the fraction of pairs whose chosen answer gained more than the rejected one) and ``val_margin`` (mean difference of
    gains, in nats, times ``beta``).

    Args:
        beta: strength of the constraint to the reference, more than 0.
        **options: see :class:`~trainwright.recipes.finetune.module.FineTuneModule`.

    Raises:
        ValueError: if ``beta`` is not more than 0.
    """

    def __init__(self, beta: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        if beta <= 0:
            raise ValueError(f"beta={beta} (allowed: more than 0). Type module.beta=0.1")
        self.beta = beta
        self._reference: dict[str, Tensor] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        """Return the mean loss of the pairs."""
        loss = F.softplus(-self._margins(batch, "train")).mean()
        self.log("train_loss", loss)
        return loss

    def on_train_start(self) -> None:
        """Compute the log-probabilities of the reference, unless loaded from a checkpoint."""
        super().on_train_start()
        self._compute_reference()

    def on_validation_start(self) -> None:
        """Compute the log-probabilities of the reference, unless loaded from a checkpoint."""
        self._compute_reference()

    def on_test_start(self) -> None:
        """Compute the log-probabilities of the reference, unless loaded from a checkpoint."""
        self._compute_reference()

    def _compute_reference(self) -> None:
        if self._reference:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for stage, rows in (("train", data.train), ("val", data.validation)):
            self._reference[stage] = self._reference_of(rows, data.batch_size)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the log-probabilities of the reference."""
        checkpoint[_CHECKPOINT_KEY] = {stage: values.cpu() for stage, values in self._reference.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the log-probabilities of the reference."""
        self._reference = dict(checkpoint[_CHECKPOINT_KEY])

    def _reference_of(self, rows: TokenRows, batch_size: int) -> Tensor:
        """Return log-probabilities of all rows, ``(rows, 2)``; each data rank computes every n-th, all equally many."""
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        own = range(place["rank"], len(rows), place["num_replicas"])
        padded = [*own, *[0] * (math.ceil(len(rows) / place["num_replicas"]) - len(own))]
        nats = self.losses_of(rows, padded, batch_size)[: len(own)]
        found = torch.zeros(len(rows), 2, device=self.device)
        for number, values in zip(own, nats, strict=True):
            found[number] = -values.view(2, -1).sum(dim=1)
        summed: Tensor = self.trainer.strategy.reduce(found, reduce_op="sum")
        return summed

    def _margins(self, batch: Batch, stage: str) -> Tensor:
        """Return the difference of the answers' gains in nats, times beta, ``(B,)``."""
        stage = "train" if stage == "train" else "val"  # test rows are the validation rows
        self._reference[stage] = self._reference[stage].to(self.device)
        log_probabilities = -self._nats(batch).view(len(batch["labels"]), 2, -1).sum(dim=2)
        gains = log_probabilities - self._reference[stage][batch["number"]]
        return self.beta * (gains[:, 0] - gains[:, 1])

    def _log_held_out(self, stage: str, batch: Batch) -> None:  # type: ignore[override]
        margins = self._margins(batch, stage)
        shared: dict[str, Any] = {"batch_size": len(margins), "sync_dist": True}
        self.log(f"{stage}_loss", F.softplus(-margins).mean(), **shared)
        self.log(f"{stage}_accuracy", (margins > 0).float().mean(), prog_bar=True, **shared)
        self.log(f"{stage}_margin", margins.mean(), **shared)

    def _log_perplexity(self, stage: str) -> None:
        """Do nothing: pairs have no perplexity."""
