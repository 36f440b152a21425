"""litgpt: its GPT and its LoRA in a LightningModule, as in its tutorial."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import litgpt
import litgpt.lora
import torch
from litgpt.utils import chunked_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.libraries.base import order, rows_of

SAMPLES, LENGTH, VOCABULARY = 24, 8, 32
SMALL = {
    "name": "small",
    "block_size": LENGTH,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 16,
    "intermediate_size": 32,
    "rotary_percentage": 1.0,
}
LLAMA = {
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "n_query_groups": 2,
}
EXPERTS = {**LLAMA, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2}
LORA = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
ALL = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head"), True)


class Finetuned(pl.LightningModule):
    """A model of litgpt that predicts the next token; ``package`` is its part of litgpt."""

    def __init__(self, package: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = package.GPT(package.Config(**SMALL, **options))
        torch.manual_seed(3)
        for weight in self.model.parameters():
            # LoRA starts at zero, so that the first steps would train half of them only.
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids)

    def _loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        return chunked_cross_entropy(self(ids)[..., :-1, :], ids[..., 1:], chunk_size=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def model(package: Any = litgpt, only: Any = None, **options: Any) -> Finetuned:
    made = Finetuned(package, options)
    if only is not None:
        only(made.model)
    return made


def loader(batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    data = TensorDataset(torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator))
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def rows(name: str, package: Any = litgpt, only: Any = None, hybrid: str = "tensor x shard", **options: Any) -> Any:
    return rows_of(
        name,
        partial(model, package, only, **options),
        loader,
        hybrid=hybrid,
        loads=lambda: {"package": package, "options": options},
    )


lora = partial(rows, package=litgpt.lora, only=litgpt.lora.mark_only_lora_as_trainable, hybrid="pipeline x shard")
ROWS = [
    *rows("GPT"),
    *rows("GPT, Llama", **LLAMA),
    *rows("GPT, experts", hybrid="pipeline x shard", **EXPERTS),
    *lora("LoRA", lora_query=True, lora_value=True, **LORA),
    *lora("LoRA of all layers, Llama", **ALL, **LORA, **LLAMA),
]
