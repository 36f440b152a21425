"""Feed-forward layers: what stands between two projections decides whether they can be split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import DIM, Block, Classifier, Mlp, mlp, stack, tokens, vectors
from tests.zoo.cells import Row

HIDDEN = 32


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


class TopK(Mlp):
    """k-sparse activations."""

    def between(self, hidden: Tensor) -> Tensor:
        top = hidden.topk(8, -1)
        return torch.zeros_like(hidden).scatter(-1, top.indices, F.relu(top.values))


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


class WithShortcut(Mlp):
    """The hidden layer's first channels leave around the second projection."""

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


def between(name: str, change: Callable[[Tensor], Tensor], equal: str) -> Row:
    """A row whose feed-forward layer has ``change`` between its projections."""
    return Row(name, mlp(partial(Mlp, between=change)), tokens, equal=equal)


ROWS = [
    Row(
        "GELU",
        mlp(Mlp),
        tokens,
        equal="ddp, zero1, zero2, zero3, tensor, sequence, pipeline, interleaved, context, ulysses",
    ),
    Row("residual MLP on vectors", Classifier, vectors, equal="zero3, tensor"),
    between("softmax between", lambda hidden: hidden.softmax(-1), "tensor, sequence"),
    between(
        "RMS norm between",
        lambda x: F.silu(x) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        "tensor, pipeline x tensor",
    ),
    Row("RMSNorm module between", mlp(RmsModule), tokens, equal="tensor, sequence"),
    Row("LayerNorm between", mlp(LayerNormed), tokens, equal="tensor, sequence"),
    between("normalize between", lambda hidden: F.normalize(F.relu(hidden), dim=-1), "tensor"),
    Row("top-k between", mlp(TopK), tokens, equal="tensor, zero2"),
    between("cosine between", lambda x: F.gelu(x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)), "tensor"),
    # Squeeze and excitation over the hidden width.
    between("gate by the mean", lambda x: F.gelu(x) * x.mean(-1, keepdim=True).sigmoid(), "tensor, tensor x shard"),
    between("scaled by the largest", lambda x: x / (1 + x.abs().amax(-1, keepdim=True)), "tensor"),
    Row("SwiGLU", mlp(SwiGlu), tokens, equal="tensor, sequence"),
    Row("packed GLU", mlp(PackedGlu), tokens, equal="tensor, sequence"),
    Row("interleaved GLU", mlp(InterleavedGlu), tokens, equal="tensor"),
    Row("folded GLU", mlp(FoldedGlu), tokens, equal="tensor"),
    # Channels of two groups.
    between("channel shuffle", lambda x: F.gelu(x).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), "tensor"),
    between("cumulative sum over channels", lambda hidden: F.gelu(hidden).cumsum(-1) / HIDDEN, "tensor"),
    Row("PReLU by channel", mlp(Prelu), tokens, equal="zero3, tensor"),
    Row("a parameter by channel", mlp(Snake), tokens, equal="zero3, tensor"),
    Row("maxout", mlp(Maxout), tokens, equal="tensor"),
    Row("three projections", mlp(ThreeLayers), tokens, equal="tensor, sequence"),
    Row("shortcut of hidden channels", mlp(WithShortcut), tokens, equal="tensor"),
    Row("tied transpose", mlp(TiedTranspose), tokens, equal="zero3, tensor"),
    Row("functional", mlp(Functional), tokens, equal="tensor, sequence"),
    Row("bias used twice", mlp(BiasTwice), tokens, equal="tensor, sequence"),
    Row("Sequential", mlp(Sequence), tokens, equal="tensor, sequence"),
    Row("names that tell nothing", mlp(MadeNames), tokens, equal="tensor, pipeline x tensor"),
    Row("names that tell the opposite", mlp(SwappedNames), tokens, equal="tensor"),
    Row("low rank", mlp(LowRank), tokens, equal="zero3, tensor"),
    between("group norm between", lambda x: F.gelu(F.group_norm(x.flatten(0, -2), 4).view_as(x)), "tensor"),
    # An index has no gradient.
    between("argmax between", lambda x: F.gelu(x) * (1 + x.argmax(-1, keepdim=True) / HIDDEN), "tensor"),
    Row(
        "softmax between, on vectors",
        stack(partial(Mlp, between=lambda hidden: hidden.softmax(-1))),
        vectors,
        equal="tensor, pipeline",
    ),
    Row("odd width", stack(lambda: Block(hidden=33)), vectors, equal="zero3", either="tensor"),
]
