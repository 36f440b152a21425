"""Plans that are proven: what computes the same when it is split is split, whatever its names, and nothing else is."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layouts import Texts
from tests.strategies.plan.models import BETWEEN, MIXES, Adapted, Mixing, Model
from trainwright.strategies.compose.model_plan import make_plan
from trainwright.strategies.context.proof import sequence_problems

# What of a block is split: both of its parts, or one.
BOTH, ONLY_MLP, ONLY_ATTENTION = {"attn", "mlp"}, {"mlp"}, {"attn"}
BY_ALL_HEADS = ("norm of all", "norm without weights", "rms of all", "linear", "alibi", "mixes heads", "weight norm")
ATTENTIONS = {
    **dict.fromkeys(("nano", "vision", "per head", "norm of heads"), BOTH),
    **dict.fromkeys((*BY_ALL_HEADS, "old weight norm"), ONLY_MLP),
}
KINDS = {
    **{(name, "gelu"): parts for name, parts in ATTENTIONS.items()},
    **{("plain", name): BOTH if name in ("gelu", "glu") else ONLY_ATTENTION for name in BETWEEN},
}


def parts_of(plan: Any) -> set[str]:
    return {name.split(".")[2] for name in plan.tensor if name.startswith("h.")}


@pytest.mark.parametrize(("attention", "between"), list(KINDS))
def test_splits_only_what_is_proven(attention, between):
    plan = make_plan(Model(attention, between, scaled=True), needs=("tensor",), tensor_size=2)
    assert parts_of(plan) == KINDS[attention, between]
    assert ("left whole" in plan.sources["tensor"]) == (KINDS[attention, between] != BOTH)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIBRARIES = {("llama", "all"): ALL, ("llama", "some"): ["q_proj", "v_proj", "down_proj"], ("mpt", "none"): []}


def make(attention: str, between: str) -> Any:
    modules = LIBRARIES.get((attention, between))
    return Model(attention, between, scaled=True) if modules is None else Adapted(attention, modules)


def train(kinds: Sequence[tuple[str, str]], options: dict[str, Any] | None) -> list[tuple[list[float], dict[str, Any]]]:
    """Losses and parameters of three steps of each kind; on one process without ``options``."""
    found = []
    for attention, between in kinds:
        module, losses = make(attention, between), []
        module.log = lambda name, value, losses=losses: losses.append(value.item())
        strategy = ("single", {}) if options is None else ("hybrid", options)
        trainer = make_trainer(*strategy, max_steps=3, max_epochs=-1)
        trainer.fit(module, DataLoader(Texts(24), batch_size=8))
        found.append((losses, {n: p.clone() for n, p in trainer.strategy.whole_parameters()}))
    return found


SLICED = [("nano", "gelu"), ("per head", "gelu"), ("norm of heads", "gelu"), ("plain", "softmax")]
WHOLE = [*SLICED, ("vision", "gelu"), ("alibi", "gelu"), ("linear", "gelu"), ("old weight norm", "gelu")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kinds", "options"), [(WHOLE, {}), (SLICED, {"sequence_parallel": True}), (list(LIBRARIES), {})]
)
def test_proven_splits_train_like_one_process(ranks, kinds, options):
    (alone,) = ranks(train, 1, kinds, None, init_group=False)
    for found in ranks(train, 2, kinds, {"tensor": 2, "shard": 1, **options}):
        for kind, (losses, parameters), (wanted, weights) in zip(kinds, found, alone, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5), kind
            for name, weight in weights.items():
                assert torch.allclose(parameters[name], weight, atol=1e-6), (kind, name)


def test_refuses_wrong_user_splits():
    said = {"tensor": {"h.*.mlp.fc1": "colwise", "h.*.mlp.fc2": "rowwise"}}
    assert make_plan(Model(), said, tensor_size=2).tensor["h.1.mlp.fc1"] == "colwise"
    with pytest.raises(
        ValueError, match=r"plan\.tensor splits h\.0\.mlp\.fc1: colwise.*does not compute the same.*outputs"
    ):
        make_plan(Model(between="rms norm"), said, tensor_size=2)
    with pytest.raises(ValueError, match=r"h\.\*\.attn does not compute the same on a slice of the sequence"):
        make_plan(Model("alibi"), tensor_size=2, sequence_parallel=True)


@pytest.mark.parametrize("how", list(MIXES))
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_refuses_position_mixing_blocks(how, method):
    module = nn.Sequential(Mixing(how), Mixing(how))
    problems = sequence_problems(module, make_plan(module, tensor_size=1), 2, method)
    if how == "nothing":
        assert problems == []
        return
    (problem,) = problems
    where = {"conv": r"\*.conv", "gru": r"\*.gru"}.get(how, r"\*")
    assert problem.startswith(
        f"context=2: {where.replace(chr(92), '')} does not compute the same on a part of the sequence"
    )
    with pytest.raises(ValueError, match=f"sequence_parallel=true: {where} does not compute"):
        make_plan(module, tensor_size=2, sequence_parallel=True)


def test_positions_must_be_dim_1():
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    (problem,) = sequence_problems(encoder, make_plan(encoder, tensor_size=1), 2, "ring")
    assert problem.startswith("context=2: layers.*")


def test_splits_library_models_and_adapters():
    plan = make_plan(make("llama", "all"), tensor_size=2)
    block = "model.base_model.model.model.layers.1"
    assert {n.removeprefix(f"{block}."): s for n, s in plan.tensor.items() if n.startswith(f"{block}.self_attn")} == {
        **{f"self_attn.{part}_proj.{inner}": "colwise" for part in "qkv" for inner in ("base_layer", "lora_B.default")},
        **{f"self_attn.o_proj.{inner}": "rowwise" for inner in ("base_layer", "lora_A.default")},
    }
    assert any(name.endswith("mlp.down_proj.lora_A.default") for name in plan.tensor)
    plan = make_plan(make("mpt", "none"), tensor_size=2)
    assert plan.tensor["model.transformer.blocks.0.ffn.up_proj"] == "colwise"
    assert "model.transformer.blocks.*.attn.Wqkv" in plan.sources["tensor"].partition("left whole")[2]
