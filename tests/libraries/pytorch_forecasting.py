"""pytorch-forecasting: its networks on generated series.

Their ``predict_step`` needs a callback of the library's own ``predict``, so prediction isn't tried.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from pytorch_forecasting import (
    DecoderMLP,
    DeepAR,
    NBeats,
    NHiTS,
    RecurrentNetwork,
    TemporalFusionTransformer,
    TiDEModel,
    TimeSeriesDataSet,
)
from pytorch_forecasting.data.encoders import TorchNormalizer
from pytorch_forecasting.metrics import MAE, RMSE, NormalDistributionLoss, QuantileLoss
from torch import nn
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SERIES, STEPS, PAST, FUTURE = 4, 24, 8, 4


@cache
def series(covariates: bool) -> TimeSeriesDataSet:
    """Sines with noise; with ``covariates`` also the time and the series' name."""
    random = np.random.default_rng(0)
    parts = [
        pd.DataFrame(
            {
                "time": np.arange(STEPS),
                "name": f"series {number}",
                "value": 2 + np.sin(np.arange(STEPS) / (number + 1)) + 0.1 * random.normal(size=STEPS),
            }
        )
        for number in range(SERIES)
    ]
    known: dict[str, Any] = {"static_categoricals": ["name"], "time_varying_known_reals": ["time"]}
    return TimeSeriesDataSet(
        pd.concat(parts, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["name"],
        min_encoder_length=PAST,
        max_encoder_length=PAST,
        min_prediction_length=FUTURE,
        max_prediction_length=FUTURE,
        time_varying_unknown_reals=["value"],
        target_normalizer=TorchNormalizer(),
        **(known if covariates else {}),
    )


def loader(covariates: bool, batch: int, shuffled: bool) -> DataLoader:
    data = series(covariates)
    made: DataLoader = data.to_dataloader(train=False, batch_size=batch, sampler=order(data, shuffled))
    return made


def network(kind: Any, covariates: bool, **options: Any) -> Any:
    # Its Adam with an epsilon that keeps rounding from growing into steps.
    stable = {"learning_rate": 1e-2, "optimizer_params": {"eps": 1e-4}}
    return kind.from_dataset(series(covariates), **stable, **options)


alone = partial(rows_of, make_loader=partial(loader, False), predicts=False)
known = partial(rows_of, make_loader=partial(loader, True), predicts=False)
ROWS = [
    *alone(
        "NBeats",
        partial(
            network,
            NBeats,
            False,
            widths=[16, 16],
            num_blocks=[2, 2],
            num_block_layers=[2, 2],
            expansion_coefficient_lengths=[2, 4],
        ),
    ),
    *known("NHiTS", partial(network, NHiTS, True, hidden_size=16, dropout=0.0)),
    *known(
        "TemporalFusionTransformer",
        lambda: network(
            TemporalFusionTransformer,
            True,
            hidden_size=8,
            hidden_continuous_size=4,
            attention_head_size=2,
            dropout=0.0,
            loss=QuantileLoss([0.1, 0.5, 0.9]),
            output_size=3,
            logging_metrics=nn.ModuleList([MAE(), RMSE()]),
        ),
    ),
    # Its metrics are of samples that it draws.
    *known(
        "DeepAR",
        lambda: network(
            DeepAR,
            True,
            hidden_size=8,
            rnn_layers=2,
            dropout=0.0,
            loss=NormalDistributionLoss(),
            logging_metrics=nn.ModuleList([]),
        ),
    ),
    *known("DecoderMLP", partial(network, DecoderMLP, True, hidden_size=16, n_hidden_layers=3, dropout=0.0)),
    *known("RecurrentNetwork", partial(network, RecurrentNetwork, True, hidden_size=8, dropout=0.0)),
    *known("TiDEModel", partial(network, TiDEModel, True, hidden_size=8, dropout=0.0)),
]
