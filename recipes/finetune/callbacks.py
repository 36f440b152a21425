"""Callback that saves the tokenizer of a ``finetune`` run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.recipes.finetune.data import FineTuneData
from trainwright.recipes.finetune.encoding import load_tokenizer


class SaveTokenizer(Callback):
    """Write the tokenizer, with the run's chat template, to ``tokenizer/`` in the run directory."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it on the first rank."""
        data = getattr(trainer, "datamodule", None)
        if trainer.is_global_zero and isinstance(data, FineTuneData):
            tokenizer = load_tokenizer(data.tokenizer_folder, data.chat_template)
            tokenizer.save_pretrained(Path(trainer.default_root_dir) / "tokenizer")
