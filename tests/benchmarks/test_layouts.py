from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.layouts import CASES, LEAST_AGREEMENT, Plan, compare, distinct_pairs, predicted_seconds
from benchmarks.peers.plain_gpt import PlainRun, PlainTraining
from benchmarks.peers.plain_layouts import PipelineByHand, ShardedTensorByHand
from trainwright.recipes.gpt.model import GPTConfig

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "layouts_cpu.json"
TINY = GPTConfig(layers=4, dim=16, heads=2, seq_len=8)


def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("What is said three times is true. " * 200)
    return str(path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pipeline", "tensor-shard"])
def test_a_layout_beside_its_peer(tmp_path, name):
    options = argparse.Namespace(size="nano", device="cpu", precision="32", batch=8, threads=1, data=text(tmp_path))
    by_hand, ours = compare(name, options, Plan(rounds=1, steps=1, warm_up=1))
    assert by_hand["side"] == CASES[name].peer[0]
    assert by_hand["tokens_per_s"] > 0
    assert by_hand["last_loss"] > 0
    assert ours["ratio"] > 0
    assert ours["sent_kib"] > 0
    assert ours["held_kib"] > 0


@pytest.mark.thorough
def test_layouts_that_were_clearly_apart_are_predicted_in_their_order(tmp_path):
    """Steps as the benchmark has measured them, against what the planner predicts for the devices of that run."""
    record = json.loads(RECORD.read_text())
    given = {**record["options"], "data": text(tmp_path)}
    rows = [row for row in record["rows"] if row["predicted_s"] is not None]
    for row in rows:
        row["predicted_s"] = predicted_seconds(row["layout"], argparse.Namespace(**given), record["profile"])
    pairs = distinct_pairs(rows)
    assert len(pairs) >= 15
    wrong = [f"{fast} is faster than {slow}" for fast, slow, agrees in pairs if not agrees]
    assert len(wrong) <= (1 - LEAST_AGREEMENT) * len(pairs), wrong
    # Where one takes twice as long as the other, all of them.
    assert [pair for pair in distinct_pairs(rows, 1.0) if not pair[2]] == []


def test_pairs_that_are_not_apart_do_not_count():
    rows = [
        {"side": side, "best_s": best, "predicted_s": predicted}
        for side, best, predicted in (("a", 1.0, 1.0), ("b", 1.2, 0.9), ("c", 2.0, 0.95), ("by hand", 9.0, None))
    ]
    assert distinct_pairs(rows, 0.25) == [("a", "c", False), ("b", "c", True)]


def gradients(kind, path):
    """Return the weights of block 0, the norm and the embedding (where present) after two hand-written steps."""
    torch.manual_seed(0)
    run = PlainRun(TINY, "single", 8, steps=10, path=path, clip=0.1)
    if kind == "pipeline":
        training: PlainTraining = PipelineByHand(run, 4)
    elif kind == "tensor":
        training = ShardedTensorByHand(run, 2)
    else:
        training = PlainTraining(run)
    data = torch.arange(8 * 9).view(8, 9) % 251
    training._batches = iter([data, data])
    training.train(2)
    found = dict(training.model.named_parameters())
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in found.items()
        if name in ("blocks.0.attention.query.weight", "embedding.weight", "norm.weight")
    }


def stages(path):
    return gradients("pipeline", path)


def sharded(path):
    return gradients("tensor", path)


@pytest.mark.thorough
def test_the_peers_train_as_one_process_does(ranks, tmp_path):
    """A peer that trains something else would be no measure of speed."""
    path = text(tmp_path)
    expected = gradients("single", path)
    first, last = ranks(stages, 2, path, timeout=60)
    for found, names in ((first, {"blocks.0.attention.query.weight", "embedding.weight"}), (last, {"norm.weight"})):
        assert names <= found.keys()
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    for found in ranks(sharded, 2, path, timeout=60):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
