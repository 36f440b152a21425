"""LightningModules as people write them for one device compute the same on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.harness import (
    Record,
    Recorder,
    data_parallel_names,
    differences,
    make_loader,
    make_trainer,
    whole,
    world_size,
)
from tests.parity.modules import VOCABULARY, LanguageModel

GLOBAL_BATCH = 12


class ReturnsDict(LanguageModel):
    def training_step(self, batch: Any) -> Any:  # no batch_idx
        return {"loss": self.loss(batch), "extra": torch.zeros(3)}


class PenalisesWhole(LanguageModel):
    """Uses parameters outside of the submodules that own them, where sharded as whole tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters())
        return self.loss(batch) + 1e-2 * sum(p.square().sum() for p in whole)


class ChangesGradients(LanguageModel):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class LooksAtGradients(LanguageModel):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [whole(p.grad).norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class ClipsItself(LanguageModel):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class StepsItself(LanguageModel):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


class StepsRarely(LanguageModel):
    """Accumulates by hand in automatic optimization: only every second batch steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class TiesByHand(LanguageModel):
    """Uses the embedding's weight as the head's."""

    def __init__(self) -> None:
        super().__init__()
        del self.decoder.head
        self.decoder.head = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.decoder.embedding.weight)


class HoldsBuffers(LanguageModel):
    """Changes a buffer in every step, equally on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(batch) / self.steps


class LeavesSomeOut(LanguageModel):
    """Has a frozen, unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 5).requires_grad_(False)


class CallsItselfTwice(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * self.loss(batch) + 0.5 * self.loss({"tokens": batch["tokens"].flip(1)})


class EvaluatesWithin(LanguageModel):
    """A target from a pass without gradients, as in distillation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self(batch["tokens"][:, :-1]).softmax(-1)
        return self.loss(batch) + F.cross_entropy(
            self(batch["tokens"][:, :-1]).reshape(-1, VOCABULARY), target.reshape(-1, VOCABULARY)
        )


class SharesBlocks(LanguageModel):
    """The same block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.blocks.append(self.decoder.blocks[0])


class TracksWithHooks(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.decoder.norm.register_forward_hook(lambda module, args, output: self.seen.append(output.mean().item()))


class WarmsUpInBackward(LanguageModel):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.5, *args, **kwargs)


class ReadsWeights(LanguageModel):
    """Looks at a weight between steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        assert whole(self.decoder.head.weight).shape == (VOCABULARY, 18)
        assert torch.isfinite(whole(self.decoder.head.weight).norm())


HABITS = {cls.__name__: cls for cls in LanguageModel.__subclasses__() if cls.__module__ == __name__}


def run(strategy: str, habit: str) -> Record:
    torch.manual_seed(11)
    module, recorder = HABITS[habit](), Recorder()
    trainer = make_trainer(
        strategy, max_epochs=1, callbacks=[recorder], gradient_clip_val=0.1 if habit == "ClipsItself" else None
    )
    trainer.fit(module, make_loader(48, GLOBAL_BATCH // world_size()))
    if "steps" in dict(module.named_buffers()):
        assert module.steps == 4
    return recorder.record


def run_all(strategy: str) -> dict[str, Record]:
    return {habit: run(strategy, habit) for habit in HABITS}


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", [name for name in data_parallel_names() if name != "single"])
def test_habits(ranks, reference, strategy):
    expected = reference(run_all, "single")
    for records in ranks(run_all, 2, strategy):
        found = {habit: differences(record, expected[habit]) for habit, record in records.items()}
        assert not any(found.values()), found
