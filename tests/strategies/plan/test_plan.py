"""Plans of models: where they can be cut, by configuration, by what the model says, by structure."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.strategies.compose.model_plan import describe_plan, make_plan
from trainwright.strategies.plan.blocks import find_blocks
from trainwright.strategies.plan.tensor_rules import validate_tensor

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
DECODER = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 0}


class Module(nn.Module):
    """Stands for a user's module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def hugging_face(kind: str, **options) -> Module:
    """A tiny Hugging Face model, without memory, inside of a module."""
    transformers = pytest.importorskip("transformers")
    name, options = {
        "llama": ("Llama", {**DECODER, **options}),
        "qwen2": ("Qwen2", {**DECODER, **options}),
        "qwen3": ("Qwen3", {**DECODER, "head_dim": 8, **options}),
        "phi3": ("Phi3", {**DECODER, "pad_token_id": None, **options}),
        "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 4, **options}),
        "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **options}),
        "bert": ("Bert", {**SMALL, "intermediate_size": 64, **options}),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**options)
    head = {"gpt2": "LMHeadModel", "bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    with torch.device("meta"):
        return Module(getattr(transformers, name + head)(config))


def accepted(module: nn.Module, plan) -> None:
    """The tensor engine has nothing against the plan, for two ranks."""
    assert not validate_tensor(module, plan, 2, loss_parallel=False)


def of_block(plan, block: str) -> dict[str, str]:
    """Styles within one block, by names relative to it."""
    return {name.removeprefix(f"{block}."): s for name, s in plan.tensor.items() if name.startswith(f"{block}.")}


LLAMA_BLOCK = {
    **{f"self_attn.{part}_proj": "colwise" for part in "qkv"},
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "gpt2", "bert"])
def test_hugging_face_plans_are_valid(kind):
    module = hugging_face(kind)
    accepted(module, make_plan(module, needs=("blocks", "tensor"), tensor_size=2))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_decoders_of_hugging_face(kind):
    plan = make_plan(hugging_face(kind), needs=("blocks", "tensor"))
    assert plan.blocks == ("model.model.layers.0", "model.model.layers.1")
    assert of_block(plan, plan.blocks[1]) == LLAMA_BLOCK
    assert plan.tensor["model.model.embed_tokens"] == "vocabulary"
    assert plan.tensor["model.lm_head"] == "colwise_gather"
    assert plan.heads == {}  # these take the number of heads from the tensors
    assert plan.whole_inputs == tuple(f"{block}.{part}" for block in plan.blocks for part in ("self_attn", "mlp"))
    assert plan.first == ("model.model.embed_tokens",)
    assert plan.last == ("model.model.norm", "model.lm_head")
    assert plan.sources["tensor"].startswith("Hugging Face metadata of ")


def test_hugging_face_experts_are_stacked():
    plan = make_plan(hugging_face("mixtral"), needs=("blocks", "tensor", "experts"))
    assert plan.experts == {f"{block}.mlp.experts": "stacked" for block in plan.blocks}
    assert set(of_block(plan, plan.blocks[0])) == {f"self_attn.{part}_proj" for part in "qkvo"}
    assert plan.whole_inputs == tuple(f"{block}.self_attn" for block in plan.blocks)


def test_gpt2_is_split_by_structure():
    plan = make_plan(hugging_face("gpt2"), needs=("blocks", "tensor"))
    attention = {"attn.c_attn": "packed_colwise:3", "attn.c_proj": "rowwise"}
    assert of_block(plan, "model.transformer.h.1") == {**attention, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    assert plan.heads == {f"{block}.attn": ("split_size",) for block in plan.blocks}
    assert plan.tied == (("model.transformer.wte.weight", "model.lm_head.weight"),)
    assert plan.tensor["model.transformer.wte"] == "vocabulary"
    assert plan.tensor["model.lm_head"] == "colwise_gather"
    assert plan.first == ("model.transformer.wte", "model.transformer.wpe")
    assert plan.last == ("model.transformer.ln_f", "model.lm_head")


def test_indivisible_tied_vocabulary_is_not_split():
    plan = make_plan(hugging_face("gpt2", vocab_size=97), tensor_size=2)
    assert "model.lm_head" not in plan.tensor
    assert "model.transformer.wte" not in plan.tensor
    assert "its length 97 does not divide by 2" in plan.sources["tensor"]
    insisted = {"tensor": {"model.lm_head": "colwise_gather", "model.transformer.wte": "vocabulary"}}
    plan = make_plan(hugging_face("gpt2", vocab_size=97), insisted, tensor_size=2)
    assert plan.tensor["model.lm_head"] == "colwise_gather"  # the tensor engine refuses it


def test_bert():
    plan = make_plan(hugging_face("bert"), needs=("blocks", "tensor"))
    assert plan.blocks == ("model.bert.encoder.layer.0", "model.bert.encoder.layer.1")
    assert of_block(plan, plan.blocks[0]) == {
        **{f"attention.self.{part}": "colwise" for part in ("query", "key", "value")},
        "attention.output.dense": "rowwise",
        "intermediate.dense": "colwise",
        "output.dense": "rowwise",
    }
    # Around the projection back stands a residual sum, whose other side is not whole.
    assert plan.whole_inputs[:2] == (f"{plan.blocks[0]}.attention.self", f"{plan.blocks[0]}.intermediate")
    assert plan.first == ("model.bert.embeddings",)
    assert plan.last == ("model.cls",)
    # The decoder shares its bias with a parameter of its parent and its weight with the embedding.
    assert "model.cls.predictions.decoder" not in plan.tensor
    assert "model.bert.embeddings.word_embeddings" not in plan.tensor


def test_unsupported_style_leaves_siblings_unsplit():
    plan = make_plan(hugging_face("phi3"), needs=("tensor",))
    assert of_block(plan, plan.blocks[0]) == {"mlp.gate_up_proj": "packed_colwise:2", "mlp.down_proj": "rowwise"}
    assert "rowwise_split_input" in plan.sources["tensor"]


@pytest.mark.parametrize("tied", [True, False])
def test_our_gpt(tied):
    gpt = GPT(GPTConfig(layers=2, dim=32, heads=4, kv_heads=2, tied_head=tied))
    plan = make_plan(Module(gpt), needs=("blocks", "tensor"))
    assert plan.blocks == ("model.blocks.0", "model.blocks.1")
    assert of_block(plan, "model.blocks.0") == {
        **{f"attention.{part}": "colwise" for part in ("query", "key", "value")},
        "attention.out": "rowwise",
        **{f"feed_forward.{part}": "colwise" for part in ("gate", "up")},
        "feed_forward.down": "rowwise",
    }
    assert plan.heads == {f"{block}.attention": ("heads", "kv_heads") for block in plan.blocks}
    assert plan.whole_inputs[:2] == ("model.blocks.0.attention", "model.blocks.0.feed_forward")
    accepted(Module(gpt), plan)
    assert plan.first == ("model.embedding",)
    if tied:  # F.linear(x, self.embedding.weight): used on both sides, so it is on both, and whole
        assert plan.last == ("model.embedding", "model.norm")
        assert "model.embedding" not in plan.tensor
    else:
        assert plan.last == ("model.norm", "model.head")
        assert plan.tensor["model.embedding"] == "vocabulary"
        assert plan.tensor["model.head"] == "colwise_gather"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.readout = nn.Linear(16, 3)
        self.place = nn.Parameter(torch.zeros(8, 16))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)


def test_torch_encoder_with_stem_and_head():
    plan = make_plan(Encoder(), needs=("blocks", "tensor"))
    attention = {"self_attn": "packed_colwise:3", "self_attn.out_proj": "rowwise"}
    assert of_block(plan, "encoder.layers.2") == {**attention, "linear1": "colwise", "linear2": "rowwise"}
    assert plan.heads["encoder.layers.0.self_attn"] == ("num_heads", "embed_dim")
    assert plan.whole_inputs == tuple(f"{block}.self_attn" for block in plan.blocks)
    assert plan.first == ("place", "readout")  # registered before; the user knows better:
    assert plan.last == ("head", "norm")  # a head is last wherever it is registered
    plan = make_plan(Encoder(), {"last": ["readout"]})
    assert (plan.first, plan.last) == (("place",), ("head", "readout", "norm"))
    plan = make_plan(Encoder(), {"first": ["norm"], "last": ["norm"]})
    assert (plan.first, plan.last) == (("place", "readout", "norm"), ("head", "norm"))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleDict({"stem": nn.Linear(4, 4), "late": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))})
        self.trunk = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for name in "ab"})
        self.words = nn.Embedding(5, 4)


def test_blocks_in_a_module_dict():
    assert list(find_blocks(Nested())) == ["trunk.a", "trunk.b"]
    plan = make_plan(Nested())
    assert plan.blocks == ("trunk.a", "trunk.b")
    assert (plan.first, plan.last) == (("ends", "words"), ("words",))  # nothing runs that would show its use
    plan = make_plan(Nested(), {"last": ["ends.late.1"]})
    assert plan.first == ("ends.stem", "ends.late.0", "words")
    assert plan.last == ("ends.late.1", "words")
    with pytest.raises(ValueError, match=r"plan\.last: nothing .* is called 'trunk\.a'.*: ends, words"):
        make_plan(Nested(), {"last": ["trunk.a"]})


def test_pairs_across_pointwise_layers():
    stack = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    )
    assert make_plan(stack).tensor == {"0": "colwise", "2": "rowwise"}


class OneWidth(nn.Module):
    """Norms of the same width on whole and on split features."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = (nn.LayerNorm(16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.down(self.between(self.up(self.before(x))).relu()))


class Tied(nn.Module):
    """A head of two layers, the last of which has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 16), nn.Sequential(OneWidth(), OneWidth())
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 9))
        self.head[2].weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def test_projections_that_are_split_as_one_stay_whole_as_one():
    plan = make_plan(Tied())
    assert not any(name.startswith(("head", "embedding")) for name in plan.tensor)
    assert "blocks.1.up" in plan.tensor


def test_norms_are_gathered_where_features_are_split():
    plan = make_plan(nn.Sequential(OneWidth(), OneWidth()))
    assert {f"{block}.{part}" for block in range(2) for part in ("up", "down")} == set(plan.tensor)
    assert {"0.between.weight", "1.between.bias"} <= set(plan.summed)
    assert not any("before" in name or "after" in name for name in plan.summed)


class Attention(nn.Module):
    """Normalises heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.n_embd, self.dim = 4, 4, 16, 16
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16) for _ in range(4))
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self.dim
        heads = (self.n_heads, self.head_dim)
        q, k, v = (p(x).unflatten(-1, heads).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.wo(y.transpose(1, 2).reshape(*x.shape[:2], self.n_embd))


def test_attributes_that_count_heads():
    plan = make_plan(nn.Sequential(Attention()))
    assert plan.tensor == {**{f"0.w{part}": "colwise" for part in "qkv"}, "0.wo": "rowwise"}
    # ``dim`` is not part of a shape that the code makes: it is the width of the input, which stays.
    assert plan.heads == {"0": ("n_heads", "n_embd")}


class Shared(nn.Module):
    """The first of a list computes a bias of each head, which the others are given."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.attention = Attention()
        if is_first:
            self.bias = nn.Parameter(torch.randn(4, 1, 1))
        self.feed_forward = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.bias.expand(-1, *2 * x.shape[1:2]) if bias is None else bias
        q, k, v = (getattr(self.attention, f"w{part}")(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        return x + self.feed_forward(x), self.attention.wo(y).mean() * bias


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16)
        self.stack = nn.ModuleList(Shared(index == 0) for index in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, bias = self.words(ids), None
        for block in self.stack:
            x, bias = block(x, bias)
        return x


def test_block_outputs_are_not_gathered():
    plan = make_plan(Sharing())
    assert set(plan.tensor) == {f"stack.{index}.feed_forward.{part}" for index in range(3) for part in (0, 2)}
    assert "stack.*.attention.wq, " in plan.sources["tensor"].replace("wk", "wq").replace("wv", "wq")


def test_shared_module_is_split_everywhere():
    model = nn.Module()
    model.words = nn.Embedding(16, 8)
    model.stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)))
    model.same_words = model.words
    model.head = nn.Linear(8, 16, bias=False)
    model.head.weight = model.words.weight
    plan = make_plan(model)
    assert plan.tensor["words"] == "vocabulary"
    assert plan.tensor["head"] == "colwise_gather"
    assert plan.tied == (("words.weight", "same_words.weight", "head.weight"),)
    assert plan.first == ("words", "same_words")


class Planned(Encoder):
    def parallel_plan(self) -> dict:
        return {
            "tensor": {"encoder.layers.*.linear1": "none", "encoder.layers.*.linear2": "none"},
            "last": ["readout"],
            "whole_inputs": [],
        }


def test_precedence_of_sources():
    plan = make_plan(Module(Planned()))
    assert of_block(plan, "model.encoder.layers.0") == {
        "self_attn": "packed_colwise:3",
        "self_attn.out_proj": "rowwise",
    }
    assert plan.whole_inputs == ()
    assert plan.last == ("model.head", "model.readout", "model.norm")
    config = {
        "tensor": {"model.encoder.layers.*.linear1": "colwise", "model.encoder.layers.*.linear2": "rowwise"},
        "heads": {"model.encoder.layers.*.self_attn": ["num_heads"]},
        "blocks": ["model.encoder.layers.*"],
    }
    plan = make_plan(Module(Planned()), config)
    assert len(of_block(plan, "model.encoder.layers.0")) == 4
    assert plan.heads["model.encoder.layers.2.self_attn"] == ("num_heads",)
    assert plan.sources["tensor"] == "configuration, parallel_plan(), structure"


def test_configuration_deletes():
    config = {"tensor": {"model.model.layers.*.mlp.*": None, "model.lm_head": "none"}}
    plan = make_plan(hugging_face("llama"), config)
    assert all(not name.startswith("mlp") for name in of_block(plan, plan.blocks[0]))
    assert plan.tensor["model.model.embed_tokens"] == "vocabulary"
    plan = make_plan(hugging_face("llama", tie_word_embeddings=True), config)
    assert "model.model.embed_tokens" not in plan.tensor  # one parameter is cut in all places or in none
    assert make_plan(hugging_face("mixtral"), {"experts": {"model.model.layers.*.mlp.experts": "none"}}).experts == {}


@pytest.mark.parametrize(("config", "told"), [
    ({"tensor": {"model.layers.*.mlp": "colwise"}}, r"plan\.tensor: no module is called 'model\.layers\.\*\.mlp'"),
    ({"tensor": {"model.lm_head": "columns"}}, r"tensor\['model\.lm_head'\]='columns' \(allowed: colwise, rowwise"),
    ({"tensors": {}, "first": "head"}, r"tensors={} \(allowed: blocks, tensor.*first='head' \(allowed: a list"),
    ({"blocks": ["layers.*"]}, r"blocks: no module is called 'layers\.\*'"),
    ({"heads": {"model.model.layers.*.mlp": ["num_heads"]}}, r"has no integer attribute num_heads"),
    ({"tensor": {"model.model.layers.*.mlp.down_proj": "none"}}, r"gate_proj: colwise.* without its counterpart"),
])  # fmt: skip
def test_refuses_invalid_configuration(config, told):
    with pytest.raises(ValueError, match=told):
        make_plan(hugging_face("llama"), config)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(12))
        self.others = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))


def test_missing_parts_name_the_option():
    assert make_plan(Odd()).tensor == {}
    with pytest.raises(ValueError, match="several lists of them, ambiguous") as raised:
        make_plan(Odd(), needs=("blocks", "tensor", "experts"))
    text = str(raised.value)
    assert "others.0..2 (1,260 parameters), layers.0..11 (912 parameters)" in text
    assert "\n" not in text
    assert (
        "Tried on Odd: strategy.plan, a parallel_plan() method (none), Hugging Face metadata (none), a search" in text
    )
    assert len(text) <= 750  # of three problems
    assert "'strategy.plan.blocks=[others.*]'" in text
    assert "layers.*.a: colwise, layers.*.b: rowwise" in text
    chosen = {"blocks": ["layers.*"], "tensor": {"layers.*.a": "colwise", "layers.*.b": "rowwise"}}
    plan = make_plan(Odd(), chosen, needs=("blocks", "tensor"))
    assert len(plan.blocks) == 12
    assert plan.last == ("others",)


def test_blocks_are_trained_ones_rather_than_frozen_ones_of_a_similar_size():
    module = Odd()
    module.others.requires_grad_(False)
    assert make_plan(module, needs=("blocks",)).blocks == tuple(f"layers.{index}" for index in range(12))
    module.layers.requires_grad_(False)
    with pytest.raises(ValueError, match="ambiguous"):
        make_plan(module, needs=("blocks",))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


def test_listed_experts():
    assert make_plan(nn.Sequential(Routed(), Routed())).experts == {"0.experts": "listed", "1.experts": "listed"}


def test_description_folds_repeated_names():
    module = hugging_face("mixtral")
    lines = describe_plan(make_plan(module), module).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["blocks", "model.model.layers.0..1", "2", "x", "MixtralDecoderLayer"],
        ["tensor", "model.model.embed_tokens", "vocabulary"],
        ["tensor", "model.model.layers.*.self_attn.q_proj", "colwise"],
    ]
