"""A user's project for plain Lightning and transformers, without a mention of layouts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


class MyLlama(pl.LightningModule):
    def __init__(self, layers: int = 4, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.model(input_ids=batch[0], labels=batch[0])
        self.log("train_loss", out.loss, prog_bar=True)
        self.log("lr", self.lr_schedulers().get_last_lr()[0], on_step=True, on_epoch=False)
        return out.loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.model(input_ids=batch[0], labels=batch[0])
        hits = out.logits[:, :-1].argmax(-1) == batch[0][:, 1:]
        self.log_dict({"val_loss": out.loss, "val_accuracy": hits.float().mean()}, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epochs_done", float(self.current_epoch + 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams["lr"], total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MyTokens(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _loader(self, samples: int, seed: int) -> DataLoader:
        starts = torch.randint(64, (samples, 1), generator=torch.Generator().manual_seed(seed))
        return DataLoader(TensorDataset((starts + 3 * torch.arange(12)) % 64), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(16, 1)

    def val_dataloader(self) -> DataLoader:
        return self._loader(8, 2)
