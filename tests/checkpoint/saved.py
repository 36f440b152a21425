"""Checkpoints of small Hugging Face models from real runs."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import QUIET, make_trainer
from trainwright.strategies.state.wholes import gather_tree

VOCABULARY, LENGTH = 40, 8


def model(kind: str = "llama", tied: bool = True) -> nn.Module:
    """A Hugging Face model of two layers."""
    import transformers

    torch.manual_seed(5)
    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **common))
    if kind == "t5":
        sizes = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        config = transformers.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0, **common)
        return transformers.T5ForConditionalGeneration(config)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=16, **common))


class LanguageModule(pl.LightningModule):
    """A Hugging Face model with a learned temperature and a buffer beside it, and all that a checkpoint must keep."""

    def __init__(self, kind: str = "llama", tied: bool = True, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = model(kind, tied)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        self.steps += 1
        logits = self.model(input_ids=tokens).logits * self.temperature
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=self.hparams.learning_rate
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def loader() -> DataLoader:
    """Three batches."""
    tokens = torch.randint(0, VOCABULARY, (6, LENGTH), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(tokens), batch_size=2)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.values.append(float(outputs["loss"]))


def save(
    path: str, strategy: str = "single", options: dict[str, Any] | None = None, steps: int = 3, **arguments: Any
) -> dict[str, Tensor]:
    """Train some steps and save; the whole weights. To be called on every rank."""
    trainer = make_trainer(strategy, options, max_steps=steps, max_epochs=-1)
    module = LanguageModule(**arguments)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return gather_tree(dict(trainer.strategy.lightning_module_state_dict()), keep=True)


def save_cut(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """As :func:`save`, under a layout that cuts the module; the whole parameters."""
    trainer = make_trainer("hybrid", options, max_steps=2, max_epochs=-1)
    trainer.fit(LanguageModule(), loader())
    trainer.save_checkpoint(path)
    return dict(trainer.strategy.whole_parameters())


def logits(network: nn.Module) -> Tensor:
    """Return a model's logits of a fixed text."""
    tokens = torch.arange(2 * LENGTH).remainder(VOCABULARY).reshape(2, LENGTH)
    more = {"decoder_input_ids": tokens} if network.config.is_encoder_decoder else {}
    with torch.no_grad():
        return network.eval()(input_ids=tokens, **more).logits


def saved_by_lightning(path: Path) -> str:
    """Train three steps with Lightning's own Trainer and save."""
    trainer = pl.Trainer(**QUIET, max_steps=3, max_epochs=-1)
    trainer.fit(LanguageModule(), loader())
    trainer.save_checkpoint(path)
    return str(path)


def resumed_by_lightning(path: str | Path, weights_only: bool | None = True, **options: Any) -> list[float]:
    """Return the losses of three more steps of Lightning's own Trainer."""
    losses = Losses()
    trainer = pl.Trainer(**{**QUIET, "callbacks": [losses]}, max_steps=6, max_epochs=-1, **options)
    trainer.fit(LanguageModule(), loader(), ckpt_path=str(path), weights_only=weights_only)
    return losses.values


@contextmanager
def one_at_a_time(source: type) -> Iterator[None]:
    """Check that at most two tensors of a source are alive: one being written while the next one is read."""
    alive, most, original = set(), 0, source.read

    def read(self: Any, *arguments: Any) -> Tensor:
        nonlocal most
        tensor = original(self, *arguments)
        alive.add(id(tensor))
        most = max(most, len(alive))
        weakref.finalize(tensor, alive.discard, id(tensor))
        return tensor

    with mock.patch.object(source, "read", read):
        yield
    assert 0 < most <= 2
    assert not alive
