"""Split modules against the same modules whole: outputs, gradients, random numbers, traffic, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.recipes.gpt_model import GPT, GPTConfig
from trainwright.strategies.plan import ModelPlan
from trainwright.strategies.tensor_engine import TensorParallel, validate_tensor

TOLERANCE = 1e-5  # of the norm


def cut(module: nn.Module, plan: ModelPlan, **options: Any) -> TensorParallel:
    """Split a whole module over all ranks, as a strategy does."""
    problems = validate_tensor(
        module,
        plan,
        dist.get_world_size(),
        sequence_parallel=options.get("sequence_parallel", False),
        loss_parallel=options.get("loss_parallel", False),
    )
    assert not problems, problems
    engine = TensorParallel(module, plan, dist.group.WORLD, **options)
    blocks = [module.get_submodule(name) for name in plan.blocks] or [None]
    engine.apply(blocks[0], blocks[-1])
    exchanged: dict[int, nn.Parameter] = {}
    for name, cut in engine.cuts.items():
        owner, _, key = name.rpartition(".")
        whole = module.get_parameter(name)
        parameter = exchanged.setdefault(id(whole), nn.Parameter(cut.part(whole.detach())))
        exchanged[id(parameter)] = parameter  # a tied name that was exchanged already
        setattr(module.get_submodule(owner), key, parameter)
    return engine


def whole_gradients(module: nn.Module, engine: TensorParallel | None = None) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if engine is not None and name in engine.cuts:
            gradient = engine.cuts[name].whole(gradient)
        elif engine is not None and name in engine.summed:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        found[name] = gradient
    return found


def differences(
    whole: nn.Module, plan: ModelPlan, run: Callable[[nn.Module], dict[str, Tensor]], **options: Any
) -> Any:
    """Largest difference of what ``run`` returns (loss last) and of all gradients, relative to their norms."""
    split = copy.deepcopy(whole)
    engine = cut(split, plan, **options)
    want, got = run(whole), run(split)
    want |= whole_gradients(whole)
    got |= whole_gradients(split, engine)
    assert want.keys() == got.keys()
    size = max(value.norm().item() for value in want.values())  # some biases of attention have no gradient at all
    scale = lambda value: max(value.norm().item(), 1e-3 * size)  # noqa: E731
    return {k: (want[k] - got[k]).norm().item() / scale(want[k]) for k in want}


def run_on(x: Tensor, call: Callable[..., Any], module: nn.Module) -> dict[str, Tensor]:
    """Outputs and the gradient of the input of ``call(module, x)``."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = call(module, x)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    (y * weight).sum().backward()
    return {"output": y.detach()} | ({"input": x.grad} if x.grad is not None else {})


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


class Holder(nn.Module):
    """One module under a name, as plans want it."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------------------------------------------------
# One style at a time


def styles() -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    found = {}
    holder = Holder(up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    run = partial(run_on, floats(2, 3, 8), lambda m, x: m.down(m.up(x).relu()))
    found["pair"] = differences(holder, ModelPlan(tensor={"up": "colwise", "down": "rowwise"}), run)
    head = Holder(head=nn.Linear(8, 12))
    run = partial(run_on, floats(2, 3, 8), lambda m, x: m.head(x))
    found["head"] = differences(head, ModelPlan(tensor={"head": "colwise_gather"}), run)
    for padding in (None, 5):
        words = Holder(words=nn.Embedding(12, 4, padding_idx=padding))
        ids = torch.tensor([[0, 5, 11, 3], [3, 3, 6, 5]])
        run = partial(run_on, ids, lambda m, x: m.words(x))
        found[f"words {padding}"] = differences(words, ModelPlan(tensor={"words": "vocabulary"}), run)
    packed = Holder(qkv=nn.Linear(8, 24), out=nn.Linear(8, 8, bias=False))

    def mix(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out(q * k.sigmoid() + v)

    plan = ModelPlan(tensor={"qkv": "packed_colwise:3", "out": "rowwise"})
    found["packed"] = differences(packed, plan, partial(run_on, floats(2, 3, 8), mix))
    uneven = Holder(qkv=nn.Linear(8, 32), out=nn.Linear(8, 8))

    def mix_sections(m: nn.Module, x: Tensor) -> Tensor:
        width = m.qkv.weight.shape[0] // 4
        q, k, v = m.qkv(x).split([2 * width, width, width], -1)
        return m.out(q.unflatten(-1, (2, width)).sum(-2) * k.sigmoid() + v)

    # Two groups of queries that are summed pairwise must be cut alike: four sections, though three projections.
    plan = ModelPlan(tensor={"qkv": "packed_colwise:8,8,8,8", "out": "rowwise"})
    found["sections"] = differences(uneven, plan, partial(run_on, floats(2, 3, 8), mix_sections))
    tied = Holder(words=nn.Embedding(12, 8), head=nn.Linear(8, 12, bias=False))
    tied.head.weight = tied.words.weight
    run = partial(run_on, torch.tensor([[1, 7, 11]]), lambda m, x: m.head(m.words(x)))
    found["tied"] = differences(tied, ModelPlan(tensor={"words": "vocabulary", "head": "colwise_gather"}), run)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_style_computes_what_the_whole_module_does(ranks, world_size):
    for found in ranks(styles, world_size, timeout=60):
        for style, values in found.items():
            assert max(values.values()) < TOLERANCE, (style, values)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


class Stack(nn.Module):
    """Projections around blocks, so that gradients before and after the blocks are seen, too."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **inputs)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x)


def plan_of(
    blocks: int, styles: dict[str, str], heads: dict[str, tuple[str, ...]], whole: tuple[str, ...]
) -> ModelPlan:
    names = tuple(f"blocks.{i}" for i in range(blocks))
    return ModelPlan(
        blocks=names,
        tensor={f"{b}.{name}": style for b in names for name, style in styles.items()},
        heads={f"{b}.{name}": attributes for b in names for name, attributes in heads.items()},
        whole_inputs=tuple(f"{b}.{name}" for b in names for name in whole),
    )


GPT_STYLES = {f"attention.{k}": "colwise" for k in ("query", "key", "value")} | {"attention.out": "rowwise"}
GPT_STYLES |= {"feed_forward.gate": "colwise", "feed_forward.up": "colwise", "feed_forward.down": "rowwise"}


def gpt_plan(layers: int = 2, head: bool = False, whole: tuple[str, ...] = ("attention", "feed_forward")) -> ModelPlan:
    plan = plan_of(layers, GPT_STYLES, {"attention": ("heads", "kv_heads")}, whole)
    ends = {"embedding": "vocabulary", "head": "colwise_gather"} if head else {}
    return ModelPlan(plan.blocks, {**plan.tensor, **ends}, plan.heads, plan.whole_inputs)


def gpt(head: bool = False) -> GPT:
    return GPT(GPTConfig(layers=2, dim=32, heads=8, kv_heads=4, hidden=64, vocab=32, tied_head=not head))


def gpt_differences(head: bool, whole: tuple[str, ...], **options: Any) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    return differences(gpt(head), gpt_plan(head=head, whole=whole), partial(run_on, ids, call), **options)


@pytest.mark.parametrize("world_size", [2, 4])
def test_our_gpt(ranks, world_size):
    both = ("attention", "feed_forward")
    for head, whole, sequence in ((False, both, False), (True, both, True), (False, ("attention",), True)):
        for values in ranks(gpt_differences, world_size, head, whole, sequence_parallel=sequence, timeout=60):
            assert max(values.values()) < TOLERANCE, values


def encoder(kind: str) -> tuple[nn.Module, ModelPlan]:
    options = {"batch_first": "first" in kind, "norm_first": "norm" in kind, "activation": "gelu"}
    blocks = [nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, **options) for _ in range(2)]
    styles = {"self_attn": "packed_colwise:3", "self_attn.out_proj": "rowwise"}
    styles |= {"linear1": "colwise", "linear2": "rowwise"}
    whole = ("self_attn",) if "whole" in kind else ()
    return Stack(blocks, 16), plan_of(2, styles, {"self_attn": ("num_heads",)}, whole)


def encoder_differences(kind: str, sequence: bool) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    whole, plan = encoder(kind)
    length, batch = 8, 4
    x = floats(batch, length, 16) if "first" in kind else floats(length, batch, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    padding = torch.arange(length).expand(batch, length) >= torch.tensor([8, 6, 7, 5])[:, None]
    per_head = floats(batch * 4, length, length)
    if sequence:  # another mask per sample would have to be known to a slice of the batch
        inputs = [{}, {"src_mask": causal, "is_causal": True}]
    else:
        inputs = [
            {"src_mask": causal, "is_causal": True},
            {"src_key_padding_mask": padding},
            {"src_mask": causal, "src_key_padding_mask": torch.zeros(padding.shape).masked_fill_(padding, -1e9)},
        ]
    found = {}
    for i, given in enumerate(inputs):
        run = partial(run_on, x, lambda m, x, given=given: m(x, **given))
        found[str(i)] = differences(copy.deepcopy(whole), plan, run, sequence_parallel=sequence)
    if not sequence and "first" in kind:
        split = copy.deepcopy(whole)
        local_heads = per_head.unflatten(0, (batch, 4))
        cut(split, plan)
        with torch.no_grad():
            want, got = (m(x, src_mask=local_heads.flatten(0, 1)) for m in (whole, split))
            found["per head"] = {"output": (want - got).norm().item() / want.norm().item()}
            for m in (whole, split):  # torch's fused code must not see split weights
                m.eval()
            want, got = (m(x) for m in (whole, split))
            found["evaluation"] = {"output": (want - got).norm().item() / want.norm().item()}
    return found


@pytest.mark.parametrize("kind", ["first", "first norm whole", "second"])
def test_encoder_of_torch(ranks, kind):
    for sequence in (False, True):
        for world_size in (2, 4):
            for found in ranks(encoder_differences, world_size, kind, sequence, timeout=60):
                for case, values in found.items():
                    assert max(values.values()) < TOLERANCE, (sequence, case, values)


def attention_weights() -> list[float]:
    torch.manual_seed(0)
    whole = Holder(attention=nn.MultiheadAttention(16, 4, kdim=12, vdim=20, batch_first=True))
    inputs = floats(2, 3, 16), floats(2, 5, 12), floats(2, 5, 20)
    split = copy.deepcopy(whole)
    cut(split, ModelPlan(tensor={"attention": "packed_colwise:3"}, heads={"attention": ("num_heads", "embed_dim")}))
    found = []
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        want, got = (m.attention(*inputs, **options) for m in (whole, split))
        for a, b in zip(want, got, strict=True):
            assert (a is None) == (b is None)
            found.append(0.0 if a is None else (a - b).norm().item())
    for x in (inputs[0][0],):
        want, got = (m.attention(x, inputs[1][0], inputs[2][0]) for m in (whole, split))
        found += [(a - b).norm().item() for a, b in zip(want, got, strict=True)]
    return found


def test_attention_of_torch_across_widths_with_weights_and_unbatched(ranks):
    for found in ranks(attention_weights, 2):
        assert max(found) < TOLERANCE


def llama_differences(sequence: bool, kv_heads: int) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=kv_heads, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    blocks = tuple(f"model.layers.{i}" for i in range(2))
    styles = {f"self_attn.{k}_proj": "colwise" for k in "qkv"} | {"self_attn.o_proj": "rowwise"}
    styles |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    plan = ModelPlan(
        blocks=blocks,
        tensor={f"{b}.{k}": v for b in blocks for k, v in styles.items()}
        | {"model.embed_tokens": "vocabulary", "lm_head": "colwise_gather"},
        whole_inputs=tuple(f"{b}.{k}" for b in blocks for k in ("self_attn", "mlp")),
    )
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    run = partial(run_on, ids, lambda m, x: m(input_ids=x, use_cache=False).logits)
    return differences(LlamaForCausalLM(config).train(), plan, run, sequence_parallel=sequence)


@pytest.mark.parametrize(("world_size", "sequence"), [(2, False), (2, True), (4, True)])
def test_llama_with_a_tied_head(ranks, world_size, sequence):
    pytest.importorskip("transformers")
    for values in ranks(llama_differences, world_size, sequence, 4, timeout=60):
        assert max(values.values()) < TOLERANCE, values


def gpt2_differences(sequence: bool) -> dict[str, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=32, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    blocks = tuple(f"transformer.h.{i}" for i in range(2))
    styles = {
        "attn.c_attn": "packed_colwise:3",
        "attn.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    }
    plan = ModelPlan(
        blocks=blocks,
        tensor={f"{b}.{k}": v for b in blocks for k, v in styles.items()},
        heads={f"{b}.attn": ("num_heads", "split_size", "embed_dim") for b in blocks},
        whole_inputs=tuple(f"{b}.{k}" for b in blocks for k in ("attn", "mlp")),
    )
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    run = partial(run_on, ids, lambda m, x: m(input_ids=x, use_cache=False).logits)
    return differences(GPT2LMHeadModel(config).train(), plan, run, sequence_parallel=sequence)


@pytest.mark.parametrize(("world_size", "sequence"), [(2, False), (4, True)])
def test_gpt2_with_its_packed_transposed_projections(ranks, world_size, sequence):
    pytest.importorskip("transformers")
    for values in ranks(gpt2_differences, world_size, sequence, timeout=60):
        assert max(values.values()) < TOLERANCE, values


# ---------------------------------------------------------------------------------------------------------------------
# Whole parameters beside split ones


class NormedHeads(nn.Module):
    """A feed-forward with its own norm and residual, and heads with a norm of each: who of them needs a sum?"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.head_norm = nn.LayerNorm(8)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.head_norm(self.up(self.norm(x)).unflatten(-1, (-1, 8)))
        return x + self.down(heads.tanh().flatten(-2))


def beside_differences(sequence: bool) -> tuple[dict[str, float], frozenset[str]]:
    torch.manual_seed(0)
    whole = Stack([NormedHeads(), NormedHeads()], 16)
    plan = plan_of(2, {"up": "colwise", "down": "rowwise"}, {}, ())
    values = differences(whole, plan, partial(run_on, floats(2, 8, 16), call), sequence_parallel=sequence)
    return values, TensorParallel(whole, plan, dist.group.WORLD, sequence_parallel=sequence).summed


def test_whole_parameters_beside_split_ones_are_summed_where_they_must(ranks):
    for values, summed in ranks(beside_differences, 4, False):
        assert max(values.values()) < TOLERANCE, values
        assert summed == {f"blocks.{i}.head_norm.{key}" for i in range(2) for key in ("weight", "bias")}
    for values, summed in ranks(beside_differences, 4, True):
        assert max(values.values()) < TOLERANCE, values
        assert {"blocks.1.norm.weight", "blocks.0.down.bias", "blocks.0.head_norm.bias"} < summed
        assert "last.weight" not in summed
