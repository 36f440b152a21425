"""pyannote-audio: networks that segment audio, trained by a task that holds the step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyannote.audio.core.task import Problem, Resolution, Specifications, Task
from pyannote.audio.models.segmentation import PyanNet
from pyannote.database.protocol import SpeakerDiarizationProtocol
from torch.utils.data import DataLoader, Dataset

from tests.libraries.base import order, rows_of
from tests.libraries.damped import Damped

SAMPLES, RATE, SECONDS = 24, 16000, 0.25


class Nothing(SpeakerDiarizationProtocol):
    """A protocol without files; loaders are given to the Trainer."""

    name = "generated"

    def train_iter(self) -> Any:
        yield {"waveform": None, "sample_rate": RATE, "scope": "global", "annotation": None, "annotated": None}


class Activity(Task):
    """Detects which of two sounds are heard in each frame, with the library's own step and loss."""

    def __init__(self) -> None:
        super().__init__(Nothing(), duration=SECONDS, num_workers=0)
        self.specifications = Specifications(
            problem=Problem.MULTI_LABEL_CLASSIFICATION,
            resolution=Resolution.FRAME,
            duration=SECONDS,
            classes=["low", "high"],
        )

    def prepare_data(self) -> None:
        """Nothing."""

    def setup(self, stage: str | None = None) -> None:
        """Nothing."""

    def setup_validation_metric(self) -> None:
        """The loss is logged."""


class Sounds(Dataset):
    """Noise, and where it is loud."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        length = int(RATE * SECONDS)
        self.sounds = torch.randn(SAMPLES, 1, length, generator=generator)
        frames = PyanNet(sample_rate=RATE).num_frames(length)
        self.targets = torch.randint(2, (SAMPLES, frames, 2), generator=generator).float()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"X": self.sounds[index], "y": self.targets[index]}


def loader(batch: int, shuffled: bool) -> DataLoader:
    data = Sounds()
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


class Segmenter(Damped, PyanNet):
    """Otherwise as it is."""


def network(**options: Any) -> Any:
    lstm, linear = {"hidden_size": 16, "num_layers": 2, **options}, {"hidden_size": 16, "num_layers": 2}
    return Segmenter(sample_rate=RATE, lstm=lstm, linear=linear, task=Activity())


# The specifications of the task are in the checkpoint. Only the first is shuffled and loaded.
frames = partial(rows_of, make_loader=loader, predicts=False, loads=lambda: {"weights_only": False})
ROWS = [*frames("PyanNet", network), *frames("PyanNet, layer by layer", partial(network, monolithic=False))[:1]]
