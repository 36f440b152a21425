"""Values that leave a block beside its output, or go around blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import CLASSES, DIM, Block, Classifier, Gpt, Mlp, Stack, net, text, tokens, total, vectors
from tests.zoo.cells import Row


class DeepSupervision(Classifier):
    """The head's loss on every block's output."""

    def loss(self, batch: Any) -> Tensor:
        (x, y), losses = batch, []
        x = self.net.stem(x)
        for block in self.net.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.net.head(x), y))
        return total(losses)


class AuxiliaryHeads(Classifier):
    """A head for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(DIM, CLASSES) for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        (x, y), hidden = batch, []
        x = self.net.stem(x)
        for block in self.net.blocks:
            x = block(x)
            hidden.append(x)
        return total(F.cross_entropy(head(h), y) for head, h in zip(self.heads, hidden, strict=True))


class WeightedSum(Stack):
    """ELMo's mix of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(-1, 1, 5))

    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return torch.einsum("l,lbd->bd", self.mix.softmax(0), torch.stack(states))


class Dense(Stack):
    """Each block takes the mean of all outputs before it."""

    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(torch.stack(states).mean(0)))
        return states[-1]


class LongSkips(Stack):
    """U-ViT: the first half's outputs are added in the second half, in reverse order."""

    def run(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.blocks):
            if index >= len(self.blocks) // 2:
                x = x + 0.5 * skips.pop()
                x = block(x)
            else:
                x = block(x)
                skips.append(x)
        return x


class LongSkipsByLayers(LongSkips):
    """The same with a projection for each skip."""

    def __init__(self) -> None:
        super().__init__()
        self.skips = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.blocks):
            if index >= 2:
                x = self.skips[index - 2](torch.cat((x, kept.pop()), -1))
            x = block(x)
            if index < 2:
                kept.append(x)
        return x


class StemAgain(Stack):
    """The stem's output comes back after the blocks."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + x


class StemEachBlock(Stack):
    """Input injection: each block gets the stem's output, too."""

    def run(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x + first)
        return x


class FirstBlockAgain(Stack):
    def run(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first


class MiddleBlock(Classifier):
    """An early exit: a loss on a block in the middle."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            x = block(x)
            if index == 1:
                early = F.cross_entropy(self.net.head(x), y)
        return F.cross_entropy(self.net.head(x), y) + 0.3 * early


class HiddenStates(Stack):
    """Returns all states, as output_hidden_states does."""

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        states: tuple[Tensor, ...] = (x,)
        for block in self.blocks:
            x = block(x)
            states += (x,)
        return {"logits": self.head(x), "hidden_states": states}


class UsesHiddenStates(Classifier):
    network = HiddenStates

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        penalty = total(state.square().mean() for state in out["hidden_states"])
        return F.cross_entropy(out["logits"], batch[1]) + 0.01 * penalty


class LastHiddenState(UsesHiddenStates):
    """Asks for all states and uses the last one."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net.head(self(batch[0])["hidden_states"][-1]), batch[1])


class HookedFeatures(Classifier):
    """Forward hooks on blocks keep their outputs for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Tensor] = {}
        for index, block in enumerate(self.net.blocks):
            block.register_forward_hook(lambda _, __, out, index=index: self.features.__setitem__(index, out))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.01 * total(f.square().mean() for f in self.features.values())


class HookedOne(Classifier):
    """A hook on the second block, as feature extractors have."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.kept.abs().mean()


class HookedInner(Classifier):
    """A hook on a layer within each block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: list[Tensor] = []
        for block in self.net.blocks:
            block.fc1.register_forward_hook(lambda _, __, out: self.inner.append(out))

    def loss(self, batch: Any) -> Tensor:
        self.inner.clear()
        return super().loss(batch) + 0.01 * total(h.abs().mean() for h in self.inner)


class HookReplaces(Classifier):
    """A hook that changes a block's output."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.net.blocks):
            block.register_forward_hook(lambda _, __, out, index=index: out * (1 + 0.1 * index))


class PreHooked(Classifier):
    """A hook before each block that keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        for block in self.net.blocks:
            block.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0]))

    def loss(self, batch: Any) -> Tensor:
        self.inputs.clear()
        return super().loss(batch) + 0.01 * total(x.square().mean() for x in self.inputs)


class StoresAuxiliary(Block):
    """Keeps an auxiliary loss as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(self.norm(x)))
        self.auxiliary = hidden.abs().mean()
        return x + self.fc2(hidden)


class ReadsAuxiliary(Classifier):
    network = staticmethod(lambda: Stack(StoresAuxiliary))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * total(block.auxiliary for block in self.net.blocks)


class SharedList(Classifier):
    """Blocks append to a list that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.net.blocks:
            block.collected = self.collected

    @staticmethod
    def network() -> nn.Module:
        return Stack(Appends)

    def loss(self, batch: Any) -> Tensor:
        self.collected.clear()
        return super().loss(batch) + 0.1 * total(self.collected)


class Appends(Block):
    collected: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.collected.append((out - x).square().mean())
        return out


class RoutedBlock(nn.Module):
    """A dense mixture with a balance loss as an attribute of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 2), nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        self.router.balance = weights.square().sum(-1).mean()
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Balanced(Classifier):
    network = staticmethod(lambda: Stack(RoutedBlock))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * total(b.router.balance for b in self.net.blocks)


class LogsInBlocks(Classifier):
    """Logs a statistic of each block after the pass."""

    network = staticmethod(lambda: Stack(StoresAuxiliary))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for index, block in enumerate(self.net.blocks):
            self.log(f"sparsity_{index}", block.auxiliary.detach())
        return loss


class TupleBlock(Block):
    """Returns its output and a running sum, which the next one takes."""

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, so_far = state
        out = super().forward(x)
        return out, so_far + out.square().mean()


class TupleStack(Stack):
    def forward(self, x: Tensor) -> Any:
        state: Any = (self.stem(x), torch.zeros((), device=x.device))
        for block in self.blocks:
            state = block(state)
        return self.head(state[0]), state[1]


class Carries(Classifier):
    network = staticmethod(lambda: TupleStack(TupleBlock))

    def loss(self, batch: Any) -> Tensor:
        logits, penalty = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.01 * penalty


class Distances(Classifier):
    """Compares neighbouring blocks' outputs without gradients, for a log."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            before, x = x, block(x)
            self.log(f"change_{index}", (x - before).detach().norm())
        loss = F.cross_entropy(self.net.head(x), y)
        self.log("loss", loss)
        return loss


class GptSkips(Gpt):
    """Skips between the blocks of a language model, and its embedding again before the head."""

    def run(self, x: Tensor) -> Tensor:
        first = x
        a = self.blocks[0](x)
        b = self.blocks[1](a)
        c = self.blocks[2](b) + a
        return self.blocks[3](c) + 0.1 * first


class Detached(Stack):
    """A block in the middle learns only from its own loss."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x.detach() if index == 2 else x)
        return x


ROWS = [
    Row("deep supervision", DeepSupervision, vectors, equal="zero3, tensor, pipeline, pipeline x shard"),
    Row("a head by block", AuxiliaryHeads, vectors, equal="tensor, pipeline"),
    Row("weighted sum of layers", net(WeightedSum), vectors, equal="tensor, pipeline"),
    Row("dense connections", net(Dense), vectors, equal="zero3, pipeline"),
    Row("long skips", net(LongSkips), vectors, equal="tensor, pipeline"),
    Row("long skips by layers", net(LongSkipsByLayers), vectors, equal="tensor, pipeline"),
    Row("the stem again", net(StemAgain), vectors, equal="tensor, pipeline"),
    Row("the stem at each block", net(StemEachBlock), vectors, equal="zero3, pipeline"),
    Row("the first block again", net(FirstBlockAgain), vectors, equal="pipeline, interleaved"),
    Row("early exit", MiddleBlock, vectors, equal="tensor, pipeline"),
    Row("all hidden states", UsesHiddenStates, vectors, equal="tensor, pipeline"),
    Row("the last hidden state", LastHiddenState, vectors, equal="pipeline"),
    Row("hooks on blocks", HookedFeatures, vectors, equal="tensor, pipeline"),
    Row("a hook on one block", HookedOne, vectors, equal="tensor, pipeline"),
    Row("hooks within blocks", HookedInner, vectors, either="tensor, pipeline"),
    Row("hooks that change outputs", HookReplaces, vectors, equal="tensor, pipeline"),
    Row("hooks before blocks", PreHooked, vectors, equal="tensor, pipeline"),
    Row("auxiliary losses as attributes", ReadsAuxiliary, vectors, equal="tensor, pipeline"),
    Row("auxiliary losses in a shared list", SharedList, vectors, equal="tensor", either="pipeline"),
    Row("balance of routers", Balanced, vectors, equal="tensor, pipeline"),
    Row("logs of attributes", LogsInBlocks, vectors, equal="tensor", either="pipeline"),
    Row("a sum through the blocks", Carries, vectors, equal="tensor, pipeline"),
    Row("logs of changes", Distances, vectors, equal="tensor", either="pipeline"),
    Row("skips of a GPT", text(GptSkips), tokens, equal="tensor, pipeline"),
    Row("detached between", net(Detached), vectors, equal="pipeline", either="zero3"),
]
