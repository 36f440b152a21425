from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch.utils.data import DataLoader

from benchmarks.flops import flops_per_token, model_flops_utilization
from benchmarks.peers.plain_gpt import PlainRun, PlainTraining
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.throughput import Plan, configure, measure, rows_of
from tests.parity.harness import Losses
from trainwright import Trainer, compose
from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.recipes.gpt.module import GPTModule

PLAN = Plan(rounds=2, steps=2, warm_up=1)


def options(text: Path) -> argparse.Namespace:
    return argparse.Namespace(
        size="nano", device="cpu", precision="32", micro_batch=1, accumulation=2, data=str(text), processes=2
    )


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("All work and no play makes a model overfit. " * 2000)
    return file


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "world_size"), [("single", 1), ("ddp", 2), ("zero3", 2)])
def test_both_sides_train_and_are_timed(ranks, tmp_path, text, kind, world_size):
    configure(kind, world_size, options(text), PLAN, str(tmp_path / "run"))
    measured = ranks(measure, world_size, str(tmp_path / "run"), kind, PLAN)[0]
    assert len(measured["ours"]) == PLAN.rounds
    assert len(measured["by_hand"]) == PLAN.rounds + 1
    assert measured["tokens"] == 2 * 1 * 2 * world_size * 128
    assert 0 < measured["our_loss"] < 6
    assert 0 < measured["loss_by_hand"] < 6
    by_hand, ours = rows_of(kind, world_size, measured, GPT(GPTConfig(layers=1)))
    assert by_hand["ratio"] is None
    assert ours["ratio_min"] <= ours["ratio"] <= ours["ratio_max"]


def losses_by_hand(kind: str, micro_batch: int, path: str) -> float:
    torch.manual_seed(0)
    training = PlainTraining(PlainRun(GPTConfig(layers=2, dim=32), kind, micro_batch, accumulation=2, path=path))
    training.train(3)
    total = sum(p.detach().double().square().sum() for p in training.model.parameters())
    assert isinstance(total, torch.Tensor)
    whole = total.full_tensor() if hasattr(total, "full_tensor") else total
    ranks = {"single": 1}.get(kind) or dist.get_world_size()
    assert ranks in (1, 2)
    return float(whole)


def test_the_loops_written_by_hand_train_the_same_model(ranks, text):
    ddp, zero3 = (ranks(losses_by_hand, 2, kind, 2, str(text))[0] for kind in ("ddp", "zero3"))
    assert ddp == pytest.approx(zero3, rel=1e-6)


def test_both_sides_compute_the_same(text):
    """On the same weights and batches, with clipping, schedule and weight decay."""
    config, steps = GPTConfig(layers=2, dim=32, seq_len=16), 6
    batches = list(torch.randint(0, 256, (steps, 2, 17), generator=torch.Generator().manual_seed(0)).byte())
    module, losses = GPTModule(config, schedule_steps=steps), Losses()
    by_hand = PlainTraining(PlainRun(config, steps=steps, path=str(text)))
    by_hand.model.load_state_dict(module.model.state_dict())
    by_hand._batches = iter(batches)
    expected = []
    for _ in range(steps):
        by_hand.train(1)
        expected.append(by_hand.loss.item())
    trainer = Trainer(accelerator="cpu", gradient_clip_val=1.0, max_epochs=1, callbacks=[losses], **PLAIN_TRAINER)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert losses.record.losses == pytest.approx(expected, rel=1e-6)
    assert expected[0] != expected[-1]


def test_the_loop_written_by_hand_uses_the_optimizer_of_the_recipe():
    cfg = compose("gpt", ["data.path=null"])
    ours = instantiate(cfg.optimizer, _convert_="all")([torch.nn.Parameter(torch.zeros(1))])
    training = PlainTraining(PlainRun(GPTConfig(layers=1, dim=32)))
    names = ("betas", "weight_decay", "eps")
    assert type(training.optimizer) is type(ours)
    assert [training.optimizer.param_groups[0][n] for n in names] == [ours.param_groups[0][n] for n in names]
    assert training.optimizer.param_groups[0]["initial_lr"] == ours.param_groups[0]["lr"]
    assert training.run.clip == cfg.trainer.gradient_clip_val
    assert cfg.schedule.warmup == 20
    assert cfg.schedule.final_factor == 0.1


def test_operations_of_a_token():
    model = GPT(GPTConfig(layers=2, dim=32, heads=4, seq_len=16))
    parameters = sum(p.numel() for p in model.parameters())
    assert flops_per_token(model) == 6 * parameters + 12 * 2 * 32 * 16
    untied = GPT(GPTConfig(layers=2, dim=32, heads=4, seq_len=16, tied_head=False))
    assert flops_per_token(untied) == flops_per_token(model)
    assert model_flops_utilization(model, 1e6, "an unknown device", 1) is None
    used = model_flops_utilization(model, 1e6, "NVIDIA H200", 2)
    assert used == pytest.approx(flops_per_token(model) * 1e6 / (989.4e12 * 2))
