import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.optim import SGD

from tests.parity.harness import QUIET, make_trainer
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.recipes.moe.model import Experts, MixtureOfExperts, MoEConfig, MoEGPT, Routes, balance_statistics
from trainwright.recipes.moe.module import MoEModule

SMALL = MoEConfig(layers=2, dim=32, heads=2, seq_len=16, hidden=32, experts=4)


def test_cost_of_a_token_equals_the_dense_model() -> None:
    with torch.device("meta"):
        dense, sparse = GPT(GPTConfig()), MoEGPT(MoEConfig())
    dense_ff = sum(p.numel() for p in dense.blocks[0].feed_forward.parameters())
    experts = sum(p.numel() for p in sparse.blocks[0].feed_forward.experts.parameters())
    assert experts * 2 / 8 == dense_ff


def one_by_one(experts: Experts, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for x, chosen, weight in zip(tokens, index.tolist(), weights, strict=True):
        outs = [experts.down[e] @ (F.silu(experts.gate[e] @ x) * (experts.up[e] @ x)) for e in chosen]
        rows.append(sum(w * out for w, out in zip(weight, outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("how", ["32", "bf16-true", "bf16-mixed"])
def test_experts_compute_their_tokens(how: str) -> None:
    """Expert 2 has no tokens, and a zero gradient."""
    torch.manual_seed(0)
    experts = Experts(MoEConfig(dim=16, heads=2, hidden=24, experts=4, init_std=0.5))
    tokens, weights = torch.randn(7, 16), torch.rand(7, 2)
    index = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [1, 0], [3, 1], [0, 1]])
    want = one_by_one(experts, tokens, index, weights)
    want.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}
    experts.zero_grad()
    dtype = torch.bfloat16 if how == "bf16-true" else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16-mixed"):
        out = experts.to(dtype)(tokens.to(dtype), index, weights)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    off = 1e-6 if how == "32" else 0.03
    assert (out - want).norm() <= off * want.norm()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= off * wanted[name].norm()
        assert not parameter.grad[2].any()


def routes(logits: Tensor) -> Routes:
    chosen = logits.topk(2)
    return Routes(logits.softmax(-1), chosen.indices, chosen.values.softmax(-1))


def test_balance_is_at_best_one() -> None:
    even = torch.tensor([[9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0]])
    found = balance_statistics(routes(even), 1)
    assert found.balance.item() == pytest.approx(1)
    assert found.load.item() == 1
    same = balance_statistics(routes(even[:1].expand(6, 4)), 2)
    assert same.balance.item() == pytest.approx(2, abs=1e-3)  # all tokens go to two of four experts
    assert same.load.item() == 2


def test_balance_of_a_batch_is_the_mean_of_its_sequences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3 * 8, 4) * 3
    parts = [balance_statistics(routes(part), 1).balance for part in logits.split(8)]
    assert balance_statistics(routes(logits), 3).balance.item() == pytest.approx(
        torch.stack(parts).mean().item(), rel=1e-6
    )


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_balance_trains_the_router(balance: float) -> None:
    torch.manual_seed(0)
    model = MoEGPT(MoEConfig(layers=2, dim=32, heads=2, experts=4, balance=balance, init_std=0.2))
    _, counted = model(torch.randint(256, (2, 16)))
    assert counted.balance.requires_grad == (balance > 0)
    if balance:
        counted.balance.backward()
        for block in model.blocks:
            assert block.feed_forward.router.weight.grad.norm() > 0


def test_loss_falls_and_experts_stay_busy(text: Path) -> None:
    seed_everything(0)
    module, data = MoEModule(SMALL, warmup_steps=2), TextCorpus(text, seq_len=16, batch_size=16)
    trainer = LightningTrainer(max_steps=80, devices=1, log_every_n_steps=1, **QUIET)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    logged = trainer.logged_metrics
    after = trainer.validate(module, data, verbose=False)[0]
    assert before["val_bpb"] == pytest.approx(8, abs=0.5)  # uniform over 256 bytes
    assert after["val_bpb"] < 4
    assert after["val_bpb"] == pytest.approx(after["val_loss"] / math.log(2), rel=1e-6)
    assert {"train_loss", "balance_loss", "expert_load"} <= logged.keys()
    assert 1 <= logged["expert_load"] <= 2
    assert 0.9 < logged["balance_loss"] < 2


def fitted(strategy: str, folder: str, micro: int, meta: bool = False) -> float:
    seed_everything(0)
    trainer = make_trainer(strategy, max_steps=5, max_epochs=-1, global_batch_size=16)
    module = MoEModule(SMALL, partial(SGD, lr=0.5), warmup_steps=0, final_lr_factor=1.0, meta=meta)
    data = TextCorpus(Path(folder) / "text.txt", seq_len=16, batch_size=micro)
    trainer.fit(module, data)
    return float(torch.cat(trainer.predict(module, data)).mean())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "micro"), [("ddp", 8), ("zero3", 4)])
def test_every_strategy_trains_as_one_process(text, ranks, strategy, micro):
    (alone,) = ranks(fitted, 1, "single", str(text.parent), 16, init_group=False)
    assert ranks(fitted, 2, strategy, str(text.parent), micro) == [pytest.approx(alone, rel=1e-5)] * 2


def test_deferred_build_trains(text, ranks):
    ordinary, deferred = (ranks(fitted, 2, "zero3", str(text.parent), 8, meta)[0] for meta in (False, True))
    assert deferred == pytest.approx(ordinary, rel=0.1)


def test_reset_parameters_initializes_every_weight() -> None:
    with torch.device("meta"):
        layer = MixtureOfExperts(SMALL)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer.experts.down.std().item() == pytest.approx(SMALL.residual_std, rel=0.1)
