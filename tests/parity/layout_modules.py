"""Modules for layouts, written without them in mind: ours, torch's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.modules import NextToken
from tests.parity.optimizers import OPTIMIZERS
from trainwright.recipes.gpt.model import GPT, GPTConfig

VOCABULARY = 24
LENGTH = 8


def gpt(tied: bool = True, layers: int = 4) -> nn.Module:
    return GPT(GPTConfig(layers=layers, dim=32, heads=4, kv_heads=4, hidden=48, vocab=VOCABULARY, tied_head=tied))


class Tempered(nn.Module):
    """Our GPT with a trained temperature, a parameter outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(tied=False)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) * self.temperature


class Encoder(nn.Module):
    """torch's encoder, with positions as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.positions))


class OddBlock(nn.Module):
    """Takes a keyword, returns a tuple, one of its outputs is a sum over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, hidden: Tensor, *, scale: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        change = self.down(F.gelu(self.up(self.norm(hidden)))) * scale
        return hidden + change, {"size": state["size"] + change.square().mean()}


class Odd(nn.Module):
    """Blocks in a ModuleDict, tuples and dictionaries between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleDict({f"layer_{index}": OddBlock() for index in range(5)})
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, state = self.embedding(tokens), {"size": torch.zeros(())}
        scale = torch.linspace(0.5, 1.0, tokens.shape[1])[None, :, None]
        for layer in self.layers.values():
            hidden, state = layer(hidden, scale=scale, state=state)
        return self.head(hidden), state["size"]


class LanguageModel(NextToken):
    """Next-token prediction around any of the networks."""

    def __init__(self, network: str, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.net = NETWORKS[network]()

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.net(tokens)
        return out if isinstance(out, Tensor) else out[0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


class MaskedModel(LanguageModel):
    """Symbols below 8 are no targets, so that micro-batches have different numbers of them."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["tokens"][:, 1:].flatten()
        return F.cross_entropy(self(batch["tokens"][:, :-1]).flatten(0, 1), targets.where(targets >= 8, -100))


class OddModel(LanguageModel):
    """Logs several values, returns a dictionary, steps a scheduler every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits, size = self.net(batch["tokens"][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        self.log_dict({"loss_of_tokens": loss, "size": size})
        return {"loss": loss + 0.1 * size, "best": logits.argmax(-1), "note": "text"}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class HuggingFaceModel(LanguageModel):
    """A causal language model of transformers that computes its own loss."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        prompt = batch["tokens"][:, :4]
        tokens: Tensor = self.net.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0)
        return tokens


def _hugging_face(kind: str, layers: int = 4) -> nn.Module:
    import transformers

    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    wide |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        wide = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 16, **off}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, use_cache=False, **wide)
    return transformers.AutoModelForCausalLM.from_config(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt-small": lambda: gpt(layers=2),
    "gpt-untied": lambda: gpt(tied=False),
    "encoder": Encoder,
    "odd": Odd,
    "tempered": Tempered,
    "masked": gpt,
    "llama": lambda: _hugging_face("llama"),
    "qwen2": lambda: _hugging_face("qwen2"),
    "gpt2": lambda: _hugging_face("gpt2"),
    "gpt2-small": lambda: _hugging_face("gpt2", layers=2),
    "mixtral": lambda: _hugging_face("mixtral"),
}
HUGGING_FACE = ("llama", "qwen2", "gpt2", "gpt2-small", "mixtral")


def make_module(network: str, optimizer: str = "sgd") -> pl.LightningModule:
    """Return the module around ``network``, with the same weights each time."""
    torch.manual_seed(3)
    special: dict[str, type[LanguageModel]] = {"odd": OddModel, "masked": MaskedModel}
    kind = HuggingFaceModel if network in HUGGING_FACE else special.get(network, LanguageModel)
    return kind(network, optimizer)
