"""Prompts as data of ``predict``, and their continuations as predictions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from trainwright.recipes.generation.generate import generate
from trainwright.recipes.generation.sampling import Sampling


class Prompts(NamedTuple):
    """A batch of prompts."""

    ids: list[list[int]]
    """Token ids of each prompt."""
    indices: list[int]
    """Global index of each prompt."""


class PromptData(LightningDataModule):
    """Texts for ``predict``, tokenized by another data module.

    Args:
        prompts: texts of at least one token.
        data: with ``encode(text)`` and ``decode(ids)``; not set up.
        sampling: how prompts are continued.
        batch_size: prompts per rank and batch.

    Raises:
        TypeError: if ``data`` has no ``encode`` or ``decode``.
    """

    def __init__(self, prompts: Sequence[str], data: Any, sampling: Sampling, batch_size: int = 8) -> None:
        super().__init__()
        for name in ("encode", "decode"):
            if not callable(getattr(data, name, None)):
                raise TypeError(
                    f"{type(data).__name__} has no method {name!r}, which turns text into token ids or back."
                )
        self.prompts, self.sampling, self.batch_size = list(prompts), sampling, batch_size
        self.encode, self.decode = data.encode, data.decode

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the prompts in order, in batches of :class:`Prompts`."""
        samples: Any = [(self.encode(text), index) for index, text in enumerate(self.prompts)]
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=_collated)


def _collated(samples: Sequence[tuple[list[int], int]]) -> Prompts:
    return Prompts([ids for ids, _ in samples], [index for _, index in samples])


class ContinuePrompts(Callback):
    """Make ``predict`` continue the prompts of :class:`PromptData` instead of running the module's ``predict_step``.

    A prediction is a dict: ``new`` and ``tokens`` are the new text and number of new tokens of each prompt, ``seconds``
    the begin and end of the batch (``time.time``).
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the module's ``predict_step``."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]

        def predict_step(batch: Prompts, batch_idx: int) -> dict[str, Any]:
            began = time.time()
            found = generate(pl_module, batch.ids, data.sampling, batch.indices)
            texts = [data.decode(ids) for ids in found]
            return {"new": texts, "tokens": [len(ids) for ids in found], "seconds": (began, time.time())}

        pl_module.__dict__["predict_step"] = predict_step
