"""Models with split sequences compared with one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.strategies.compose.engine_options import ATTENTION as METHODS
from trainwright.strategies.compose.model_plan import make_plan
from trainwright.strategies.context.engine import ContextParallel, sequence_dim, validate_context
from trainwright.strategies.plan.blocks import checkpoint_activations, find_blocks
from trainwright.strategies.plan.model_plan import ModelPlan

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


MODELS = {"gpt": Decoder, "llama": Llama, "padded-llama": partial(Llama, padded=True), "encoder": Encoder}


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


def averaged(module: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and averaged gradients of a second pass, after the checks of the first."""
    trained(module)
    module.zero_grad()
    loss, gradients = trained(module)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    return loss, gradients


def split_training(
    model: str, options: dict[str, Any], checkpointing: tuple[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    module = built(model)
    split(module, **options)
    mode, patterns = checkpointing
    checkpoint_activations(module, mode, find_blocks(module).values(), patterns)
    return averaged(module)


def assert_as_one_process(results: list[Any], model: str) -> None:
    want, wanted = trained(built(model))
    for loss, gradients in results:
        assert loss == pytest.approx(want, rel=1e-5)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            error = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6)
            assert error < 1e-5, f"{name}: {error}"


@pytest.mark.sample(6)
@pytest.mark.parametrize(("model", "world_size"), [("gpt", 2), ("gpt", 4), ("padded-llama", 2), ("encoder", 2)])
@pytest.mark.parametrize("method", METHODS)
def test_trains_like_one_process(ranks, model, world_size, method):
    results = ranks(split_training, world_size, model, {"method": method}, ("none", None), timeout=60)
    assert_as_one_process(results, model)


@pytest.mark.parametrize(
    "checkpointing", [("full", None), ("selective", ["net.model.layers.*.self_attn"])], ids=lambda c: c[0]
)
def test_recomputation_sees_the_whole_sequence(ranks, checkpointing):
    results = ranks(split_training, 2, "llama", {"method": "ring", "balance": False}, checkpointing, timeout=60)
    assert_as_one_process(results, "llama")


def recomputed_by_hugging_face(reentrant: bool) -> tuple[float, dict[str, torch.Tensor]]:
    module = built("padded-llama")
    split(module, split_outputs=True)
    module.net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return averaged(module)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_by_the_model(ranks, reentrant):
    assert_as_one_process(ranks(recomputed_by_hugging_face, 2, reentrant, timeout=60), "padded-llama")


def stages(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Run two engines in a row, as on two pipeline stages, with split states between them."""
    module = built(model)
    blocks = list(find_blocks(module).values())
    ContextParallel(module, blocks[:1], dist.group.WORLD, enters=True, leaves=False).apply()
    ContextParallel(module, blocks[1:], dist.group.WORLD, enters=False, leaves=True, first=blocks[0]).apply()
    with torch.no_grad():
        module(tokens_of()[:, :-1])  # of a length that cannot be cut: both run whole
    return averaged(module)


@pytest.mark.parametrize("model", ["gpt", "padded-llama"])
def test_stages_send_split_states(ranks, model):
    assert_as_one_process(ranks(stages, 2, model, timeout=60), model)


def autocast_training(method: str, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    module = built("padded-llama")
    if size > 1:
        split(module, method=method, split_outputs=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(tokens_of())
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= size
    return loss.item(), gradients


@pytest.mark.parametrize("method", METHODS)
def test_autocast(ranks, method):
    want, wanted = autocast_training(method, 1)
    for loss, gradients in ranks(autocast_training, 2, method, 2, timeout=60):
        assert loss == pytest.approx(want, rel=5e-3)
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).norm() < 0.05 * wanted[name].norm(), name


def passes_without_gradient() -> tuple[bool, bool, bool]:
    """Compare odd lengths, caches and generation with one process; even lengths are split."""
    module, alone = built("llama").eval(), built("llama").eval()
    module.net.load_state_dict(alone.net.state_dict())
    split(module, method="ring")
    seen: list[int] = []
    module.net.model.layers[0].mlp.register_forward_hook(lambda _, args, out: seen.append(args[0].size(1)))
    with torch.no_grad():
        odd, even = tokens_of()[:, :7], tokens_of()[:, :8]
        exact = all(
            torch.allclose(module.net(t, use_cache=cache).logits, alone.net(t, use_cache=cache).logits, atol=1e-5)
            for t in (odd, even)
            for cache in (False, True)
        )
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    same = torch.equal(module.net.generate(even, **options), alone.net.generate(even, **options))
    return exact, same, seen[:4] == [7, 7, 4, 8]


def test_evaluation_matches_one_process(ranks):
    assert ranks(passes_without_gradient, 2, timeout=60) == [(True, True, True)] * 2


class Block(nn.Module):
    """Block with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(128.0).view(32, 4) / 100)
        self.register_buffer("square", torch.ones(32, 32, dtype=torch.bool).tril())
        self.register_buffer("short", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        x = x * self.scale
        length = x.size(1)
        if self.fault in ("arange", "keeps"):
            where = torch.arange(length)[:, None]
            x = x + where / 10
            self.seen = where if self.fault == "keeps" else None
        if self.fault in ("table", "short"):
            x = x + getattr(self, self.fault)[:length]
        if self.fault == "eager":
            return torch.softmax(x @ x.mT, -1) @ x
        mask = torch.ones(length, length) if self.fault == "mask" else None
        mask = self.square[:length, :length] if self.fault == "square" else mask
        dropout = 0.1 if self.fault == "dropout" else 0.0
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask, dropout)[:, 0]


def dropped() -> tuple[list[bool], bool]:
    """Return what dropout kept of ones, and whether ranks draw the same numbers afterwards."""
    module = Faulty("none")
    for layer in module.layers:
        layer.drop = nn.Dropout(0.5)
        layer.forward = partial(lambda block, x, other: block.drop(type(block).forward(block, x)), layer)
    split(module, balance=False)
    module()
    again = [torch.empty(4) for _ in range(2)]
    dist.all_gather(again, torch.rand(4))
    return (module() != 0).flatten(1)[0].tolist(), torch.equal(*again)


def test_dropout_differs_between_parts(ranks):
    kept, alike = ranks(dropped, 2, timeout=30)[0]
    assert alike
    assert kept[: len(kept) // 2] != kept[len(kept) // 2 :]


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(fault), Block(fault)])
        self.fault = fault

    def forward(self) -> torch.Tensor:
        x = torch.ones(2, 30 if self.fault == "length" else 8, 4)
        for layer in self.layers:
            x = layer(x, torch.ones(2, 4, 4) if self.fault == "other" else None)
        return x


def counted(kind: str) -> list[float]:
    """Return distances of two passes, each with its gradient, to those of one process."""
    distances = []
    alone, parts = Faulty(kind), Faulty(kind)
    split(parts)
    for _ in range(2):
        for module in (alone, parts):
            module.zero_grad()
            module().square().sum().backward()
        gradient = parts.layers[0].scale.grad.clone()
        dist.all_reduce(gradient)
        distances += [(alone() - parts()).abs().max().item(), (gradient / 2 - alone.layers[0].scale.grad).norm().item()]
    return distances


@pytest.mark.parametrize("kind", ["arange", "table", "square"])
def test_blocks_may_count_positions(ranks, kind):
    for distances in ranks(counted, 2, kind, timeout=30):
        assert max(distances) < 1e-3


def faulty(fault: str) -> str:
    dist.barrier()  # connect first, since a rank that refuses exits
    module = Faulty(fault)
    split(module)
    with pytest.raises((RuntimeError, ValueError)) as error:
        module()
    return str(error.value)


@pytest.mark.parametrize(("fault", "said"), [
    ("keeps", "Block layers.0 counts positions itself and keeps what it computes from them (seen)"),
    ("short", "Block layers.0 reads the first 4 of 6 rows of short, which has none for 8 positions"),
    ("eager", "No scaled_dot_product_attention was called in block layers.0"),
    ("mask", "An attention mask of shape (4, 4) for 4 of 8 positions"),
    ("dropout", "Attention dropout 0.1 with the context method 'ring' (allowed: 0)"),
    ("length", "A sequence of 30 positions cannot be cut into 4 equal chunks for context=2"),
    ("other", "The argument 'other' of a block, of shape (2, 4, 4), has as many positions as a rank's part"),
])  # fmt: skip
def test_refuses_unsupported_blocks(ranks, fault, said):
    for message in ranks(faulty, 2, fault, timeout=30):
        assert said in message


@pytest.mark.parametrize(("shape", "dtype", "name", "dim"), [
    ((8,), torch.int64, "cache_position", 0),
    ((8, 4), torch.float32, "cos", 0),
    ((8, 8), torch.float32, "cos", 0),
    ((8, 8), torch.float32, "attn_mask", None),
    ((8, 8), torch.int64, "position_ids", 1),
    ((8, 8), torch.bool, "", None),
    ((2, 8), torch.int64, "position_ids", 1),
    ((1, 8, 8), torch.float32, "position_embeddings", 1),
    ((2, 8, 4), torch.float32, "residual", 1),
    ((2, 1, 8, 8), torch.float32, "", None),
    ((2, 1, 1, 8), torch.float32, "attention_mask", None),
    ((1, 1, 8, 4), torch.float32, "cos", 2),
    ((2, 5, 4), torch.float32, "encoder_states", None),
    ((), torch.float32, "scale", None),
])  # fmt: skip
def test_sequence_dim_of_arguments(shape, dtype, name, dim):
    assert sequence_dim(torch.ones(shape).to(dtype), 8, name) == dim


def test_refuses_invalid_splits():
    plan = ModelPlan(blocks=("net.blocks.0", "net.blocks.1"))
    assert validate_context(Decoder(), plan, 2, "ring") == []
    plan = make_plan(Decoder(), {}, needs=["blocks"])
    assert validate_context(Decoder(), plan, 2, "ulysses") == []
    (problem,) = validate_context(Decoder(), plan, 3, "ulysses")
    assert "4 query heads" in problem
    assert "context of 1, 2, 4" in problem
    (problem,) = validate_context(Decoder(), plan, 4, "ulysses", tensor=2)
    assert "2 query heads" in problem
    problems = validate_context(Llama(attention="eager"), plan, 2, "ring")
    assert any("attn_implementation='eager'" in p and "'sdpa'" in p for p in problems)
