from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class RingsDataModule(L.LightningDataModule):
    """Noisy points on concentric rings, one ring per class, written once below ``data_dir``."""

    def __init__(self, data_dir: str, classes: int, batch_size: int, samples: list[int]) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.train: Dataset[Any] | None = None

    @property
    def file(self) -> Path:
        return Path(self.hparams.data_dir) / "rings.pt"

    def prepare_data(self) -> None:
        if self.file.exists():
            return
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(sum(self.hparams.samples)) % self.hparams.classes
        angles = 6.2832 * torch.rand(len(labels), generator=generator)
        radius = 1 + labels + 0.1 * torch.randn(len(labels), generator=generator)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torch.save([torch.stack((radius * angles.cos(), radius * angles.sin()), 1), labels], self.file)

    def setup(self, stage: str | None = None) -> None:
        if self.train is None:
            samples = TensorDataset(*torch.load(self.file))
            generator = torch.Generator().manual_seed(1)
            self.train, self.val, self.test = random_split(samples, self.hparams.samples, generator)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=self.hparams.batch_size)
