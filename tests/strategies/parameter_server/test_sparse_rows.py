"""Sparse gradients of embedding tables."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything

from tests.parity.harness import QUIET
from trainwright import Trainer
from trainwright.recipes.tables.wide_deep import ClickData, WideDeep
from trainwright.strategies.parameter_server.messages.sparse_rows import pack_rows, touched_rows, unpack_rows
from trainwright.strategies.parameter_server.server import sharder
from trainwright.strategies.parameter_server.server.shard import refuse_unserved
from trainwright.strategies.parameter_server.server.sharder import places, share_out
from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy
from trainwright.strategies.parameter_server.worker.deferred_pull import put_slices
from trainwright.strategies.parameter_server.worker.overlapped_push import rows

SHAPES = [(40, 3), (7,), (30, 2, 2), (), (5, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_pack_and_unpack_rows(dtype: torch.dtype, sparse: bool) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    for table, kept in ((0, [2, 3, 39]), (2, [])):
        keep = torch.zeros_like(gradients[table])
        keep[kept] = gradients[table][kept]
        gradients[table] = keep.to_sparse(1) if sparse else keep
    found = [torch.zeros_like(each.to_dense()) for each in gradients]
    for pieces in share_out(SHAPES, 2):
        few = [touched_rows(gradients[p.parameter], p) if p.parameter in (0, 2) else None for p in pieces]
        flat = torch.cat([rows(gradients[piece.parameter], piece).flatten() for piece in pieces])
        unread = flat.clone()
        for (_, place), each in zip(places(pieces, unread), few, strict=True):
            if each is not None:
                place.fill_(float("nan"))
        message = pack_rows(unread, pieces, few)
        assert torch.equal(unpack_rows(message, pieces, dtype), flat)
        assert message.numel() < flat.nbytes + 8 * len(pieces)
        put_slices(pieces, flat, found)
    assert all(torch.equal(a, b.to_dense()) for a, b in zip(found, gradients, strict=True))


def test_dense_rows_and_missing_rows() -> None:
    (pieces,) = share_out([(6, 4)], 1)
    assert touched_rows(torch.ones(6, 4), pieces[0]) is None
    gradient = torch.zeros(6, 4)
    gradient[5] = 1
    few = touched_rows(gradient, pieces[0])
    assert few is not None
    message = pack_rows(torch.zeros(24), pieces, [few._replace(numbers=torch.tensor([6]))])
    with pytest.raises(ValueError, match="rows 6 to 6 were pushed for a slice of 6 rows"):
        unpack_rows(message, pieces, torch.float32)


class Losses(Callback):
    looks_at_parameters = False

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.pushed = self.early = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.early += _pushed(trainer) - self.pushed

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.pushed = _pushed(trainer)


def _pushed(trainer: Any) -> int:
    client = getattr(trainer.strategy, "client", None)
    return 0 if client is None else client.sent_bytes


def fit(strategy: Any, sparse: bool = False, **options: Any) -> dict[str, Any]:
    seed_everything(0)
    losses, module = Losses(), WideDeep(sparse=sparse, rows=1024, wide_rows=4096, dim=8, hidden=(16,))
    trainer = Trainer(
        strategy=strategy(**options) if callable(strategy) else strategy,
        devices=dist.get_world_size(),
        max_steps=5,
        callbacks=[losses],
        limit_val_batches=0,
        gradient_clip_val=None if sparse else 0.5,
        **QUIET,
    )
    with patch.object(sharder, "LEAST_NUMEL", 64):  # several parts, pushed during backward
        trainer.fit(module, ClickData(16, samples=400))
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    return {"losses": losses.losses, "pushed": losses.pushed, "early": losses.early, "weights": weights}


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_push_touched_rows_and_match_ddp(ranks: Callable[..., list[Any]], sparse: bool) -> None:
    expected = ranks(fit, 2, "ddp", sparse)
    found = ranks(fit, 2, ParameterServerStrategy, sparse, servers=2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        for name, weight in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-5, atol=1e-7)
        dense = 5 * 4 * sum(weight.numel() for weight in theirs["weights"].values())
        # Of 1,024 rows of a table, a batch of 16 touches 16 at most.
        assert ours["pushed"] < dense / 10
        assert 0 < ours["early"] < ours["pushed"]


def test_sparse_adam_is_refused():
    table = torch.nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients only.*Use Adagrad"):
        refuse_unserved(torch.optim.SparseAdam(list(table.parameters())))
