"""darts: the Lightning modules that its forecasting models build, on the data sets that they build."""

from __future__ import annotations

from functools import partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import numpy as np
import torch
import torchmetrics
from darts import TimeSeries
from darts.models import NBEATSModel, TiDEModel, TransformerModel
from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

PAST, FUTURE, SAMPLES, WIDTH = 8, 4, 24, 16
# As many steps as give these samples.
STEPS = PAST + FUTURE + SAMPLES - 1


def forecaster(kind: type, **options: Any) -> tuple[Any, Any]:
    """Return a forecasting model and its data set."""
    values = 2 + np.sin(np.arange(STEPS) / 3) + 0.1 * np.random.default_rng(0).normal(size=STEPS)
    made = kind(
        input_chunk_length=PAST,
        output_chunk_length=FUTURE,
        random_state=0,
        torch_metrics=torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()]),
        **options,
    )
    _, fitted = made._setup_for_fit_from_dataset(TimeSeries.from_values(values.astype(np.float32)))
    return made, fitted


def network(kind: type, **options: Any) -> Any:
    made, fitted = forecaster(kind, **options)
    return made._setup_for_train(**fitted)["model"]


def loader(kind: type, options: dict[str, Any], batch: int, shuffled: bool) -> DataLoader:
    _, fitted = forecaster(kind, **options)
    data = fitted["train_dataset"]
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=_batch_collate_fn_train)


def of(name: str, kind: type, **options: Any) -> list[Any]:
    # Their ``predict_step`` needs a data set and settings of the library's own ``predict``.
    return rows_of(
        name,
        partial(network, kind, **options),
        partial(loader, kind, options),
        predicts=False,
        loads=lambda: {"weights_only": False},
        package="pytorch_lightning",
    )


ROWS = [
    *of("NBEATSModel", NBEATSModel, num_stacks=2, num_layers=2, layer_widths=WIDTH, expansion_coefficient_dim=4),
    *of(
        "TiDEModel", TiDEModel, hidden_size=WIDTH, decoder_output_dim=4, dropout=0.0, use_reversible_instance_norm=True
    ),
    *of(
        "TransformerModel",
        TransformerModel,
        d_model=WIDTH,
        nhead=4,
        dim_feedforward=2 * WIDTH,
        dropout=0.0,
        # Biases of keys have gradients of rounding only, which Adam would enlarge.
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.01, "momentum": 0.9},
    ),
]
