"""Initial weights of Hugging Face models built on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.strategies.plan.test_deferred import Module, initial_weights
from trainwright.strategies.plan.deferred import deferred_pieces

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **DECODER,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, num_local_experts=4, num_key_value_heads=2)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=8, n_head=4, n_positions=32)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**DECODER)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
}


class Llama(Module):
    def make(self) -> nn.Module:
        return MODELS["llama"]()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = (batch["tokens"] if isinstance(batch, dict) else batch) % 96
        return self.net(input_ids=tokens, labels=tokens).loss


def test_same_weights_on_one_and_two_ranks(ranks):
    (want,) = ranks(initial_weights, 1, "single", Llama)
    for got in ranks(initial_weights, 2, "zero3", Llama, timeout=60):
        assert got.keys() == want.keys()
        assert [name for name, value in want.items() if not torch.equal(got[name], value)] == []


def values_of(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    return {
        f"{piece.name}.{name}": value
        for piece in reversed(deferred_pieces(module))  # the order does not matter
        for _, name, value in piece.values(seed)
    }


@pytest.mark.parametrize("kind", MODELS)
def test_distribution_matches_a_regular_build(kind):
    torch.manual_seed(0)
    normal = MODELS[kind]()
    holder = nn.Module()
    with torch.device("meta"):
        holder.net = MODELS[kind]()
    state = torch.get_rng_state()
    values = values_of(holder, 3)
    assert torch.equal(torch.get_rng_state(), state)
    buffers = {f"net.{name}": buffer for name, buffer in normal.named_buffers()}
    names = {f"net.{name}" for name, _ in normal.named_parameters(remove_duplicate=False)}
    assert values.keys() == names | buffers.keys()
    assert all(tensor.is_meta for tensor in (*holder.parameters(), *holder.buffers()))  # the model itself is untouched
    for name, want in normal.named_parameters():
        got = values[f"net.{name}"]
        assert got.std() == pytest.approx(want.std().item(), rel=0.25, abs=1e-8), name
        assert got.mean() == pytest.approx(want.mean().item(), abs=0.1 * want.std().item() + 1e-8 + 0.01), name
    for name, want in buffers.items():
        assert torch.equal(values[name], want), name
    again = values_of(holder, 3)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    other = values_of(holder, 4)
    assert any(not torch.equal(other[name], value) for name, value in values.items())


def test_parent_initialization_overrides_children():
    with torch.device("meta"):
        model = MODELS["gpt2"]()
    values = values_of(model, 0)
    assert values["transformer.h.0.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    # GPT-2 scales what returns to the residual stream by the root of twice the number of blocks.
    assert values["transformer.h.0.mlp.c_proj.weight"].std() == pytest.approx(0.02 / 16**0.5, rel=0.1)


class Forgetful(transformers.LlamaPreTrainedModel):
    """Model with a parameter that no method initializes."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))
        self.count = nn.Buffer(torch.ones(2, dtype=torch.long))
        self.layer = nn.Bilinear(2, 2, 3)  # which has its own reset_parameters
        self.post_init()


def test_names_uninitialized_tensors():
    with torch.device("meta"):
        model = nn.Sequential(Forgetful(transformers.LlamaConfig(**DECODER)))
    pieces = {piece.name: piece for piece in deferred_pieces(model)}
    assert sorted(name for _, name, value in pieces["0.layer"].values(0) if value.isfinite().all()) == [
        "bias",
        "weight",
    ]
    with pytest.raises(ValueError, match=r"0 \(Forgetful\) cannot be initialised: .* sets count, scale\."):
        list(pieces["0"].values(0))
