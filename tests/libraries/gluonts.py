"""gluonts: the Lightning modules of its estimators, on windows of generated series.

Their ``forward`` takes keyword arguments, which the library's own ``predict`` gives; prediction isn't tried.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule
from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule
from gluonts.torch.model.simple_feedforward.lightning_module import SimpleFeedForwardLightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SAMPLES, PAST, FUTURE, WIDTH, SERIES = 24, 8, 4, 16, 6
LAGS = [1, 2]
DEEPAR: dict[str, Any] = {
    "freq": "D",
    "context_length": PAST - max(LAGS),
    "prediction_length": FUTURE,
    "cardinality": [SERIES],
    "hidden_size": WIDTH,
    "dropout_rate": 0.0,
    "lags_seq": LAGS,
}
PATCHES: dict[str, Any] = {
    "prediction_length": FUTURE,
    "context_length": PAST,
    "patch_len": 4,
    "stride": 2,
    "padding_patch": "end",
    "d_model": WIDTH,
    "nhead": 4,
    "dim_feedforward": 2 * WIDTH,
    "num_feat_dynamic_real": 0,
    "dropout": 0.0,
    "activation": "relu",
    "norm_first": False,
    "num_encoder_layers": 2,
    "scaling": "mean",
}
FEEDFORWARD: dict[str, Any] = {
    "prediction_length": FUTURE,
    "context_length": PAST,
    "hidden_dimensions": [WIDTH, WIDTH, WIDTH],
}


@cache
def windows() -> list[dict[str, Tensor]]:
    """What the estimators' loaders give of a window: its past, its future, the time, and the series' number."""
    generator = torch.Generator().manual_seed(11)
    time = torch.arange(PAST + FUTURE, dtype=torch.float)
    found = []
    for number in range(SAMPLES):
        values = 2 + torch.sin((time + number) / 3) + 0.1 * torch.randn(len(time), generator=generator)
        found.append(
            {
                "past_target": values[:PAST],
                "past_observed_values": torch.ones(PAST),
                "past_time_feat": time[:PAST, None] / len(time),
                "future_target": values[PAST:],
                "future_observed_values": torch.ones(FUTURE),
                "future_time_feat": time[PAST:, None] / len(time),
                "feat_static_cat": torch.tensor([number % SERIES]),
                "feat_static_real": torch.zeros(1),
            }
        )
    return found


def loader(batch: int, shuffled: bool) -> DataLoader:
    return DataLoader(windows(), batch, sampler=order(windows(), shuffled))  # type: ignore[arg-type]


class Descending(PatchTSTLightningModule):
    """Biases of keys have gradients of rounding only, which the library's Adam would enlarge."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def of(name: str, kind: type, options: dict[str, Any]) -> list[Any]:
    given = {"model_kwargs": options, "lr": 1e-2}
    return rows_of(
        name,
        partial(kind, **given),
        loader,
        predicts=False,
        loads=lambda: given,
    )


ROWS = [
    *of("SimpleFeedForward", SimpleFeedForwardLightningModule, FEEDFORWARD),
    *of("DeepAR", DeepARLightningModule, DEEPAR),
    *of("PatchTST", Descending, PATCHES),
]
