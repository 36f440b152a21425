"""neuralforecast: its networks, trained directly; each batch is of series, of which all windows are read."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import numpy as np
import pandas as pd
import torch
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import LSTM, NHITS, PatchTST
from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

from tests.libraries.base import order, rows_of

SERIES, STEPS, PAST, FUTURE, WIDTH = 24, 24, 8, 4, 16


@cache
def series() -> TimeSeriesDataset:
    """Sines with noise."""
    random = np.random.default_rng(0)
    parts = [
        pd.DataFrame(
            {
                "unique_id": f"series {number:02}",
                "ds": np.arange(STEPS),
                "y": 2 + np.sin(np.arange(STEPS) / (1 + number / 8)) + 0.1 * random.normal(size=STEPS),
            }
        )
        for number in range(SERIES)
    ]
    found: TimeSeriesDataset = TimeSeriesDataset.from_df(pd.concat(parts, ignore_index=True))[0]
    return found


def loader(batch: int, shuffled: bool) -> TimeSeriesLoader:
    return TimeSeriesLoader(series(), batch_size=batch, sampler=order(series(), shuffled))


def network(kind: type, **options: Any) -> Any:
    """A network that holds back the last steps for validation; no windows are drawn at random."""
    made = kind(
        h=FUTURE,
        input_size=PAST,
        windows_batch_size=None,
        inference_windows_batch_size=-1,
        step_size=1,
        loss=MAE(),
        max_steps=3,
        scaler_type="standard",
        **options,
    )
    made.val_size, made.predict_step_size = FUTURE, 1
    return made


built = partial(rows_of, make_loader=loader, loads=lambda: {"weights_only": False}, package="pytorch_lightning")
ROWS = [
    *built("NHITS", partial(network, NHITS, mlp_units=3 * [[WIDTH, WIDTH]])),
    *built(
        "PatchTST",
        partial(
            network,
            PatchTST,
            hidden_size=WIDTH,
            linear_hidden_size=2 * WIDTH,
            n_heads=4,
            encoder_layers=2,
            patch_len=4,
            stride=2,
            dropout=0.0,
            attn_dropout=0.0,
            fc_dropout=0.0,
            head_dropout=0.0,
            # Biases of keys have gradients of rounding only, which Adam would enlarge.
            optimizer=torch.optim.SGD,
            optimizer_kwargs={"momentum": 0.9},
            learning_rate=0.01,
        ),
        batch_norm=True,
    ),
    *built("LSTM", partial(network, LSTM, encoder_hidden_size=WIDTH, decoder_hidden_size=WIDTH, encoder_dropout=0.0)),
]
