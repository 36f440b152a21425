"""Split modules compared with unsplit ones: outputs, gradients, random numbers, traffic, refusals."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.strategies.compose.model_plan import make_plan
from trainwright.strategies.contract.collectives import flat as flat_collectives
from trainwright.strategies.contract.randomness.split import SplitRandomness, draws_randomly
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.tensor_rules import validate_tensor
from trainwright.strategies.tensor.engine import TensorParallel

TOLERANCE = 1e-5  # of the norm


def problems(module: nn.Module, plan: ModelPlan, size: int, loss_parallel: bool = False) -> str:
    return " | ".join(validate_tensor(module, plan, size, loss_parallel=loss_parallel))


def cut(module: nn.Module, plan: ModelPlan, **options: Any) -> TensorParallel:
    """Split a whole module over all ranks, as a strategy does."""
    assert problems(module, plan, dist.get_world_size(), options.get("loss_parallel", False)) == ""
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
    """Holder of named modules."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


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
def test_styles_match_the_unsplit_module(ranks, world_size):
    for found in ranks(styles, world_size, timeout=60):
        for style, values in found.items():
            assert max(values.values()) < TOLERANCE, (style, values)


class Stack(nn.Module):
    """Blocks between projections, to check gradients before and after the blocks."""

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["first", "first norm whole", "second"])
def test_torch_encoder(ranks, kind):
    for sequence, world_size in ((False, 4), (True, 2)):
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
    want, got = (m.attention(*(x[0] for x in inputs)) for m in (whole, split))
    return found + [(a - b).norm().item() for a, b in zip(want, got, strict=True)]


def test_multihead_attention_variants(ranks):
    for found in ranks(attention_weights, 2):
        assert max(found) < TOLERANCE


class NormedHeads(nn.Module):
    """Feed-forward with a norm of all features and one of each head, whose gradients must be summed."""

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
    said = {"tensor": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
    plan = make_plan(whole, said, tensor_size=4, sequence_parallel=sequence)
    values = differences(whole, plan, partial(run_on, floats(2, 8, 16), call), sequence_parallel=sequence)
    return values, TensorParallel(whole, plan, dist.group.WORLD, sequence_parallel=sequence).summed


def test_gradients_of_replicated_parameters_are_summed(ranks):
    for values, summed in ranks(beside_differences, 4, False):
        assert max(values.values()) < TOLERANCE, values
        assert summed == {f"blocks.{i}.head_norm.{key}" for i in range(2) for key in ("weight", "bias")}
    for values, summed in ranks(beside_differences, 4, True):
        assert max(values.values()) < TOLERANCE, values
        assert {"blocks.1.norm.weight", "blocks.0.down.bias", "blocks.0.head_norm.bias"} < summed
        assert "last.weight" not in summed


def traffic(sequence: bool) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return kind and elements of each collective of two blocks, in forward and backward."""
    torch.manual_seed(0)
    model = gpt()
    cut(model, gpt_plan(), sequence_parallel=sequence)
    sent: list[tuple[str, int]] = []

    def counting(kind: str, size: Callable[..., int], call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            sent.append((kind, size(*args)))
            return call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting("all-reduce", lambda x: x.numel(), dist.all_reduce))
        for name, kind, which in (("all_gather", "gather", 0), ("reduce_scatter", "reduce-scatter", 1)):
            size = lambda *args, which=which: args[which].numel()  # noqa: E731
            patch.setattr(flat_collectives, name, counting(kind, size, getattr(flat_collectives, name)))
        y = model(torch.zeros(2, 8, dtype=torch.long))
        forward = list(sent)
        sent.clear()
        y.sum().backward()
    return forward, sent


@pytest.mark.parametrize("sequence", [False, True])
def test_traffic_matches_theory(ranks, sequence):
    n = 2 * 8 * 32  # hidden states
    forward, backward = ranks(traffic, 2, sequence)[0]
    if sequence:
        pair = [("gather", n), ("reduce-scatter", n)]
        assert forward == pair * 4 + [("gather", n)]
        assert sorted(backward) == sorted(pair * 4 + [("gather", n)])
    else:
        assert forward == backward == [("all-reduce", n)] * 4  # query, key and value share one in backward


def loss_of(module: nn.Module, ids: Tensor, how: str) -> dict[str, Tensor]:
    logits = module(ids)
    targets = ids.roll(1, 1)
    if how == "flat":
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten())
    elif how == "shifted":  # as Hugging Face does it, with classes that do not count
        logits = logits.float()[..., :-1, :].contiguous()
        targets = targets[:, 1:].masked_fill(targets[:, 1:] % 3 == 0, -100)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits.reshape(-1, 32), targets.reshape(-1))
    elif how == "second":
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean()
    else:
        weight = torch.arange(32.0) + 1
        loss = nn.CrossEntropyLoss(weight=weight, ignore_index=4, reduction=how)(
            logits.flatten(0, 1), targets.flatten()
        )
    assert type(loss) is Tensor
    loss.backward()
    return {"loss": loss.detach(), "best": logits.argmax(-1).double()}


def loss_differences(how: str) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    run = partial(lambda ids, how, module: loss_of(module, ids, how), ids, how)
    return differences(gpt(head=True), gpt_plan(head=True), run, sequence_parallel=how == "flat", loss_parallel=True)


@pytest.mark.parametrize("how", ["flat", "shifted", "second", "mean", "sum"])
def test_cross_entropy_of_split_logits(ranks, how):
    for values in ranks(loss_differences, 4, how, timeout=60):
        assert max(values.values()) < TOLERANCE, values


def loss_traffic_and_refusals() -> tuple[list[int], list[str], bool]:
    torch.manual_seed(0)
    model = gpt(head=True)
    cut(model, gpt_plan(head=True), loss_parallel=True)
    ids = torch.zeros(2, 8, dtype=torch.long)
    logits = model(ids)
    sent: list[int] = []
    original = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda x, **kw: (sent.append(x.numel()), original(x, **kw)))
        F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    texts = []
    for misuse in (
        lambda: logits.softmax(-1),
        lambda: logits + torch.zeros(32),
        lambda: logits[..., :16],
        lambda: logits.view(-1),
        lambda: torch.topk(logits, 3),
        lambda: logits.grad,
        lambda: F.cross_entropy(logits, ids),
    ):
        with pytest.raises(RuntimeError, match="loss_parallel=false") as raised:
            misuse()
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError, match="target is no class"):
        F.cross_entropy(logits.flatten(0, 1), ids.flatten() + 32)
    with torch.no_grad():
        plain = type(model(ids)) is Tensor
    return sent, texts, plain


def test_traffic_and_refusals_of_sharded_logits(ranks):
    sent, texts, plain = ranks(loss_traffic_and_refusals, 2)[0]
    assert sent == [16, 32]  # the largest; then the normalizer and the target's logit
    assert "softmax" in texts[0]
    assert plain, "evaluation gets whole logits"


class Dropping(nn.Module):
    """A dropout on split and one on whole activations in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(self.up(x))))


def masks(sequence: bool, checkpointed: bool) -> tuple[dict[str, list[Tensor]], Tensor, Tensor]:
    """Return dropout masks, the gradient before the blocks, and the final state of the generator."""
    torch.manual_seed(0)
    model = Stack([Dropping(), Dropping()], 16)
    cut(model, plan_of(2, {"up": "colwise", "down": "rowwise"}, {}, ()), sequence_parallel=sequence)
    seen: dict[str, list[Tensor]] = {"inner": [], "outer": []}
    for block in model.blocks:
        for name, found in seen.items():
            hook = lambda m, args, out, found=found: found.append(out.detach() == 0)  # noqa: E731
            getattr(block, name).register_forward_hook(hook)
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    torch.manual_seed(7)
    model(floats(2, 8, 16)).square().sum().backward()
    return seen, model.first.weight.grad, torch.get_rng_state()


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_differs_only_on_split_activations(ranks, sequence):
    plain, again = ranks(masks, 2, sequence, False), ranks(masks, 2, sequence, True)
    (one, gradient, state), (other, other_gradient, other_state) = plain
    assert not any(torch.equal(a, b) for a, b in zip(one["inner"], other["inner"], strict=True))
    assert [torch.equal(a, b) for a, b in zip(one["outer"], other["outer"], strict=True)] == [not sequence] * 2
    assert not torch.equal(one["inner"][0], one["inner"][1]), "every block draws anew"
    assert torch.equal(gradient, other_gradient)
    assert torch.equal(state, other_state), "outside, ranks draw the same numbers"
    for (first, before, _), (second, after, _) in zip(plain, again, strict=True):
        assert torch.equal(first["inner"][0], second["inner"][0])
        assert len(second["inner"]) == 4  # the blocks ran once more, from the last to the first
        assert all(torch.equal(a, b) for a, b in zip(second["inner"][:2], second["inner"][:1:-1], strict=True))
        assert torch.equal(before, after)


def dropping_outputs(kind: str) -> tuple[Tensor, bool]:
    torch.manual_seed(0)
    if kind == "encoder":
        model: nn.Module = Stack([nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)], 16)
        plan = plan_of(1, {"self_attn": "packed_colwise:3", "linear1": "colwise", "linear2": "rowwise"}, {}, ())
    else:
        model, plan = gpt(), gpt_plan()
    cut(model, plan)
    before = torch.get_rng_state()
    y = model(floats(2, 8, 16) if kind == "encoder" else torch.zeros(2, 8, dtype=torch.long))
    return y.detach(), torch.equal(torch.get_rng_state(), before)


def test_dropout_keeps_ranks_consistent(ranks):
    (one, _), (other, _) = ranks(dropping_outputs, 2, "encoder")
    assert torch.equal(one, other)
    assert all(unchanged for _, unchanged in ranks(dropping_outputs, 2, "gpt"))


def test_draws_randomly():
    assert not draws_randomly(gpt())
    assert not draws_randomly(nn.Dropout(0.0))
    assert draws_randomly(nn.Sequential(nn.Dropout(0.1)))
    assert draws_randomly(nn.MultiheadAttention(4, 2, dropout=0.1))
    inner = SplitRandomness(1)
    assert inner.enter(torch.device("cpu"))
    assert not inner.enter(torch.device("cpu"))
    inner.leave()
    inner.leave()


def test_regions_leave_common_numbers_to_code_outside():
    region, before = SplitRandomness(1).region, torch.get_rng_state()
    with region(torch.device("cpu")):
        pass
    assert torch.equal(torch.get_rng_state(), before), "without draws, the next number is that of one process"
    with region(torch.device("cpu")):
        one = torch.rand(8)
    with region(torch.device("cpu")):
        assert not torch.equal(torch.rand(8), one)


def test_problems_name_values_and_alternatives():
    with torch.device("meta"):
        model = gpt(head=True)
        llama = Holder(attention=Holder(q_proj=nn.Linear(16, 16), k_proj=nn.Linear(16, 8)))
        llama.attention.head_dim = 4
    assert problems(model, gpt_plan(head=True), 4, loss_parallel=True) == ""
    text = problems(model, gpt_plan(head=True), 8)
    assert "blocks.*.attention.kv_heads = 4" in text
    assert "possible sizes of the tensor axis: 1, 2, 4" in text
    assert text.count("kv_heads") == 1
    assert "cannot be split into 3" in problems(model, gpt_plan(), 3)
    heads = ModelPlan(tensor={"attention.q_proj": "colwise", "attention.k_proj": "colwise"})
    assert "attention.k_proj.outputs/4 = 2; possible sizes of the tensor axis: 1, 2" in problems(llama, heads, 4)
    assert "not for a RMSNorm" in problems(model, ModelPlan(tensor={"norm": "colwise"}), 2)
    packed = ModelPlan(tensor={"head": "packed_colwise:5"})
    assert "32 outputs: they do not divide into 5 projections" in problems(model, packed, 2)
    assert "loss_parallel=true" in problems(model, gpt_plan(), 2, loss_parallel=True)


def test_problems_of_ties_and_embeddings():
    tied = Holder(words=nn.Embedding(12, 8), head=nn.Linear(8, 12, bias=False))
    tied.head.weight = tied.words.weight
    text = problems(tied, ModelPlan(tensor={"words": "vocabulary"}), 2)
    assert "head.weight: none, words.weight: vocabulary are split differently" in text
    normed = Holder(words=nn.Embedding(12, 8, max_norm=1.0))
    assert "max_norm=1.0" in problems(normed, ModelPlan(tensor={"words": "vocabulary"}), 2)


def odd_sequence() -> str:
    model = gpt()
    cut(model, gpt_plan(), sequence_parallel=True)
    with pytest.raises(ValueError, match="multiple of 2") as raised:
        model(torch.zeros(2, 7, dtype=torch.long))
    model.eval()
    assert model(torch.zeros(2, 1, dtype=torch.long)).shape == (2, 1, 32)  # evaluation slices nothing
    return str(raised.value)


def test_refuses_indivisible_sequences_in_training(ranks):
    text = ranks(odd_sequence, 2)[0]
    assert "(2, 7, 32)" in text
    assert "sequence_parallel=false" in text


def test_refuses_unsplit_attention_under_sequence_parallelism():
    said = {"tensor": {"blocks.*.attention.*": "none"}}
    assert make_plan(gpt(), said, tensor_size=2).tensor
    with pytest.raises(ValueError, match=r"blocks\.\*\.attention does not compute the same on a slice of the sequence"):
        make_plan(gpt(), said, tensor_size=2, sequence_parallel=True)


def compiled_differences() -> list[tuple[float, float]]:
    found = []
    for sequence in (False, True):
        torch.manual_seed(0)
        model = gpt()
        cut(model, gpt_plan(), sequence_parallel=sequence)
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
        want = model(ids)
        want.sum().backward()
        gradient = model.embedding.weight.grad.clone()
        model.zero_grad()
        model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="eager", fullgraph=True)
        got = model(ids)
        got.sum().backward()
        gradients = model.embedding.weight.grad - gradient
        found.append(((want - got).abs().max().item(), gradients.abs().max().item()))
    return found


def test_a_block_compiles_as_one_graph(ranks):
    for found in ranks(compiled_differences, 2, timeout=120):
        for outputs, gradients in found:
            assert outputs < 1e-5
            assert gradients < 1e-4
