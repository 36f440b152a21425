"""Modules read after training and while they are saved, callbacks that keep copies, frozen parts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.zoo.base import DIM, Block, Classifier, Gpt, LanguageModel, Mlp, Stack, stack, tokens, vectors
from tests.zoo.cells import Row


def predictions(trainer: Any, module: Any) -> Mapping[str, Any]:
    """Call the module after ``fit``."""
    x, _ = next(iter(vectors(4)))
    with torch.no_grad():
        return {"out": module(x)}


def kept(trainer: Any, module: Any) -> Mapping[str, Any]:
    """Return what the module kept."""
    return module.kept  # type: ignore[no-any-return]


class Keeps(Classifier):
    """Keeps numbers in ``kept``."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}


class KeepsOnSave(Keeps):
    """Looks into the checkpoint that is being saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = {name: torch.as_tensor(value).clone() for name, value in checkpoint["state_dict"].items()}


class KeepsStateAtEnd(Keeps):
    def on_train_end(self) -> None:
        self.kept = {name: value.detach().clone() for name, value in self.state_dict().items()}


class KeepsWeights(Keeps):
    """Copies of weights after each step, through ``named_parameters``."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.kept = {name: p.detach().clone() for name, p in self.named_parameters()}


class KeepsGradients(Keeps):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.kept = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


class KeepsAverage(Keeps):
    """torch's AveragedModel, updated after each step."""

    def on_fit_start(self) -> None:
        self.__dict__["average"] = AveragedModel(self.net, avg_fn=lambda old, new, n: 0.5 * old + 0.5 * new)

    def on_train_batch_end(self, *args: Any) -> None:
        self.__dict__["average"].update_parameters(self.net)

    def on_train_end(self) -> None:
        self.kept = {name: p.detach().clone() for name, p in self.__dict__["average"].module.named_parameters()}


class UnusualBuffers(Classifier):
    """Buffers whose elements share memory, or with strides of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 1.5).expand(DIM))
        self.register_buffer("shift", torch.ones(1, 8, DIM).transpose(0, 1))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale + self.shift[0])


class LoadsBefore(Classifier):
    """Loads weights when fit starts."""

    def on_fit_start(self) -> None:
        self.net.load_state_dict({name: 0.5 * value for name, value in self.net.state_dict().items()})


class LoadsBlock(Classifier):
    """Loads the weights of one block into another."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.blocks[1].load_state_dict(self.net.blocks[2].state_dict())


class CopiesHead(Keeps):
    """Copies a module, and calls the copy."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.kept["out"] = deepcopy(self.net.head)(torch.ones(2, DIM, device=self.device))


class Validating(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Trained(Classifier):
    """The optimizer has the parameters that are not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class FrozenHalf(Trained):
    """The stem and the first half are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net.stem.requires_grad_(False)
        self.net.blocks[:2].requires_grad_(False)


class Probe(FrozenHalf):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)


class OnlyStem(Classifier):
    """Only what stands before the blocks is trained."""

    def configure_optimizers(self) -> Any:
        self.net.blocks.requires_grad_(False)
        self.net.head.requires_grad_(False)
        return torch.optim.SGD(self.net.stem.parameters(), lr=0.1)


class OnlyBiases(Classifier):
    """BitFit."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith("bias"))


class HeadInOptimizer(Classifier):
    """All have gradients, the optimizer has the head alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.1)


class Lora(nn.Module):
    """A frozen projection with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 0.5 * self.lora_b(self.lora_a(x))
        return out


class LoraBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = Lora(self.fc1), Lora(self.fc2)  # type: ignore[assignment]


class LoraModel(Trained):
    network = partial(Stack, LoraBlock)

    def __init__(self) -> None:
        super().__init__()
        self.net.stem.requires_grad_(False)


class Adapter(Block):
    """A frozen block with a narrow trained one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = Mlp(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.adapter(x)


class Prompted(Gpt):
    """Trained positions before the text, all else frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(1, 2, DIM))

    def forward(self, ids: Tensor) -> Any:
        x = torch.cat((self.prompt.expand(len(ids), -1, -1), self.embed(ids)[:, :-2]), 1)
        return self.head(self.norm(self.run(x)))


class PromptedModel(LanguageModel):
    network = Prompted

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.net.prompt], lr=0.1)


class RenamesWeights(Classifier):
    """Saves and loads its weights without the prefix of the network."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key.removeprefix("net."): value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({f"net.{key}": value for key, value in state.items()}, strict, assign)


class RescalesRows(LanguageModel):
    """An embedding that rescales the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net.wte.max_norm = 1.0  # type: ignore[union-attr]


class Finetuning(BaseFinetuning):
    """Lightning's example: the stem is frozen for a while."""

    def __init__(self, part: str = "stem") -> None:
        super().__init__()
        self.part = part

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(getattr(pl_module.net, self.part))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(getattr(pl_module.net, self.part), optimizer, lr=0.01)


def finetuning(part: str) -> Any:
    """Two epochs, the second one with all parameters."""
    return lambda: {"callbacks": [Finetuning(part)], "max_epochs": 2, "max_steps": -1}


def reading() -> dict[str, Any]:
    """A callback that reads weights at the end of a batch."""

    def log(trainer: Any, pl_module: Any, *args: Any) -> None:
        weight = pl_module.net.blocks[1].fc1.weight
        pl_module.log("largest", weight.detach().abs().max())

    return {"callbacks": [LambdaCallback(on_train_batch_end=log)]}


ROWS = [
    Row(
        "state_dict after fit",
        Classifier,
        vectors,
        observe=lambda _, module: dict(module.state_dict()),
        equal="ddp, zero2",
        either="zero3, tensor, pipeline, tensor x shard",
    ),
    Row(
        "parameters after fit",
        Classifier,
        vectors,
        observe=lambda _, module: dict(module.named_parameters()),
        either="tensor, pipeline",
    ),
    Row("forward after fit", Classifier, vectors, observe=predictions, either="zero3, tensor, pipeline", late=True),
    Row(
        "validate after fit",
        Validating,
        vectors,
        observe=lambda trainer, module: trainer.validate(module, vectors(4), verbose=False)[0],
        equal="zero3, pipeline",
    ),
    Row(
        "on_save_checkpoint",
        KeepsOnSave,
        vectors,
        trainer=lambda: {"callbacks": [ModelCheckpoint(every_n_train_steps=3)], "enable_checkpointing": True},
        observe=kept,
        either="zero3, tensor, pipeline",
    ),
    Row("state_dict at the end", KeepsStateAtEnd, vectors, observe=kept, either="tensor, pipeline"),
    Row("copies of weights", KeepsWeights, vectors, observe=kept, either="zero3, tensor, pipeline"),
    Row("buffers of expand and transpose", UnusualBuffers, vectors, equal="ddp, zero2, zero3, tensor, pipeline"),
    Row("load_state_dict as fit starts", LoadsBefore, vectors, equal="zero1, zero3, tensor, pipeline"),
    Row("load_state_dict of a block", LoadsBlock, vectors, equal="zero2, zero3, tensor, pipeline"),
    Row("deepcopy of a head", CopiesHead, vectors, observe=kept, either="zero2, zero3, tensor, pipeline", late=True),
    Row("copies of gradients", KeepsGradients, vectors, observe=kept, either="tensor, pipeline"),
    Row("AveragedModel", KeepsAverage, vectors, observe=kept, either="zero3, tensor, pipeline"),
    Row("a callback that reads a weight", Classifier, vectors, trainer=reading, either="tensor, pipeline"),
    Row("frozen first half", FrozenHalf, vectors, equal="zero3, tensor, pipeline"),
    Row("linear probe", Probe, vectors, equal="pipeline, interleaved"),
    Row("only the stem", OnlyStem, vectors, equal="ddp, tensor, pipeline"),
    Row("only biases", OnlyBiases, vectors, equal="zero3, pipeline"),
    Row("the optimizer has the head alone", HeadInOptimizer, vectors, equal="pipeline", either="zero3, tensor"),
    Row("LoRA by hand", LoraModel, vectors, equal="tensor, pipeline"),
    Row("adapters", stack(Adapter), vectors, equal="zero3, tensor, pipeline"),
    Row("renames in state_dict", RenamesWeights, vectors, equal="zero2", either="zero3, tensor, pipeline"),
    Row("rows rescaled as read", RescalesRows, tokens, either="zero2, tensor, pipeline"),
    Row("prompts", PromptedModel, tokens, equal="zero3", either="pipeline"),
    Row("BaseFinetuning, stem", Trained, vectors, trainer=finetuning("stem"), either="zero1, zero2, pipeline"),
    Row("BaseFinetuning, blocks", Trained, vectors, trainer=finetuning("blocks"), either="zero2, pipeline"),
    Row(
        "SWA",
        Classifier,
        vectors,
        trainer=lambda: {
            "callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)],
            "max_epochs": 2,
            "max_steps": -1,
        },
        either="zero3, tensor, pipeline",
    ),
    Row(
        "EMA",
        Classifier,
        vectors,
        trainer=lambda: {"callbacks": [EMAWeightAveraging(decay=0.5)]},
        either="zero3, pipeline",
    ),
]
ROWS = [row.also_on("servers") for row in ROWS]
