"""Experts distributed over ranks compared with one process: outputs and all gradients."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.strategies.contract.traffic import recorded
from trainwright.recipes.moe.model import Experts, MoEConfig
from trainwright.strategies.expert.engine import ExpertParallel, validate_experts
from trainwright.strategies.plan.model_plan import ModelPlan

E, D, K = 4, 8, 2


def mixtral(implementation: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(num_local_experts=E, hidden_size=D, intermediate_size=16, num_experts_per_tok=K)
    config._experts_implementation = implementation
    return MixtralExperts(config)


def qwen(implementation: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=E, hidden_size=D, moe_intermediate_size=16, num_experts_per_tok=K)
    config._experts_implementation = implementation
    return Qwen3MoeExperts(config)


def ours() -> nn.Module:
    return Experts(MoEConfig(dim=D, heads=2, hidden=16, experts=E))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral-eager": partial(mixtral, "eager"),
    "mixtral-grouped": partial(mixtral, "grouped_mm"),
    "qwen3-batched": partial(qwen, "batched_mm"),
    "qwen3-grouped": partial(qwen, "grouped_mm"),
    "ours": ours,
}


class Layer(nn.Module):
    """A router and experts in a residual stream, with its tokens as a parameter so that their gradient shows."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(D, E, bias=False)
        self.experts = KINDS[kind]()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.5)
        self.to(dtype)

    def forward(self, x: Tensor, choice: Tensor | None = None) -> Tensor:
        """``choice``: experts of each token ``(N, K)``; ``None``: the router's."""
        logits = self.router(x)
        index = logits.topk(K).indices if choice is None else choice
        weights = logits.gather(1, index).softmax(-1, dtype=torch.float32)
        return x + self.experts(x, index, weights)


PLAN = ModelPlan(experts={"experts": "stacked"})


def split(layer: Layer, group: dist.ProcessGroup | None = None) -> ExpertParallel:
    """Split the experts as the strategy does."""
    engine = ExpertParallel(layer, PLAN, group or dist.group.WORLD)
    for name, cut in engine.cuts.items():
        owner, _, key = name.rpartition(".")
        parameters = layer.get_submodule(owner)._parameters
        parameters[key] = nn.Parameter(cut.part(parameters[key].detach()))
    engine.apply()
    return engine


def batch(rank: int, counts: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(counts[rank], D).to(dtype)


def choices(rank: int, count: int, spread: str) -> Tensor | None:
    """``own``: the router's. ``last``: all tokens to the last two experts. ``one``: all twice to expert 0."""
    if spread == "own":
        return None
    return torch.tensor({"last": [E - 1, E - 2], "one": [0, 0]}[spread]).expand(count, K)


def loss_of(out: Tensor) -> Tensor:
    # Sums, not means: a rank without tokens has the loss 0.
    return (out.float().tanh() * torch.arange(1.0, D + 1)).sum()


def spread_run(
    kind: str, counts: tuple[int, ...], spread: str = "own", dtype: torch.dtype = torch.float32, recompute: bool = False
) -> dict[str, Any]:
    """Output and gradients on this rank; those of the experts whole, the router's averaged over the ranks."""
    rank = dist.get_rank()
    layer = Layer(kind, dtype)
    engine = split(layer)
    x = batch(rank, counts, dtype).requires_grad_()
    choice = choices(rank, counts[rank], spread)
    out = checkpoint(layer, x, choice, use_reentrant=False) if recompute else layer(x, choice)
    loss_of(out).backward()
    assert layer.router.weight.grad is not None or choice is not None
    router = layer.router.weight.grad
    dist.all_reduce(router, op=dist.ReduceOp.AVG)
    gradients = {}
    for name, cut in engine.cuts.items():
        gradient = layer.get_parameter(name).grad
        assert gradient is not None, f"{name} has no gradient on rank {rank}"
        gradients[name] = cut.whole(gradient)
    return {"out": out.detach(), "tokens": x.grad, "router": router, "experts": gradients}


def alone_run(
    kind: str, counts: tuple[int, ...], spread: str = "own", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], Layer]:
    """Outputs and token gradients of each rank's batch; parameter gradients are those of the mean of their losses."""
    layer = Layer(kind, dtype)
    outs, grads = [], []
    for rank in range(len(counts)):
        x = batch(rank, counts, dtype).requires_grad_()
        out = layer(x, choices(rank, counts[rank], spread))
        loss_of(out).backward()
        outs.append(out.detach())
        grads.append(x.grad)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / len(counts)
    return outs, grads, layer


def compare(results: list[dict[str, Any]], alone: tuple[list[Tensor], list[Tensor], Layer], **near: float) -> None:
    outs, grads, layer = alone
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["out"], outs[rank], **near)
        torch.testing.assert_close(result["tokens"], grads[rank], **near)
        torch.testing.assert_close(result["router"], layer.router.weight.grad, **near)
        assert result["experts"]
        for name, gradient in result["experts"].items():
            torch.testing.assert_close(gradient, layer.get_parameter(name).grad, **near)


EXACT = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.sample(6)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_one_process(ranks, kind, world_size):
    counts = (11, 5, 1, 8)[:world_size]
    results = ranks(spread_run, world_size, kind, counts)
    compare(results, alone_run(kind, counts), **EXACT)
    held = {name for result in results for name in result["experts"]}
    assert held == {name for name, _ in Layer(kind).named_parameters() if name.startswith("experts.")}


@pytest.mark.parametrize(("spread", "recompute"), [("last", False), ("one", True)])
@pytest.mark.parametrize("kind", ["mixtral-eager", "mixtral-grouped", "ours"])
def test_ranks_without_tokens(ranks, kind, spread, recompute):
    """Include experts without tokens and a rank without tokens."""
    counts = (6, 0, 3, 4)
    results = ranks(spread_run, 4, kind, counts, spread, recompute=recompute)
    compare(results, alone_run(kind, counts, spread), **EXACT)


@pytest.mark.parametrize("kind", ["mixtral-grouped", "qwen3-grouped", "ours"])
def test_bfloat16(ranks, kind):
    counts = (24, 17)
    results = ranks(spread_run, 2, kind, counts, dtype=torch.bfloat16)
    exact = alone_run(kind, counts)
    rounded = alone_run(kind, counts, dtype=torch.bfloat16)
    assert {r["out"].dtype for r in results} == {torch.bfloat16}
    for rank, result in enumerate(results):
        # About as close to float32 as one process in bfloat16.
        ours_off = (result["out"].float() - exact[0][rank]).norm()
        assert ours_off <= 1.5 * (rounded[0][rank].float() - exact[0][rank]).norm()
        for name, gradient in result["experts"].items():
            want = exact[2].get_parameter(name).grad
            off = (rounded[2].get_parameter(name).grad.float() - want).norm()
            assert (gradient.float() - want).norm() <= 1.5 * off


def sharded_run(spread: str) -> dict[str, Tensor]:
    """Run two expert groups whose replicas of the same experts are sharded with FSDP2."""
    rank, counts = dist.get_rank(), (5, 4, 0, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "expert"))
    layer = Layer("mixtral-grouped")
    engine = split(layer, mesh.get_group("expert"))
    fully_shard(layer.experts, mesh=mesh["same"])
    fully_shard(layer, mesh=mesh["same"], ignored_params=set(layer.router.parameters()))
    loss_of(layer(batch(rank, counts), choices(rank, counts[rank], spread))).backward()
    return {name: cut.whole(layer.get_parameter(name).grad.full_tensor()) for name, cut in engine.cuts.items()}


@pytest.mark.parametrize("spread", ["own", "last"])
def test_experts_are_averaged_over_their_replicas(ranks, spread):
    _, _, layer = alone_run("mixtral-grouped", (5, 4, 0, 3), spread)
    for result in ranks(sharded_run, 4, spread):
        assert len(result) == 2
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, layer.get_parameter(name).grad, **EXACT)


def traffic_run(counts: tuple[int, ...]) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = Layer("ours")
    x = batch(rank, counts)
    owners = layer.router(x).topk(K).indices // (E // size)
    split(layer)
    x.requires_grad_()
    with recorded() as forward:
        out = layer(x)
    with recorded() as backward:
        loss_of(out).backward()
    return {
        "rows": [sum(rank in row for row in owners.tolist()) for rank in range(size)],
        "forward": forward,
        "backward": backward,
    }


def test_tokens_are_sent_once_per_rank(ranks):
    counts = (32, 20)
    results = ranks(traffic_run, 2, counts)
    sent = [sum(result["rows"]) for result in results]
    arrived = [sum(result["rows"][rank] for result in results) for rank in range(2)]
    assert sum(counts) < sum(sent) < sum(counts) * K  # some token has both experts on one rank, and travels once
    for rank, result in enumerate(results):
        rows = max(sent[rank], arrived[rank])  # the larger of what leaves and what arrives is what is recorded
        forward = [("all_gather", 2 * (2 + E)), *(("all_to_all", rows * width) for width in (2 * K, D, D))]
        assert [(c.name, c.elements) for c in result["forward"]] == forward
        backward = [("all_to_all", rows * width) for width in (D, D, 2 * K)]
        assert [(c.name, c.elements) for c in result["backward"]] == backward


def balance_run(training: bool) -> tuple[dict[str, float], dict[str, float]]:
    rank = dist.get_rank()
    layer = Layer("ours").train(training)
    engine = split(layer)
    for experts in ([0, 1], [0, 3]):
        layer(torch.randn(2, D), torch.tensor([experts, [rank, 2]]))
    return engine.statistics(), engine.statistics()


def test_statistics_cover_the_group(ranks):
    # Call 1: experts get 3, 3, 2, 0 of 8, ranks 6 and 2. Call 2: 3, 1, 2, 2, ranks 4 and 4.
    for first, second in ranks(balance_run, 2, True):
        assert first == pytest.approx({"expert_imbalance": 1.5, "rank_imbalance": 1.25, "busiest_expert": 6 / 16})
        assert second == {}
    assert ranks(balance_run, 2, False)[0] == ({}, {})


def copied_run() -> bool:
    layer = Layer("ours")
    engine = split(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    x = torch.randn(5, D)
    engine.apply()  # nothing is wrapped twice
    return not torch.equal(twin(x), layer(x))


def test_copies_use_their_own_parameters(ranks):
    assert ranks(copied_run, 2) == [True, True]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.odd = nn.ParameterDict({"down": nn.Parameter(torch.zeros(4, 2)), "norm": nn.Parameter(torch.zeros(3))})
        self.good = Layer("ours").experts
        self.linear = nn.Linear(4, 6)


@pytest.mark.parametrize(("experts", "size", "said"), [
    ({"good": "stacked"}, 3, "expert=3, but good has 4 experts (possible: 1, 2, 4)"),
    ({"bare": "listed"}, 2, "experts in a list of modules (bare); allowed are experts stacked"),
    ({"odd": "stacked"}, 2, "norm of shape (3,) does not have one row for each of 4 experts"),
    ({"linear": "stacked"}, 2, "its forward takes (input), but experts must be called with (tokens, index"),
])  # fmt: skip
def test_refuses_invalid_experts(experts, size, said):
    with torch.device("meta"):
        problems = validate_experts(Model(), ModelPlan(experts=experts), size)
    assert len(problems) == 1
    assert said in problems[0]


def test_accepts_valid_experts():
    assert validate_experts(Model(), ModelPlan(experts={"good": "stacked"}), 4) == []
