"""pytorch-lifestream: targets of sequences of events, which are a ``PaddedBatch``."""

from __future__ import annotations

from functools import partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import torch
import torchmetrics
from ptls.data_load.padded_batch import PaddedBatch
from ptls.frames.supervised import SequenceToTarget
from ptls.nn import RnnSeqEncoder, TransformerSeqEncoder, TrxEncoder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.libraries.base import order, rows_of

SAMPLES, EVENTS, KINDS, DIM = 24, 6, 10, 16


def collate(samples: list[tuple[Tensor, ...]]) -> tuple[PaddedBatch, Tensor]:
    kinds, amounts, lengths, targets = map(torch.stack, zip(*samples, strict=True))
    return PaddedBatch({"kind": kinds, "amount": amounts}, lengths), targets


def loader(batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(2, EVENTS + 1, (SAMPLES,), generator=generator)
    is_real = torch.arange(EVENTS) < lengths[:, None]
    kinds = torch.randint(1, KINDS, (SAMPLES, EVENTS), generator=generator) * is_real
    amounts = torch.rand(SAMPLES, EVENTS, generator=generator) * is_real
    data = TensorDataset(kinds, amounts, lengths, amounts.sum(dim=1))
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=collate)


def encoder() -> TrxEncoder:
    embeddings = {"kind": {"in": KINDS, "out": DIM - 1}}
    return TrxEncoder(embeddings=embeddings, numeric_values={"amount": "identity"}, use_batch_norm=False)


def recurrent() -> nn.Module:
    return RnnSeqEncoder(trx_encoder=encoder(), hidden_size=DIM, type="gru")


def attending() -> nn.Module:
    return TransformerSeqEncoder(
        trx_encoder=encoder(),
        input_size=DIM,
        n_heads=4,
        dim_hidden=32,
        n_layers=2,
        dropout=0.0,
        use_start_random_shift=False,
        is_reduce_sequence=True,
    )


def module(sequences: Any) -> Any:
    return SequenceToTarget(
        sequences(),
        head=nn.Sequential(nn.Linear(DIM, 1), nn.Flatten(start_dim=0)),
        loss=nn.MSELoss(),
        metric_list=torchmetrics.MeanSquaredError(),
        optimizer_partial=partial(torch.optim.Adam, lr=1e-3, eps=1e-4),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )


def parts(sequences: Any) -> dict[str, Any]:
    """What load_from_checkpoint() asks for."""
    head = nn.Sequential(nn.Linear(DIM, 1), nn.Flatten(start_dim=0))
    return {"seq_encoder": sequences(), "head": head, "metric_list": torchmetrics.MeanSquaredError()}


def targets(name: str, sequences: Any) -> list[Any]:
    return rows_of(
        f"SequenceToTarget, {name}",
        partial(module, sequences),
        loader,
        predicts=False,
        loads=partial(parts, sequences),
        package="pytorch_lightning",
    )


# Only the first is shuffled and loaded.
ROWS = [*targets("transformer", attending), *targets("GRU", recurrent)[:1]]
