"""Files of a new project; `{name}` is the project, `{title}` its class prefix."""

MODULE = '''"""The model."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class {title}Module(L.LightningModule):
    """A classifier with residual blocks; replace it by your own."""

    def __init__(self, optimizer=torch.optim.AdamW, features=8, width=64, layers=4, classes=3):
        super().__init__()
        self.optimizer = optimizer
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return self.head(hidden)

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        loss = F.cross_entropy(self(inputs), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, classes = batch
        logits = self(inputs)
        self.log("val_loss", F.cross_entropy(logits, classes))
        self.log("val_acc", (logits.argmax(-1) == classes).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())
'''

DATA = '''"""The data."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class {title}Data(L.LightningDataModule):
    """Random points, labeled by the largest of three linear functions; replace it by your own."""

    def __init__(self, batch_size=8, samples=1200, features=8, classes=3):
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, features, generator=generator)
        labels = (inputs @ torch.randn(features, classes, generator=generator)).argmax(-1)
        held_out = samples // 6
        self.train = TensorDataset(inputs[held_out:], labels[held_out:])
        self.val = TensorDataset(inputs[:held_out], labels[:held_out])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)
'''

RECIPE = """# @package _global_
# A classifier on random points.
name: {name}
max_epochs: 5
micro_batch_size: 8
global_batch_size: 32 # samples per optimizer step, on any layout

module:
  _target_: {name}.module.{title}Module
  optimizer: ${{optimizer}}

data:
  _target_: {name}.data.{title}Data
  batch_size: ${{micro_batch_size}}
"""

TEST = '''"""The module trains on every layout as on one process."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("layout", ["ddp", "zero3", "pipeline"])
def test_a_layout_trains_as_one_process(layout):
    command = [sys.executable, "-m", "trainwright", "verify", "--config-dir", "conf", "recipe={name}", "verify.steps=2"]
    subprocess.run([*command, f"strategy={{layout}}", "devices=2", "accelerator=cpu"], check=True)
'''

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["trainwright"]

[project.optional-dependencies]
dev = ["pytest"]

[tool.setuptools]
packages = ["{name}"]
"""

CI = """name: CI
on: [push, pull_request]
permissions:
  contents: read
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install -e '.[dev]'
      - run: python -m pytest # the module still trains the same on every layout
"""

README = """# {name}

```bash
pip install -e '.[dev]'
trainwright fit --config-dir conf recipe={name}                             # one process
trainwright fit --config-dir conf recipe={name} strategy=zero3 devices=2    # two, with the same losses
trainwright verify --config-dir conf recipe={name} strategy=zero3 devices=2
python -m pytest
```

`{name}/module.py` and `{name}/data.py` are yours to change, `conf/recipe/{name}.yaml` has their defaults.
"""

FILES = {
    "README.md": README,
    "pyproject.toml": PYPROJECT,
    ".gitignore": "runs/\nmultirun/\n__pycache__/\n*.egg-info/\n",
    ".github/workflows/ci.yml": CI,
    "{name}/__init__.py": "",
    "{name}/module.py": MODULE,
    "{name}/data.py": DATA,
    "conf/recipe/{name}.yaml": RECIPE,
    "tests/test_layouts.py": TEST,
}
