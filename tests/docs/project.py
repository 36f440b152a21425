"""The folder that a reader of a page has: a project of their own, and runs that have been made in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.installed import install
from tests.tools.checkpoints import write_checkpoint

PACKAGE = """
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


class MyModule(pl.LightningModule):
    def __init__(self, optimizer=None, layers=2, dropout=0.0):
        super().__init__()
        self.optimizer = optimizer
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))

    def training_step(self, batch, batch_idx):
        x = batch["inputs"]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, batch["labels"])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class MyData(pl.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        samples = [{"inputs": torch.randn(4), "labels": torch.tensor(i % 4)} for i in range(64)]
        return DataLoader(samples, batch_size=self.batch_size)
"""
CHECKS = "def data(cfg, num_data_ranks):\n    return []\n"
RECIPE = """# @package _global_
# A recipe of a reader's own.
name: mine
max_steps: 4
micro_batch_size: 4
module:
  _target_: my_package.MyModule
  optimizer: ${optimizer}
  layers: 4
data:
  _target_: my_package.MyData
  batch_size: ${micro_batch_size}
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}
RUN = "2026-01-31_14-05-09"
MODEL = "models/my-llama"
HYDRA_PROJECT = Path(__file__).parent / "hydra_project"
"""A project with a train.py of its own that Hydra configures, as templates make them."""


def write_project(folder: Path, files: dict[str, str]) -> None:
    """Write what a reader has typed and been given.

    Args:
        folder: that commands are typed in.
        files: that the page itself shows, by path; they take the place of those of the same name.
    """
    own = {
        "my_package/__init__.py": PACKAGE,
        "my_package/checks.py": CHECKS,
        "my_conf/recipe/mine.yaml": RECIPE,
        "ds_config.json": json.dumps(DEEPSPEED),
        "chats.jsonl": '{"prompt": "Who?", "completion": "I."}\n' * 40,
        "pairs.jsonl": '{"prompt": "Who?", "chosen": "I.", "rejected": "You."}\n' * 40,
        "my_texts/one.txt": "Some text of a reader's own.\n" * 4000,
        **{f"my_texts/part_{number}.txt": "Some more of it.\n" * 100 for number in range(40)},
    }
    if any(name.startswith("configs/") for name in files):
        shutil.copytree(HYDRA_PROJECT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {**own, **files}.items():
        path = folder / name
        assert path.resolve().is_relative_to(folder.resolve()), f"{name}: outside of the reader's folder"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    install(folder)


def write_language_model(folder: Path, text: Path) -> None:
    """Write a small Llama with random weights, and a tokenizer that was trained on a text, as transformers does.

    Args:
        folder: that it is to be.
        text: a file.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=256, special_tokens=["?"], show_progress=False))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_runs(folder: Path) -> None:
    """Checkpoints of a few bytes, where runs of a reader have left theirs: enough to compose with."""
    for recipe in ("gpt", "digits", "mine"):
        write_checkpoint(folder / "runs" / recipe / RUN / "checkpoints" / "step=2000", step=2000)
        (folder / "runs" / recipe / RUN / "monitor").mkdir()
    write_checkpoint(folder / "imported")


def leave_behind(words: Sequence[str], folder: Path) -> None:
    """Write the checkpoint or the links that a command would have left, for those that come after it on the page.

    Args:
        words: program and arguments.
        folder: that it was typed in.
    """
    if words[0] == "ln":
        subprocess.run(words, cwd=folder, check=True)
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    left = None
    if "fit" in words[:3] and "recipe" in keys:
        step = keys.get("max_steps", "")
        run = keys.get("run_dir", f"runs/{keys['recipe']}/{RUN}")
        left = f"{run}/checkpoints/step={step if step.isdecimal() else 2000}"
    elif words[1:3] == ["checkpoint", "import"] and "--to" in words:
        left = words[words.index("--to") + 1]
    if left is not None and not Path(left).is_absolute() and not (folder / left).exists():
        write_checkpoint(folder / left)
