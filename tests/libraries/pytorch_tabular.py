"""pytorch-tabular: the Lightning modules that its ``TabularModel`` builds, on the data set that it builds.

Their batches are dictionaries, of which ``forward`` returns one; predicting is left to the library's own ``predict``.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SAMPLES, WIDTH = 24, 16


@cache
def table() -> pd.DataFrame:
    """Two columns of numbers, two of categories, and a number to predict."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=(SAMPLES, 2))
    return pd.DataFrame(
        {
            "first": numbers[:, 0],
            "second": numbers[:, 1],
            "kind": [f"kind {number % 3}" for number in range(SAMPLES)],
            "place": [f"place {number % 4}" for number in range(SAMPLES)],
            "target": numbers.sum(axis=1) + 0.1 * random.normal(size=SAMPLES),
        }
    )


def tabular(config: Any) -> tuple[Any, Any]:
    """Return a model of tables and its data module."""
    columns = DataConfig(target=["target"], continuous_cols=["first", "second"], categorical_cols=["kind", "place"])
    trainer = TrainerConfig(accelerator="cpu", checkpoints=None, load_best=False, progress_bar="none")
    optimizer = OptimizerConfig(optimizer="SGD", optimizer_params={"momentum": 0.9})
    made = TabularModel(
        data_config=columns, model_config=config(), optimizer_config=optimizer, trainer_config=trainer, verbose=False
    )
    return made, made.prepare_dataloader(train=table(), validation=table(), seed=0)


def network(config: Any) -> Any:
    made, data = tabular(config)
    return made.prepare_model(data)


def configured(config: Any) -> dict[str, Any]:
    """Return what the library's own ``load_model`` reads from files beside the checkpoint."""
    made, data = tabular(config)
    return {"config": made.config, "inferred_config": OmegaConf.structured(data.update_config(made.config))}


def loader(config: Any, batch: int, shuffled: bool) -> DataLoader:
    data = tabular(config)[1].train_dataset
    return DataLoader(data, batch, sampler=order(data, shuffled))


def of(name: str, kind: Any, **options: Any) -> list[Any]:
    config = partial(kind, task="regression", learning_rate=0.05, **options)
    return rows_of(
        name,
        partial(network, config),
        partial(loader, config),
        predicts=False,
        loads=partial(configured, config),
        package="pytorch_lightning",
    )


ROWS = [
    *of("CategoryEmbeddingModel", CategoryEmbeddingModelConfig, layers="32-16", batch_norm_continuous_input=False),
    *of(
        "FTTransformerModel",
        FTTransformerConfig,
        input_embed_dim=WIDTH,
        num_heads=4,
        num_attn_blocks=2,
        attn_dropout=0.0,
        add_norm_dropout=0.0,
        ff_dropout=0.0,
        batch_norm_continuous_input=False,
    ),
]
