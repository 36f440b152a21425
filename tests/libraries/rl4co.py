"""rl4co: policies of routing problems, trained with policy gradients on batches that are a ``TensorDict``.

Tours are decoded greedily where the library would sample them, so that they are those of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from rl4co.data.dataset import TensorDictDataset
from rl4co.envs import CVRPEnv, TSPEnv
from rl4co.models.zoo import POMO, AttentionModel
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SAMPLES, CITIES, BATCH = 24, 8, 8
# A critic is made for embeddings of this size only.
POLICY = {
    "embed_dim": 128,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "feedforward_hidden": 64,
    "normalization": "instance",
    "train_decode_type": "greedy",
}


def problems(depot: bool) -> TensorDictDataset:
    """Places of cities, with a depot and demands where goods are delivered."""
    generator = torch.Generator().manual_seed(11)
    found = {"locs": torch.rand(SAMPLES, CITIES, 2, generator=generator)}
    if depot:
        found["depot"] = torch.rand(SAMPLES, 2, generator=generator)
        found["demand"] = torch.randint(1, 10, (SAMPLES, CITIES), generator=generator) / 20
        found["capacity"] = torch.ones(SAMPLES, 1)
    return TensorDictDataset(TensorDict(found, batch_size=[SAMPLES]))


def loader(depot: bool, batch: int, shuffled: bool) -> DataLoader:
    data = problems(depot)
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=data.collate_fn)


def model(kind: Any, env: Any, **options: Any) -> Any:
    """A module, whose own data sets are not used."""
    sizes = dict.fromkeys(("train_data_size", "val_data_size", "test_data_size", "batch_size"), BATCH)
    made = env(generator_params={"num_loc": CITIES}, seed=0)
    return kind(made, policy_kwargs=POLICY, optimizer="SGD", optimizer_kwargs={"lr": 1e-4}, **sizes, **options)


# The environment and the policy are among the hyperparameters. Only the first is shuffled and loaded.
routes = partial(rows_of, predicts=False, loads=lambda: {"weights_only": False})
ROWS = [
    *routes(
        "AttentionModel, no baseline", partial(model, AttentionModel, TSPEnv, baseline="no"), partial(loader, False)
    ),
    *routes(
        "AttentionModel, critic",
        partial(model, AttentionModel, CVRPEnv, baseline="critic"),
        partial(loader, True),
    )[:1],
    *routes(
        "POMO",
        partial(model, POMO, TSPEnv, num_augment=1),
        partial(loader, False),
        # Without a graph context its policy has parameters that nothing uses.
        options={"ddp": {"find_unused_parameters": True}},
    )[:1],
]
