"""Whole models whose sequences are split over the ranks of a group, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainwright.recipes.gpt_model import GPT, GPTConfig
from trainwright.strategies.blocks import checkpoint_activations, find_blocks
from trainwright.strategies.context_engine import METHODS, ContextParallel

LENGTH = 24
VOCABULARY = 40


class Decoder(nn.Module):
    """The GPT of the recipes with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(GPTConfig(layers=2, dim=16, heads=4, kv_heads=2, vocab=VOCABULARY, init_std=0.3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.net(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Llama(nn.Module):
    """Hugging Face's, with a padded sequence: its mask is materialised."""

    def __init__(self, padded: bool = False, attention: str = "sdpa") -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.padded = padded
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            initializer_range=0.3,
        )
        config._attn_implementation = attention
        self.net = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens[:, :-1]
        mask = torch.ones_like(tokens)
        labels = tokens.clone()
        if self.padded:
            mask[1, :5] = 0
            labels[1, :5] = -100
        return self.net(tokens, attention_mask=mask if self.padded else None, labels=labels).loss


class Encoder(nn.Module):
    """Torch's own layers without causality, with padding, and a mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(type(layer)(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens[:, :-1]
        padding = tokens.new_zeros(tokens.shape).bool()
        padding[0, -3:] = True
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(x.mean(1)).square().sum()


MODELS = {
    "gpt": Decoder,
    "llama": Llama,
    "padded-llama": partial(Llama, padded=True),
    "encoder": Encoder,
}


def tokens_of(rank: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(7 + rank))


def built(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def trained(module: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = module(tokens_of())
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def split(module: nn.Module, **options: Any) -> ContextParallel:
    blocks = list(find_blocks(module).values())
    engine = ContextParallel(module, blocks, dist.group.WORLD, enters=True, leaves=True, **options)
    engine.apply()
    return engine


def split_training(
    model: str, options: dict[str, Any], checkpointing: tuple[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and averaged gradients of the second of two equal passes: the first of a block is watched."""
    module = built(model)
    split(module, **options)
    mode, patterns = checkpointing
    checkpoint_activations(module, mode, find_blocks(module).values(), patterns)
    trained(module)
    module.zero_grad()
    loss, gradients = trained(module)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    return loss, gradients


def assert_as_one_process(results: list[Any], model: str) -> None:
    want, wanted = trained(built(model))
    for loss, gradients in results:
        assert loss == pytest.approx(want, rel=1e-5)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            error = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6)
            assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize(("model", "world_size"), [("gpt", 2), ("gpt", 4), ("padded-llama", 2), ("encoder", 2)])
@pytest.mark.parametrize("method", METHODS)
def test_trains_as_one_process(ranks, model, world_size, method):
    results = ranks(split_training, world_size, model, {"method": method}, ("none", None), timeout=60)
    assert_as_one_process(results, model)


@pytest.mark.parametrize(
    "checkpointing", [("full", None), ("selective", ["net.model.layers.*.self_attn"])], ids=lambda c: c[0]
)
def test_recomputed_activations_see_the_whole_sequence(ranks, checkpointing):
    results = ranks(split_training, 2, "llama", {"method": "ring", "balance": False}, checkpointing, timeout=60)
    assert_as_one_process(results, "llama")
