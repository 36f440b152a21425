from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.communication import AXES, measure_all, module_of
from benchmarks.memory import Ids
from tests.parity.harness import make_trainer
from tests.strategies.contract.communication.kernel import written_bytes
from trainwright import Preemption
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.tables.wide_deep import ClickData, WideDeep

# Large enough that headers of messages are less than 2 % of what the kernel sees.
SMALL = GPTConfig(layers=2, dim=64, heads=4, seq_len=64, tied_head=False)
# Not every method reaches its least: what else is sent does not grow with the number of blocks.
MOST = {"tensor, sequence": 1.15, "context, ring": 1.3, "context, ulysses": 1.3, "context, gather": 1.3, "expert": 1.15}


@pytest.mark.thorough
def test_axes_send_little_more_than_the_least(ranks):
    names = [name for name in AXES if " x " not in name]
    for row in ranks(measure_all, 2, names, SMALL, 4, timeout=60)[0]:
        assert 0.99 < row["ratio"] <= MOST.get(row["axis"], 1.01), row
        assert row["sent"] == pytest.approx(sum(row["by_kind"].values()), abs=4)
        assert row["backend"] == pytest.approx(row["kernel"], rel=0.02), row
        assert row["sent"] == pytest.approx(sum(row["by_axis"].values()), abs=4)
        assert set(row["by_axis"]) <= {*axes_of(row["axis"])}, row


def axes_of(name):
    """Mesh axes that a line of the table may send along: its own, and that which averages gradients."""
    own = name.partition(",")[0]
    return {"ddp": ["replicate"], "expert": ["expert", "shard"]}.get(own, ["shard" if own.startswith("zero") else own])


class Count(pl.Callback):
    """Bytes by the meter and by the kernel, from before the strategy begins; servers count when a message has gone."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        dist.barrier()
        self.meter = trainer.strategy.measures.measure_communication()
        self.begin = written_bytes()

    def end(self) -> tuple[float, int]:
        kernel = written_bytes() - self.begin
        self.meter.stop()
        return sum(sent.bytes for sent in self.meter.take().values()), kernel


# Strategies that send from several threads, or only in some steps.
OTHERWISE: dict[int, list[tuple[str, dict[str, Any], int]]] = {
    2: [
        ("diloco", {"sync_every": 4, "fragments": 2, "overlap_steps": 1, "compression": "int8"}, 11),
        ("parameter_server", {"servers": 2}, 3),
        ("hybrid", {"placement": {"embedding.*": "parameter_server"}, "stage": 2}, 4),
    ],
    4: [("hybrid", {"pipeline": 2, "shard": 2}, 3)],
}


def count(cases):
    found = []
    for strategy, options, steps in cases:
        watch = Count()
        callbacks = [watch, Preemption(check_seconds=1e6)]
        trainer = make_trainer(strategy, options, max_steps=steps, limit_val_batches=0, callbacks=callbacks)
        if strategy == "parameter_server" or "placement" in options:  # with sparse pushes
            trainer.fit(WideDeep(rows=4096, wide_rows=4096, dim=32, hidden=(256, 128)), ClickData(32, samples=2000))
        else:
            trainer.fit(module_of(AXES["ddp"], SMALL), DataLoader(Ids(64, 65), batch_size=2))
        found.append(watch.end())
    return found


@pytest.mark.parametrize("world", list(OTHERWISE))
def test_all_that_is_sent_is_counted(ranks, world):
    for case, *of_ranks in zip(OTHERWISE[world], *ranks(count, world, OTHERWISE[world]), strict=True):
        sent, kernel = map(sum, zip(*of_ranks, strict=True))
        assert sent == pytest.approx(kernel, rel=0.02), case
