"""Plans that are proven: what computes the same when it is split is split, whatever its names, and nothing else is.

tests/zoo shows that these modules train like one process, or are refused.
"""

from typing import Any

import pytest
from torch import Tensor, nn

from tests.zoo.cells import rows
from trainwright.strategies.compose.model_plan import make_plan
from trainwright.strategies.context.proof import sequence_problems

# What of a block is split: both of its parts, or one.
BOTH, ONLY_MLP, ONLY_ATTENTION = {"attn", "mlp"}, {"mlp"}, {"attn"}
PACKED = ("nanoGPT", "packed, reshaped to the input", "packed by head", "norms by head", "norms of the full width")
BY_ALL_HEADS = ("norms of the full width, by hand", "linear", "ALiBi", "talking heads")
BY_ALL_FEATURES = ("softmax", "RMS norm", "normalize", "top-k", "cosine")
KINDS = {
    **{("attention", name): BOTH for name in PACKED},
    **{("attention", name): ONLY_MLP for name in BY_ALL_HEADS},
    **{("mlps", name): BOTH for name in ("GELU", "SwiGLU", "packed GLU", "LayerNorm between")},
    **{("mlps", f"{name} between"): ONLY_ATTENTION for name in BY_ALL_FEATURES},
    **{("mlps", name): ONLY_ATTENTION for name in ("gate by the mean", "channel shuffle")},
    ("norms", "layer scale modules"): BOTH,
    ("norms", "weight norm"): set(),
    ("norms", "weight norm, old"): set(),
}


def made(theme: str, name: str) -> Any:
    return next(row for row in rows(theme) if row.name == name).make_module()


@pytest.mark.parametrize(("theme", "name"), list(KINDS))
def test_splits_only_what_is_proven(theme, name):
    plan = make_plan(made(theme, name), tensor_size=2)
    assert {each.split(".")[3] for each in plan.tensor if each.startswith("net.blocks.")} == KINDS[theme, name]
    assert ("left whole" in plan.sources["tensor"]) == (KINDS[theme, name] != BOTH)


def test_features_are_gathered_for_norms_over_all_heads():
    module = made("attention", "norms of the full width")
    attention = "net.blocks.0.attn"
    plan = make_plan(module, tensor_size=2)
    assert [name for name in plan.gathered if name.startswith(attention)] == [
        f"{attention}.q_norm", f"{attention}.k_norm"
    ]  # fmt: skip
    for block in module.net.blocks:
        block.attn.q_norm.register_forward_hook(print)  # it would see a part
    plan = make_plan(module, tensor_size=2)
    assert plan.gathered == ()
    assert f"{attention}.q_proj" not in plan.tensor


class Gated(nn.Module):
    """A gated residual network, which adds or scales by a second input only if one is given."""

    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.enter, self.second, self.back = nn.Linear(16, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 16)
        self.by_value = by_value

    def forward(self, x: Tensor, other: Tensor | None = None, flag: bool = False) -> Tensor:
        hidden = self.enter(x)
        if self.by_value and x.sum() > 1e6:
            hidden = hidden * self.second(x[..., :8])
        if not self.by_value and (other is not None or flag):
            hidden = hidden + self.second(x[..., :8] if other is None else other)
        return x + self.back(hidden.relu())


@pytest.mark.parametrize("by_value", [False, True])
def test_splits_branches_that_are_not_taken_by_default(by_value):
    plan = make_plan(nn.ModuleList(Gated(by_value) for _ in range(2)), tensor_size=2)
    assert plan.tensor == ({} if by_value else {
        f"{index}.{name}": style
        for index in range(2)
        for name, style in (("enter", "colwise"), ("second", "colwise"), ("back", "rowwise"))
    })  # fmt: skip
    assert ("no run by itself uses second.weight" in plan.sources["tensor"]) == by_value


def test_refuses_wrong_user_splits():
    said = {"tensor": {"net.blocks.*.mlp.fc1": "colwise", "net.blocks.*.mlp.fc2": "rowwise"}}
    assert make_plan(made("mlps", "GELU"), said, tensor_size=2).tensor["net.blocks.1.mlp.fc1"] == "colwise"
    wrong = r"plan\.tensor splits net\.blocks\.0\.mlp\.fc1: colwise.*does not compute the same.*outputs"
    with pytest.raises(ValueError, match=wrong):
        make_plan(made("mlps", "RMS norm between"), said, tensor_size=2)
    with pytest.raises(ValueError, match=r"net\.blocks\.\*\.attn does not compute the same on a slice of the sequence"):
        make_plan(made("attention", "ALiBi in a buffer"), tensor_size=2, sequence_parallel=True)


@pytest.mark.parametrize(("name", "where", "sliced"), [
    ("roll", "", ".attn.q_proj"), ("cumulative sum", "", ".attn.q_proj"), ("mean", "", ".attn.q_proj"),
    ("convolution", ".conv", ".conv"), ("GRU", ".gru", ".attn.q_proj"), ("time first inside", ".attn", ""),
])  # fmt: skip
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_refuses_position_mixing_blocks(name, where, sliced, method):
    module = made("mixing", name)
    (problem,) = sequence_problems(module, make_plan(module, tensor_size=1), 2, method)
    assert problem.startswith(f"context=2: net.blocks.*{where} does not compute the same on a part of the sequence")
    with pytest.raises(ValueError, match=rf"sequence_parallel=true: net\.blocks\.\*{sliced} does not compute"):
        make_plan(module, tensor_size=2, sequence_parallel=True)


def test_accepts_blocks_that_mix_by_attention_alone():
    module = made("attention", "packed by head")
    assert sequence_problems(module, make_plan(module, tensor_size=1), 2, "ring") == []


def test_positions_must_be_dim_1():
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    (problem,) = sequence_problems(encoder, make_plan(encoder, tensor_size=1), 2, "ring")
    assert problem.startswith("context=2: layers.*")


def test_splits_adapters_with_their_layers():
    import peft
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=24, **sizes, num_key_value_heads=2))
    plan = make_plan(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")), tensor_size=2)
    block = "base_model.model.model.layers.1"
    assert {n.removeprefix(f"{block}."): s for n, s in plan.tensor.items() if n.startswith(f"{block}.self_attn")} == {
        **{f"self_attn.{part}_proj.{inner}": "colwise" for part in "qkv" for inner in ("base_layer", "lora_B.default")},
        **{f"self_attn.o_proj.{inner}": "rowwise" for inner in ("base_layer", "lora_A.default")},
    }
    assert any(name.endswith("mlp.down_proj.lora_A.default") for name in plan.tensor)


def test_splits_what_can_be_of_a_library_model():
    from transformers import MptConfig, MptForCausalLM

    model = MptForCausalLM(MptConfig(vocab_size=24, d_model=32, n_heads=4, n_layers=2, max_seq_len=16))
    plan = make_plan(model, tensor_size=2)
    assert plan.tensor["transformer.blocks.0.ffn.up_proj"] == "colwise"
    assert "transformer.blocks.*.attn.Wqkv" in plan.sources["tensor"].partition("left whole")[2]
