"""How networks use their blocks and what stands around them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import (
    CLASSES,
    DIM,
    VOCABULARY,
    Block,
    Blocks,
    Classifier,
    Gpt,
    LanguageModel,
    Layer,
    Stack,
    net,
    text,
    tokens,
    vectors,
)
from tests.zoo.cells import Row


class Twice(Stack):
    """All blocks run twice, as in universal transformers."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


class EachTwice(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Backwards(Stack):
    """Blocks run from the last to the first."""

    def run(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class SharedBlock(Stack):
    """One block, four times in the list (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


class SharedWeights(Stack):
    """All blocks share the first projection."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.fc1 = self.blocks[0].fc1


class Skipped(Stack):
    """The third block is never used."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 2:
                x = block(x)
        return x


class ByIndex(Stack):
    """The use of a block's output depends on its index."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) / (1 + 0.1 * index)
        return x


class WorkBetween(Stack):
    """A norm between blocks that belongs to the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.LayerNorm(DIM)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


class Gains(Stack):
    """A parameter for each block, held by the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(DIM)) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for gain, block in zip(self.gains, self.blocks, strict=True):
            x = block(x * gain)
        return x


class RootAfter(Stack):
    """A parameter of the network, used after the blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * self.scale


class RootBefore(RootAfter):
    def run(self, x: Tensor) -> Tensor:
        return Stack.run(self, x * self.scale)


class RootAround(RootAfter):
    """Used before and after the blocks."""

    def run(self, x: Tensor) -> Tensor:
        return Stack.run(self, x * self.scale) / (1 + self.scale.square())


class HeadFirst(Blocks):
    """The head is registered first and the stem last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.stem = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)))


class Conditional(Stack):
    """A condition from the input reaches each block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        condition, x = self.condition(x).sigmoid(), self.stem(x)
        for block in self.blocks:
            x = block(x * condition)
        return self.head(x)


class AdaBlock(Block):
    """A norm whose scale comes from a condition (DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition).chunk(2, -1)
        return x + self.fc2(F.gelu(self.fc1(self.norm(x) * (1 + scale) + shift)))


class Dit(Stack):
    """The condition is an argument of each block."""

    def __init__(self, trained: bool) -> None:
        super().__init__(AdaBlock)
        self.embed = nn.Linear(DIM, DIM).requires_grad_(trained)

    def forward(self, x: Tensor) -> Any:
        condition, x = self.embed(x.sin()), self.stem(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class ModulatedLayer(Layer):
    """A transformer's block whose norms a condition of each sample scales and shifts (DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 4 * DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d = self.modulation(F.silu(condition)).unsqueeze(1).chunk(4, -1)
        x = x + self.attn(self.norm1(x) * (1 + a) + b)
        return x + self.mlp(self.norm2(x) * (1 + c) + d)


class Modulated(Gpt):
    """The condition, a sum of the first token's embedding, is an argument of each block."""

    def __init__(self) -> None:
        super().__init__(ModulatedLayer)
        self.condition = nn.Linear(DIM, DIM)

    def run(self, x: Tensor) -> Tensor:
        condition = self.condition(x[:, 0])
        for block in self.blocks:
            x = block(x, condition)
        return x


class SkipLayer(Layer):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return super().forward(x if skip is None else x + skip)


class SkipConnections(Gpt):
    """Blocks of the second half get outputs of the first half, joined by a layer or as an argument (U-ViT)."""

    def __init__(self) -> None:
        super().__init__(SkipLayer)
        self.join = nn.Linear(2 * DIM, DIM)

    def run(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](self.join(torch.cat((second, first), -1)))
        return self.blocks[3](third, skip=first + second)


class MixingBetween(Gpt):
    """Layers between blocks that mix positions, and a loss on hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.conv = nn.Linear(DIM, DIM), nn.Conv1d(DIM, DIM, 3, padding=1)

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x * self.gate(x.mean(1, keepdim=True)).sigmoid())
        x = self.blocks[2](x + self.conv(x.mT).mT)
        self.exits = self.head(self.norm(x))
        return self.blocks[3](x)


class TwoExits(LanguageModel):
    network = MixingBetween

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + F.cross_entropy(self.net.exits.flatten(0, 1), batch[:, 1:].flatten())


class InSequence(Stack):
    """Blocks in a Sequential that is called as one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class Numbered(Stack):
    """Blocks as attributes ``layer0`` to ``layer3``."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        del self.blocks
        for index in range(4):
            setattr(self, f"layer{index}", Block())

    def run(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = getattr(self, f"layer{index}")(x)
        return x


class TwoLists(Stack):
    """An encoder's and a decoder's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Block() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        for block in self.decoder:
            x = block(x)
        return x


class Alternating(Stack):
    """Two kinds of blocks take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden=(32, 48)[index % 2]) for index in range(4))


class OtherCode(Block):
    """Same shapes, another computation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(self.norm(x)).sin())


class Lookalikes(Stack):
    """Two classes of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block, OtherCode)[index % 2]() for index in range(4))


class OneDiffers(Block):
    """A block whose code depends on an attribute."""

    softened = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(self.norm(x))
        return x + self.fc2(hidden.softmax(-1) if self.softened else F.gelu(hidden))


class ThirdDiffers(Stack):
    """The third block alone takes a softmax between its projections."""

    def __init__(self) -> None:
        super().__init__(OneDiffers)
        self.blocks[2].softened = True


class TiedByFunction(Gpt):
    """The head is the embedding's weight, used by a function."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Any:
        return F.linear(self.norm(self.run(self.embed(ids))), self.wte.weight)


class ByData(Stack):
    """Runs the blocks only if the batch says so."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) if x.abs().sum() > 0 else x


class EarlyReturn(Stack):
    """Returns in the middle when told so."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                break
        return x


class InPlace(Stack):
    """Changes a block's output in place."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
        return x


class Sliced(Stack):
    """Passes a part of the activations through the blocks."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(DIM // 2))

    def run(self, x: Tensor) -> Tensor:
        half, rest = x.chunk(2, -1)
        return torch.cat((super().run(half), rest), -1)


class Reversible(nn.Module):
    """Two streams through each block (RevNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(DIM), Block(DIM)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = a + self.f(b)
        return a, b + self.g(a)


class TwoStreams(Stack):
    def __init__(self) -> None:
        super().__init__(Reversible)

    def run(self, x: Tensor) -> Tensor:
        a, b = x, x
        for block in self.blocks:
            a, b = block(a, b)
        return a + b


class Masked(Gpt):
    """A mask and positions are arguments of each block."""

    def __init__(self) -> None:
        super().__init__(MaskedLayer)

    def run(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, attention_mask=mask, positions=torch.arange(x.shape[1], device=x.device))
        return x


class MaskedLayer(Layer):
    def forward(self, x: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        h = self.norm1(x) + 0.01 * positions[:, None]
        q, k, v = (self.attn.split(p(h)) for p in (self.attn.q_proj, self.attn.k_proj, self.attn.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        x = x + self.attn.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TwoHeads(LanguageModel):
    """Two losses on the last state; a target from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(DIM, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.net.norm(self.net.run(self.net.embed(batch[:, :-2])))
        first = F.cross_entropy(self.net.head(hidden).mT, batch[:, 1:-1])
        return first + 0.5 * F.cross_entropy(self.second(hidden).mT, batch[:, 2:])


class Calls(Classifier):
    """Runs the network twice a step, on two views."""

    def loss(self, batch: Any) -> Tensor:
        a, b = self(batch[0]), self(-batch[0])
        return F.cross_entropy(a, batch[1]) + 0.1 * F.mse_loss(a, b)


class CallsUnderNoGrad(Classifier):
    """A target from a pass without gradients."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self(batch[0].flip(-1)).softmax(-1)
        return super().loss(batch) + F.cross_entropy(self(batch[0]), target)


class ReadsOtherBlock(Stack):
    """A block's weight is used after all blocks."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * (1 + self.blocks[0].norm.weight)


ROWS = [
    Row("blocks twice", net(Twice), vectors, equal="ddp, zero3, tensor", either="pipeline, interleaved"),
    Row("each block twice", net(EachTwice), vectors, equal="zero3", either="pipeline"),
    Row("blocks backwards", net(Backwards), vectors, equal="zero3", either="pipeline"),
    Row("one block four times", net(SharedBlock), vectors, either="zero3, pipeline"),
    Row("shared projections", net(SharedWeights), vectors, either="zero3, pipeline"),
    Row("an unused block", net(Skipped), vectors, either="ddp, pipeline"),
    Row("work by index", net(ByIndex), vectors, equal="zero3, pipeline"),
    Row("a norm between blocks", net(WorkBetween), vectors, equal="zero3", either="pipeline"),
    Row("parameters of blocks at the root", net(Gains), vectors, either="zero3, pipeline"),
    Row("a root parameter after the blocks", net(RootAfter), vectors, equal="zero3, pipeline"),
    Row("a root parameter before the blocks", net(RootBefore), vectors, equal="zero3, pipeline"),
    Row("a root parameter around the blocks", net(RootAround), vectors, equal="zero3", either="pipeline"),
    Row("the head registered first", net(HeadFirst), vectors, equal="pipeline, interleaved"),
    Row("a condition between blocks", net(Conditional), vectors, equal="zero3", either="pipeline"),
    Row("a trained condition for blocks", net(partial(Dit, True)), vectors, equal="tensor", either="pipeline"),
    Row("a frozen condition for blocks", net(partial(Dit, False)), vectors, equal="tensor", either="pipeline"),
    Row("modulated norms", text(Modulated), tokens, equal="tensor", either="context, pipeline", batch=4),
    Row(
        "skip connections",
        text(SkipConnections),
        tokens,
        either="context, ulysses, context x shard, sequence, pipeline",
    ),
    Row("positions mixed between blocks", TwoExits, tokens, either="context, context x shard, pipeline"),
    Row("Sequential", net(InSequence), vectors, equal="zero3, pipeline"),
    Row("numbered attributes", net(Numbered), vectors, equal="zero3", either="pipeline"),
    Row("two lists of blocks", net(TwoLists), vectors, equal="zero3", either="pipeline"),
    Row("two kinds of blocks", net(Alternating), vectors, equal="zero3", either="pipeline"),
    Row("two classes of the same shapes", net(Lookalikes), vectors, equal="zero3, pipeline"),
    Row("one block differs by an attribute", net(ThirdDiffers), vectors, equal="pipeline", either="tensor"),
    Row("tied by a function", text(TiedByFunction), tokens, either="zero3, pipeline"),
    Row("tied", text(partial(Gpt, tied=True)), tokens, equal="zero3, pipeline"),
    Row("blocks if the data say so", net(ByData), vectors, equal="zero3, pipeline"),
    Row("unused second half", net(EarlyReturn), vectors, either="ddp, pipeline"),
    Row("changes in place", net(InPlace), vectors, equal="zero3, pipeline"),
    Row("a half of the activations", net(Sliced), vectors, equal="zero3", either="pipeline"),
    Row("two streams", net(TwoStreams), vectors, equal="zero3, pipeline"),
    Row("masks as arguments", text(Masked), tokens, equal="pipeline", either="context"),
    Row("two losses at the end", TwoHeads, tokens, equal="zero3, pipeline"),
    Row("two passes a step", Calls, vectors, equal="zero3", either="pipeline"),
    Row("a pass without gradients", CallsUnderNoGrad, vectors, equal="zero3", either="pipeline"),
    Row("a block's weight after the blocks", net(ReadsOtherBlock), vectors, either="zero3, pipeline"),
]
