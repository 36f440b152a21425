"""The module and its samples for Trainwright, for every layout; the layout is said on the command line."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, LR, WEIGHT_DECAY, build_model, loss_on, windows


class Module(pl.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, batch_idx):
        """Mean loss."""
        return loss_on(self.model, batch)

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)


class Data(pl.LightningDataModule):
    """The samples, in order."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        """In order."""
        return DataLoader(windows(), batch_size=self.batch_size)
