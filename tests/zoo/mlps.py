"""Feed-forward layers: what stands between two projections decides whether they can be split."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import DIM, Block, Classifier, Gpt, LanguageModel, Layer, Mlp, Stack, tokens, vectors
from tests.zoo.cells import Row

HIDDEN = 32


class Softmax(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden.softmax(-1)


class Rms(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return F.silu(hidden) * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


class RmsModule(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.RMSNorm(HIDDEN)

    def between(self, hidden: Tensor) -> Tensor:
        return self.inner_norm(F.gelu(hidden))


class LayerNormed(Mlp):
    """Sub-layer norm of BEiT-3 and Magneto."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn_layernorm = nn.LayerNorm(HIDDEN)

    def between(self, hidden: Tensor) -> Tensor:
        return self.ffn_layernorm(F.gelu(hidden))


class Normalized(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return F.normalize(F.relu(hidden), dim=-1)


class TopK(Mlp):
    """k-sparse activations."""

    def between(self, hidden: Tensor) -> Tensor:
        top = hidden.topk(8, -1)
        return torch.zeros_like(hidden).scatter(-1, top.indices, F.relu(top.values))


class Cosine(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden / hidden.norm(dim=-1, keepdim=True).clamp_min(1e-6))


class MeanGate(Mlp):
    """Squeeze and excitation over the hidden width."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden) * hidden.mean(-1, keepdim=True).sigmoid()


class MaxScaled(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden / (1 + hidden.abs().amax(-1, keepdim=True))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PackedGlu(nn.Module):
    """One projection holds gate and value: two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)

    def gated(self, hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, -1)
        return F.silu(gate) * value

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(self.w1(x)))


class InterleavedGlu(PackedGlu):
    """Gate and value take turns."""

    def gated(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden[..., ::2]) * hidden[..., 1::2]


class FoldedGlu(PackedGlu):
    """The first half gates the second one in reverse order."""

    def gated(self, hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, -1)
        return gate.sigmoid() * value.flip(-1)


class Shuffled(Mlp):
    """Channels of two groups are shuffled."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Cumulated(Mlp):
    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden).cumsum(-1) / HIDDEN


class Prelu(Mlp):
    """A trained slope for each hidden channel."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU(HIDDEN)

    def between(self, hidden: Tensor) -> Tensor:
        return self.act(hidden.flatten(0, -2)).view_as(hidden)


class Snake(Mlp):
    """An activation with a plain parameter for each hidden channel."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + (self.alpha * hidden).sin().square() / self.alpha


class Maxout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).unflatten(-1, (HIDDEN, 2)).amax(-1))


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class WithShortcut(nn.Module):
    """The hidden layer's first channels leave around the second projection."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        return self.fc2(hidden) + hidden[..., :DIM]


class TiedTranspose(nn.Module):
    """The second projection is the first one's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.fc1(x)), self.fc1.weight.t())


class Functional(Mlp):
    """Uses weights of its layers without calling them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.fc1.weight, self.fc1.bias)
        return F.linear(F.gelu(hidden), self.fc2.weight, self.fc2.bias)


class BiasTwice(Mlp):
    """Adds the second projection's bias once more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + self.fc2.bias


class Sequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))


class MadeNames(nn.Module):
    """Names that tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.omega = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.omega(F.gelu(self.alpha(x)))


class SwappedNames(nn.Module):
    """Names that tell the opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2, self.fc1 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc2(x)))


class LowRank(nn.Module):
    """Two factors in place of one projection, with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Grouped(Mlp):
    """A group norm over hidden channels."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(F.group_norm(hidden.flatten(0, -2), 4).view_as(hidden))


class Argmax(Mlp):
    """Adds the index of the largest channel, which has no gradient."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden) * (1 + hidden.argmax(-1, keepdim=True) / HIDDEN)


def lm(mlp: Callable[[], nn.Module]) -> Callable[[], LanguageModel]:
    """A GPT with this feed-forward layer."""
    return lambda: LanguageModel(lambda: Gpt(lambda: Layer(mlp=mlp)))


def stack(block: Callable[[], nn.Module]) -> Callable[[], Classifier]:
    """Equal blocks on vectors."""
    return lambda: Classifier(lambda: Stack(block))


ROWS = [
    Row(
        "GELU",
        lm(Mlp),
        tokens,
        equal="ddp, zero1, zero2, zero3, tensor, sequence, pipeline, interleaved, context, ulysses",
    ),
    Row("residual MLP on vectors", Classifier, vectors, equal="zero3, tensor"),
    Row("softmax between", lm(Softmax), tokens, equal="tensor, sequence"),
    Row("RMS norm between", lm(Rms), tokens, equal="tensor, pipeline x tensor"),
    Row("RMSNorm module between", lm(RmsModule), tokens, equal="tensor, sequence"),
    Row("LayerNorm between", lm(LayerNormed), tokens, equal="tensor, sequence"),
    Row("normalize between", lm(Normalized), tokens, equal="tensor"),
    Row("top-k between", lm(TopK), tokens, equal="tensor, zero2"),
    Row("cosine between", lm(Cosine), tokens, equal="tensor"),
    Row("gate by the mean", lm(MeanGate), tokens, equal="tensor, tensor x shard"),
    Row("scaled by the largest", lm(MaxScaled), tokens, equal="tensor"),
    Row("SwiGLU", lm(SwiGlu), tokens, equal="tensor, sequence"),
    Row("packed GLU", lm(PackedGlu), tokens, equal="tensor, sequence"),
    Row("interleaved GLU", lm(InterleavedGlu), tokens, equal="tensor"),
    Row("folded GLU", lm(FoldedGlu), tokens, equal="tensor"),
    Row("channel shuffle", lm(Shuffled), tokens, equal="tensor"),
    Row("cumulative sum over channels", lm(Cumulated), tokens, equal="tensor"),
    Row("PReLU by channel", lm(Prelu), tokens, equal="zero3, tensor"),
    Row("a parameter by channel", lm(Snake), tokens, equal="zero3, tensor"),
    Row("maxout", lm(Maxout), tokens, equal="tensor"),
    Row("three projections", lm(ThreeLayers), tokens, equal="tensor, sequence"),
    Row("shortcut of hidden channels", lm(WithShortcut), tokens, equal="tensor"),
    Row("tied transpose", lm(TiedTranspose), tokens, equal="zero3, tensor"),
    Row("functional", lm(Functional), tokens, equal="tensor, sequence"),
    Row("bias used twice", lm(BiasTwice), tokens, equal="tensor, sequence"),
    Row("Sequential", lm(Sequence), tokens, equal="tensor, sequence"),
    Row("names that tell nothing", lm(MadeNames), tokens, equal="tensor, pipeline x tensor"),
    Row("names that tell the opposite", lm(SwappedNames), tokens, equal="tensor"),
    Row("low rank", lm(LowRank), tokens, equal="zero3, tensor"),
    Row("group norm between", lm(Grouped), tokens, equal="tensor"),
    Row("argmax between", lm(Argmax), tokens, equal="tensor"),
    Row("softmax between, on vectors", stack(Softmax), vectors, equal="tensor, pipeline"),
    Row("odd width", stack(lambda: Block(hidden=33)), vectors, equal="zero3", either="tensor"),
]
