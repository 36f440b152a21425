"""Blocks of a model: found, named, checkpointed, compiled."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.strategies.data.single import SingleDeviceStrategy
from trainwright.strategies.plan.blocks import checkpoint_activations, compile_blocks, find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + scale * self.mlp(x)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


class Unsplittable(nn.Module):
    _no_split_modules = ("Block",)  # as a Hugging Face model names them

    def __init__(self) -> None:
        super().__init__()
        self.only = Block()
        self.head = nn.Linear(4, 1)


@pytest.mark.parametrize(("module", "patterns", "names"), [
    (Model(), None, ["layers.0", "layers.1", "layers.2"]),
    (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4)), None, ["0", "2"]),
    (Unsplittable(), None, ["only"]),  # before structure
    (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), None, []),  # single modules are no blocks
    (nn.ModuleList([nn.Linear(4, 4)]), None, []),
    (Model(), ["layers.*"], ["layers.0", "layers.1", "layers.2"]),  # a star matches one level
    (Model(), ["layers.1", "first"], ["first", "layers.1"]),
])  # fmt: skip
def test_blocks_of_a_module(module, patterns, names):
    assert list(find_blocks(module, patterns)) == names


def test_embeddings_in_no_split_modules_are_not_blocks():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes))
    assert list(find_blocks(model)) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]


def test_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"blocks: no module is called 'blocks\.\*'.*It has: first, layers"):
        find_blocks(Model(), ["blocks.*"])


@pytest.mark.parametrize(
    ("mode", "patterns", "told"),
    [
        ("some", None, "allowed: none, full, selective"),
        ("selective", None, "which modules? Type 'checkpoint_modules="),
        ("full", ["layers.*"], "is read with selective only"),
    ],
)
def test_refuses_contradictory_checkpointing(mode, patterns, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        SingleDeviceStrategy(activation_checkpointing=mode, checkpoint_modules=patterns)


@pytest.mark.parametrize(("mode", "patterns"), [("full", None), ("selective", ["layers.0"])])
def test_checkpointing_recomputes(mode, patterns):
    torch.manual_seed(0)
    plain = Model()
    checked = Model()
    checked.load_state_dict(plain.state_dict())
    checkpoint_activations(checked, mode, find_blocks(checked).values(), patterns)
    x = torch.randn(5, 4)
    plain(x).backward()
    checked(x).backward()
    for (name, want), (same_name, got) in zip(plain.named_parameters(), checked.named_parameters(), strict=True):
        assert name == same_name
        assert torch.equal(want.grad, got.grad)
    recomputed = [layer.calls for layer in checked.layers]
    assert recomputed == ([2, 2, 2] if mode == "full" else [2, 1, 1])
    assert type(checked.layers[0]) is Block


def test_recomputation_updates_no_statistics():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    checkpoint_activations(models[1], "full", [models[1]], None)
    for model in models:
        model(torch.arange(20.0).view(5, 4)).square().sum().backward()
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)
    for (name, kept), found in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(kept, found), name


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    # Masks of the eager attention have as many columns as there are keys.
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager"))


def test_recomputed_blocks_get_no_cache():
    """transformers creates one by default, which every run of a block extends."""
    tokens = torch.arange(12).view(2, 6)
    models = small_llama(), small_llama()
    checkpoint_activations(models[1], "full", find_blocks(models[1]).values(), None)
    for model in models:
        model(input_ids=tokens, labels=tokens).loss.backward()
    for own, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(own.grad, plain.grad)
    with torch.no_grad():
        earlier = models[1](input_ids=tokens).past_key_values
    assert earlier.get_seq_length() == 6
    with pytest.raises(RuntimeError, match="6 earlier position.*activation_checkpointing=none"):
        models[1](input_ids=tokens, past_key_values=earlier)


def test_full_checkpointing_needs_blocks():
    with pytest.raises(ValueError, match=r"strategy\.blocks"):
        checkpoint_activations(nn.Linear(2, 2), "full", [], None)


def test_blocks_are_compiled_in_place():
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    compile_blocks(model, find_blocks(model).values(), {"backend": "eager"})
    assert [layer._compiled_call_impl is not None for layer in model.layers] == [True] * 3
    assert [name for name, _ in model.named_parameters()] == names
    compile_blocks(untouched := Model(), find_blocks(untouched).values(), False)
    assert untouched.layers[0]._compiled_call_impl is None
