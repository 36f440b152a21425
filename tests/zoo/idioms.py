"""What PyTorch offers to a model's author: recomputation, functions with their own gradient, compilers, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.base import (
    CLASSES,
    DIM,
    LENGTH,
    VOCABULARY,
    Attention,
    Block,
    Classifier,
    Gpt,
    LanguageModel,
    Layer,
    Mlp,
    Stack,
    gpt,
    mlp,
    net,
    noisy,
    stack,
    text,
    tokens,
    vectors,
)
from tests.zoo.cells import Row

# ---- recomputation --------------------------------------------------------------------------------------------------


class RecomputesInside(Layer):
    """The feed-forward layer is recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + checkpoint(self.mlp, self.norm2(x), use_reentrant=False)


class Recomputes(Gpt):
    """Every block is recomputed."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputesSequential(nn.Sequential):
    """Blocks are recomputed in two parts."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)), nn.Linear(DIM, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self, 2, x, use_reentrant=False)


# ---- functions with their own gradient ------------------------------------------------------------------------------


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * gate * (1 + x * (1 - gate))


class _Product(torch.autograd.Function):
    """``x @ weight.T``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class OwnProduct(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = _Product.apply(x, self.fc1.weight) + self.fc1.bias
        return _Product.apply(F.gelu(hidden), self.fc2.weight) + self.fc2.bias


class _Binary(torch.autograd.Function):
    """The sign times the mean of the sizes of the whole weight, straight through, as in BitNet."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(weight: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """Fake quantization: straight through by detach, with a scale for all or for each output."""
    scale = weight.detach().abs().amax(dim, keepdim=True) / 7
    return weight + ((weight / scale).round() * scale - weight).detach()


class RoundedWeights(Mlp):
    def __init__(self, change: Callable[[Tensor], Tensor] = rounded) -> None:
        super().__init__()
        self.rounded = change

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.rounded(self.fc1.weight), self.fc1.bias))
        return F.linear(hidden, self.rounded(self.fc2.weight), self.fc2.bias)


def rounded_activations(hidden: Tensor) -> Tensor:
    """A scale for each position's activations."""
    hidden = F.gelu(hidden)
    scale = hidden.detach().abs().amax(-1, keepdim=True) / 7
    return hidden + ((hidden / scale).round() * scale - hidden).detach()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Adversarial(Classifier):
    """A second head behind a reversed gradient (DANN)."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(DIM, 2)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net.run(self.net.stem(x))
        return F.cross_entropy(self.net.head(hidden), y) + F.cross_entropy(self.domain(_Reverse.apply(hidden)), y % 2)


# ---- compilers ------------------------------------------------------------------------------------------------------


@torch.jit.script
def _bias_gelu(bias: Tensor, x: Tensor) -> Tensor:
    return F.gelu(x + bias)


class Scripted(Mlp):
    """Megatron's fused bias and GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(_bias_gelu(self.fc1.bias, F.linear(x, self.fc1.weight)))


class CompiledInPlace(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


# ---- torch.func -----------------------------------------------------------------------------------------------------


class FunctionalCall(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(torch.func.functional_call(self.net, dict(self.net.named_parameters()), (x,)), y)


class PerSample(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(torch.func.vmap(self.net)(x), y)


class Tangent(Classifier):
    """A penalty on the change along a direction."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out, along = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return F.cross_entropy(out, y) + 0.01 * along.square().mean()


class MetaLearning(Classifier):
    """MAML: the loss after one step of the inner loop."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        weights = dict(self.net.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)


# ---- layers ---------------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """The mean of a bag of words, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, DIM)
        self.net = Stack()

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.bag(ids))


class LastWord(Classifier):
    """The class is the last word of a text."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]), batch[:, -1] % CLASSES)


class Lazy(nn.Module):
    """Sizes are known from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.LazyLinear(32), nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Pairs(Mlp):
    """A bilinear form between two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(16, 16, 32)

    def between(self, hidden: Tensor) -> Tensor:
        return self.form(*hidden.chunk(2, -1))


class BlockDiagonal(Mlp):
    """A product for each group of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.Parameter(0.3 * torch.randn(4, 8, 8))

    def between(self, hidden: Tensor) -> Tensor:
        groups = hidden.flatten(0, -2).unflatten(-1, (4, 8)).transpose(0, 1)
        return F.gelu(torch.bmm(groups, self.groups).transpose(0, 1).flatten(1).view_as(hidden))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Symmetric(nn.Module):
    """A block with a symmetric weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        parametrize.register_parametrization(self.fc, "weight", _Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.fc(self.norm(x)))


class Adaptive(LanguageModel):
    """Rare words have smaller heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.net.head
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(DIM, VOCABULARY, [8, 16])

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.net.norm(self.net.run(self.net.embed(batch[:, :-1])))
        loss: Tensor = self.softmax(hidden.flatten(0, 1), batch[:, 1:].flatten()).loss
        return loss


class Sampled(LanguageModel):
    """The true word against four others, by rows of the head."""

    def loss(self, batch: Tensor) -> Tensor:
        ids, target = batch[:, :-1], batch[:, 1:, None]
        hidden = self.net.norm(self.net.run(self.net.embed(ids)))
        others = (target + torch.arange(1, 5, device=ids.device)) % VOCABULARY
        rows = F.embedding(torch.cat((target, others), -1), self.net.head.weight)
        scores = (rows @ hidden[..., None])[..., 0]
        return F.cross_entropy(scores.flatten(0, 1), scores.new_zeros(scores.shape[0] * scores.shape[1]).long())


class TorchDecoder(nn.Module):
    """Embeddings of two texts, torch's own decoder over the encoded first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM)
        layer = nn.TransformerDecoderLayer(DIM, 4, 32, dropout=0.0, batch_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 4), nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.decoder(x, self.encoder(x.flip(1)), tgt_mask=mask, tgt_is_causal=True))


class Example(LanguageModel):
    """Lightning's summary runs it on an example."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)


# ---- heads and losses -----------------------------------------------------------------------------------------------


class SeveralTokens(LanguageModel):
    """A head for each of the next two tokens."""

    def __init__(self) -> None:
        super().__init__()
        del self.net.head
        self.heads = nn.ModuleList(nn.Linear(DIM, VOCABULARY) for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.net.norm(self.net.run(self.net.embed(batch[:, :-2])))
        length = hidden.shape[1]
        losses = [
            F.cross_entropy(head(hidden).flatten(0, 1), batch[:, at : at + length].flatten())
            for at, head in enumerate(self.heads, 1)
        ]
        return torch.stack(losses).mean()


class Normalizer(LanguageModel):
    """PaLM's penalty on the logarithm of the normalizer."""

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        z = logits.logsumexp(-1)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 1e-2 * z.square().mean()


class Smoothed(LanguageModel):
    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=0.1)


class Distributions(LanguageModel):
    """The loss by torch.distributions, with a bonus for entropy."""

    def loss(self, batch: Tensor) -> Tensor:
        words = torch.distributions.Categorical(logits=self(batch[:, :-1]))
        return -words.log_prob(batch[:, 1:]).mean() - 0.01 * words.entropy().mean()


class BestOfTwo(LanguageModel):
    """Top-k of the logits in the loss."""

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        margin = logits.topk(2).values.diff(dim=-1).mean()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.1 * margin.square()


class Codebook(Classifier):
    """VQ: the nearest of eight codes, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, DIM)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net.run(self.net.stem(x))
        code = self.codes(torch.cdist(hidden, self.codes.weight).argmin(-1))
        commitment = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
        return F.cross_entropy(self.net.head(hidden + (code - hidden).detach()), y) + commitment


class MovingCodebook(Codebook):
    """VQ-VAE 2: codes are averages of what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.codes.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net.run(self.net.stem(x))
        nearest = F.one_hot(torch.cdist(hidden, self.codes.weight).argmin(-1), 8).to(hidden)
        with torch.no_grad():
            means = (nearest.T @ hidden) / nearest.sum(0).clamp(min=1)[:, None]
            self.codes.weight.lerp_(means, 0.1)
        code = nearest @ self.codes.weight
        return F.cross_entropy(self.net.head(hidden + (code - hidden).detach()), y) + F.mse_loss(hidden, code)


class Gumbel(Classifier):
    """Hard choices with noise out of the sample."""

    def __init__(self) -> None:
        super().__init__()
        del self.net.head
        self.choice = nn.Linear(DIM, DIM)

    def loss(self, batch: Any) -> Tensor:
        x, noise, _ = batch
        soft = (self.choice(self.net.stem(x)) + noise).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), DIM).to(soft) + soft - soft.detach()
        return F.mse_loss(self.net.run(hard), x)


# ---- attention and blocks -------------------------------------------------------------------------------------------


class Window(Attention):
    """Each position sees the three before it, by a mask made in the block."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().triu(-3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Latents(nn.Module):
    """Perceiver's block: latents look at the inputs, then at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, latents: Tensor, x: Tensor) -> Tensor:
        latents = latents + self.look(latents, x, x, need_weights=False)[0]
        return latents + self.mlp(self.norm(latents))


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.latents = nn.Embedding(VOCABULARY, DIM), nn.Parameter(torch.randn(4, DIM))
        self.blocks, self.head = nn.ModuleList(Latents() for _ in range(4)), nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(ids)
        latents = self.latents.expand(len(ids), -1, -1)
        for block in self.blocks:
            latents = block(latents, x)
        return self.head(latents.mean(1))


class SomePositions(Layer):
    """Mixture of depths: the feed-forward layer computes the four positions with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        scores, chosen = self.score(x).squeeze(-1).topk(LENGTH // 2, -1)
        at = chosen[..., None].expand(-1, -1, DIM)
        done = self.mlp(self.norm2(x.gather(1, at))) * scores.sigmoid()[..., None]
        return x.scatter_add(1, at, done)


class Delegates(nn.Module):
    """A wrapper that answers for what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class SlowGradients(Block):
    """A hook halves the gradient that leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))


class Sliced(nn.Module):
    """A step runs slices of one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), *(Block() for _ in range(4)), nn.Linear(DIM, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[-1](F.normalize(self.layers[1:-1](self.layers[:1](x)), dim=-1))


class DropsBlocks(Stack):
    """Leaves out the last two blocks every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks[: 4 if self.calls % 2 else 2]:
            x = block(x)
        return x


class Chunked(Mlp):
    """Positions in two parts, as apply_chunking_to_forward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Chunked, self).forward(part) for part in x.chunk(2, 1)], 1)


class Repeats(Gpt):
    """Positions beside the batch within the blocks."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).mean(1)


MOST, DATA = "zero3, tensor, pipeline, context", "ddp, zero3, tensor, pipeline"
SPLIT = "zero3, tensor, sequence, pipeline"
ROWS = [
    Row("recomputes within blocks", gpt(RecomputesInside), tokens, equal="zero3, tensor, pipeline, context"),
    Row("recomputes blocks", text(Recomputes), tokens, either=MOST),
    Row("recomputes, reentrant", text(partial(Recomputes, reentrant=True)), tokens, either=DATA),
    Row("recomputes in parts", net(RecomputesSequential), vectors, either="zero3, tensor, pipeline"),
    Row("activation with its gradient", mlp(partial(Mlp, between=_Swish.apply)), tokens, either=MOST),
    Row("product with its gradient", mlp(OwnProduct), tokens, either=SPLIT),
    Row("binary weights", mlp(partial(RoundedWeights, _Binary.apply)), tokens, either=SPLIT),
    Row("rounded weights", mlp(RoundedWeights), tokens, either=SPLIT),
    Row(
        "rounded weights by row",
        mlp(partial(RoundedWeights, partial(rounded, dim=(1,)))),
        tokens,
        either="zero3, tensor, pipeline",
    ),
    Row("rounded activations", mlp(partial(Mlp, between=rounded_activations)), tokens, either=f"{SPLIT}, context"),
    Row("reversed gradients", Adversarial, vectors, either=DATA),
    Row("scripted function", mlp(Scripted), tokens, either=SPLIT),
    Row(
        "compiled function",
        mlp(lambda: Mlp(between=torch.compile(lambda hidden: F.gelu(hidden) * 0.9, backend="eager"))),
        tokens,
        either="zero3, tensor, pipeline",
    ),
    Row("compiled blocks", gpt(lambda: torch.compile(Layer(), backend="eager")), tokens, either=f"ddp, {MOST}"),
    Row("compiled network", text(lambda: torch.compile(Gpt(), backend="eager")), tokens, either=f"ddp, {MOST}"),
    Row("compiled in place", CompiledInPlace, tokens, either=f"ddp, {MOST}"),
    Row("functional_call", FunctionalCall, vectors, either="ddp, zero1, zero3, tensor, pipeline"),
    Row("vmap", PerSample, vectors, either=DATA),
    Row("jvp", Tangent, vectors, either=DATA),
    Row("MAML", MetaLearning, vectors, either="tensor, pipeline"),
    Row("EmbeddingBag", partial(LastWord, Bags), tokens, either="zero3, tensor, pipeline"),
    Row("lazy layers", net(Lazy), vectors, either="ddp, zero3, tensor"),
    Row("bilinear between", mlp(Pairs), tokens, either="tensor, pipeline"),
    Row("block-diagonal between", mlp(BlockDiagonal), tokens, either="zero3, tensor, pipeline"),
    Row("symmetric weights", stack(Symmetric), vectors, either="zero3, tensor, pipeline"),
    Row("adaptive softmax", Adaptive, tokens, either=f"ddp, {MOST}"),
    Row("sampled softmax", Sampled, tokens, either=MOST),
    Row("torch's decoder", text(TorchDecoder), tokens, either=MOST),
    Row("two tokens ahead", SeveralTokens, tokens, either=f"{SPLIT}, context"),
    Row("z-loss", Normalizer, tokens, either=f"{SPLIT}, context"),
    Row("label smoothing", Smoothed, tokens, either="tensor, pipeline, context"),
    Row("categorical distribution", Distributions, tokens, either=MOST),
    Row("top-k of logits", BestOfTwo, tokens, either="tensor, pipeline, context"),
    Row("codebook", Codebook, vectors, either=DATA),
    Row("codebook of averages", MovingCodebook, vectors, either="tensor, pipeline"),
    Row("hard choices", Gumbel, noisy, either=DATA),
    Row("sliding window", gpt(partial(Layer, Window)), tokens, either="tensor, pipeline, context, ulysses, gather"),
    Row("Perceiver", partial(LastWord, Perceiver), tokens, either=MOST),
    Row("mixture of depths", gpt(SomePositions), tokens, either=f"{SPLIT}, context"),
    Row("wrappers", text(lambda: Delegates(Gpt())), tokens, either=MOST),
    Row("wrapped blocks", gpt(lambda: Delegates(Layer())), tokens, either=MOST),
    Row("backward hooks", stack(SlowGradients), vectors, either=DATA),
    Row("slices of a Sequential", net(Sliced), vectors, either="zero3, tensor, pipeline"),
    Row("dropped blocks", net(DropsBlocks), vectors, either="zero3, tensor"),
    Row("positions in parts", mlp(Chunked), tokens, either="tensor, sequence, pipeline, context"),
    Row("repeated samples", text(Repeats), tokens, either=MOST),
    Row(
        "an example for the summary",
        Example,
        tokens,
        equal=f"ddp, {MOST}, pipeline x tensor",
        trainer=lambda: {"enable_model_summary": True},
    ),
]
