from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from trainwright.recipes.gpt.model import GPT, GPTConfig, rotary_angles, rotate
from trainwright.recipes.moe.model import MoEConfig, MoEGPT

SIZES = Path(__file__).parents[2] / "conf" / "size"
SMALL = GPTConfig(layers=2, dim=32, heads=4, seq_len=16)


def config_of(size: str) -> GPTConfig:
    found = OmegaConf.load(SIZES / f"{size}.yaml")
    return GPTConfig(**(found.module.config if "module" in found else found))


PARAMETERS = {
    "nano": 0.885e6, "mini": 1.44e6, "125m": 125e6, "350m": 350e6,
    "1b": 1e9, "3b": 3e9, "7b": 7e9, "70b": 70e9, "175b": 175e9, "405b": 405e9, "1t": 1000e9,
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(("size", "parameters"), PARAMETERS.items())
def test_sizes_have_the_parameters_of_their_names(size: str, parameters: float) -> None:
    with torch.device("meta"):
        model = GPT(config_of(size))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.05)


def test_every_size_is_tested_and_nano_is_the_default() -> None:
    assert config_of("nano") == GPTConfig()
    assert {path.stem for path in SIZES.glob("*.yaml")} == PARAMETERS.keys()


@pytest.mark.parametrize("options", [{}, {"tied_head": False}, {"kv_heads": 2, "tied_head": False}, {"experts": 8}])
def test_attention_is_causal(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind, config = (MoEGPT, MoEConfig) if "experts" in options else (GPT, GPTConfig)
    model = kind(config(layers=2, dim=32, heads=4, init_std=0.2, **options))
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = (found[0] if kind is MoEGPT else found for found in map(model, (tokens, changed)))
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-5


def test_rotated_products_depend_on_distance() -> None:
    cos, sin = rotary_angles(32, 8, 10_000.0, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 32, 8)
    products = (rotate(query, cos, sin) @ rotate(key, cos, sin).mT)[0, 0]
    for distance in (0, 3, 17):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)
    assert abs(products[5, 0] - products[0, 5]) > 1e-3  # order matters


def test_angles_stay_exact_in_half_precision() -> None:
    exact = rotary_angles(2048, 64, 10_000.0, torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = rotary_angles(2048, 64, 10_000.0, torch.device("cpu"))
    assert torch.equal(cos, exact[0])
    assert torch.equal(sin, exact[1])
    x = torch.randn(1, 1, 2048, 64, dtype=torch.bfloat16)
    assert rotate(x, cos, sin).dtype == torch.bfloat16


def test_tied_head_is_the_embedding() -> None:
    tied, untied = GPT(SMALL), GPT(GPTConfig(layers=2, dim=32, heads=4, tied_head=False))
    assert tied.head is None
    assert set(dict(untied.named_parameters())) - set(dict(tied.named_parameters())) == {"head.weight"}
    assert len(list(tied.parameters())) == len({p.data_ptr() for p in tied.parameters()})


def test_initialization_of_residual_projections() -> None:
    model = GPT(GPTConfig(layers=8, dim=256, heads=4, init_std=0.02))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            wanted = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name


def test_reset_parameters_initializes_a_deferred_build() -> None:
    torch.manual_seed(3)
    ordinary = GPT(SMALL)
    with torch.device("meta"):
        deferred = GPT(SMALL)
    assert not list(deferred.buffers())
    deferred.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in deferred.modules():
        if next(module.parameters(recurse=False), None) is not None:
            reset = module.reset_parameters
            assert callable(reset)
            reset()
    torch.testing.assert_close(deferred.state_dict(), ordinary.state_dict(), rtol=0, atol=0)


def test_equals_plain_arithmetic() -> None:
    """One block with one head, without SDPA, nn.RMSNorm or broadcasting over heads."""
    torch.manual_seed(0)
    config = GPTConfig(layers=1, dim=8, heads=1, seq_len=5, init_std=0.5)
    model = GPT(config).double()
    tokens = torch.randint(256, (5,))
    block = model.blocks[0]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        rows = []
        for position, row in enumerate(x):
            pairs = torch.complex(row[:4], row[4:])
            angles = position * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
            pairs = pairs * torch.polar(torch.ones_like(angles), angles)
            rows.append(torch.cat((pairs.real, pairs.imag)))
        return torch.stack(rows)

    x = model.embedding.weight[tokens]
    normed = norm(x, block.attention_norm.weight)
    attention = block.attention
    query, key = turned(normed @ attention.query.weight.T), turned(normed @ attention.key.weight.T)
    scores = query @ key.T / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    x = x + scores.softmax(dim=-1) @ (normed @ attention.value.weight.T) @ attention.out.weight.T
    normed = norm(x, block.feed_forward_norm.weight)
    gate = normed @ block.feed_forward.gate.weight.T
    up = normed @ block.feed_forward.up.weight.T
    x = x + (gate * gate.sigmoid() * up) @ block.feed_forward.down.weight.T
    wanted = norm(x, model.norm.weight) @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens[None])[0], wanted, rtol=1e-5, atol=1e-5)
