"""A user's project that writes down which samples it trained on, and what it ended with."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.trainer.project import run_command

MODULE = '''
import hashlib
import json
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


def digest(tensors):
    """The same for the same names and bits."""
    digested = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digested.update(name.encode() + tensor.detach().numpy().tobytes())
    return digested.hexdigest()


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(pl.LightningModule):
    def __init__(self, width=8, sleep=0.0, full=0):
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(4, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(4))
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        # A replacement shall find the run still going, however slowly it starts.
        alone = self.trainer.world_size < self.hparams.full
        time.sleep(self.hparams.sleep * (5 if alone else 1))
        self.note(batch["index"].tolist())
        return (self(batch["x"]) - batch["y"]).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        outer = getattr(self.trainer.strategy, "_outer", None)
        if outer is not None:
            self.note_common(outer)

    def note_common(self, outer):
        """One line per micro-batch: generation, step, rank, digests of what is common, and of its own."""
        found = [digest(tensors) for tensors in (outer.common(), outer.momentum(), dict(self.named_parameters()))]
        path = Path(self.trainer.default_root_dir, "common", f"{os.getpid()}.jsonl")
        path.parent.mkdir(exist_ok=True)
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with path.open("a") as file:
            file.write(json.dumps([generation, self.trainer.global_step, self.trainer.global_rank, *found]) + "\\n")

    def note(self, samples):
        """One line per micro-batch: generation, step, data rank, samples."""
        path = Path(self.trainer.default_root_dir, "read", f"{os.getpid()}.jsonl")
        path.parent.mkdir(exist_ok=True)
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        line = [generation, self.trainer.global_step, self.trainer.strategy.data_rank, samples]
        with path.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def on_train_end(self):
        whole = {name: value.double().flatten().tolist() for name, value in self.trainer.strategy.whole_parameters()}
        # What each replica has of its own: they must be equal to the last bit.
        own = {name: parameter.detach().double().flatten().tolist() for name, parameter in self.named_parameters()
               if not hasattr(parameter, "to_local")}
        path = Path(self.trainer.default_root_dir, f"end_{self.trainer.global_rank}.json")
        rank = self.trainer.strategy.layout.coordinates(self.trainer.global_rank)
        path.write_text(json.dumps({"whole": whole, "own": own, "rank": rank}))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Points(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.tensor([index % 7, index % 5, index % 3, 1.0]) / 7
        return {"index": torch.tensor(index), "x": x, "y": x.sum().sin().view(1)}


class Data(pl.LightningDataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Points(), batch_size=self.batch_size, shuffle=True)
'''

RECIPE = """# @package _global_
name: survivor
max_epochs: null
max_steps: 60
micro_batch_size: 2
global_batch_size: 12
seed: 3
module: {_target_: survivor.Net, width: 8, sleep: 0.0, full: 0}
data: {_target_: survivor.Data, batch_size: "${micro_batch_size}"}
trainer: {log_every_n_steps: 5}
"""


def write_project(folder: Path) -> None:
    """Write the module and its recipe into a folder."""
    (folder / "survivor.py").write_text(MODULE, encoding="utf-8")
    recipes = folder / "conf" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "survivor.yaml").write_text(RECIPE, encoding="utf-8")


class Survived:
    """What a run has left.

    Args:
        folder: where the project is.
        name: of the run directory.
        words: of the command line.
    """

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.run_dir = folder / name
        done = run_command(
            "fit",
            "recipe=survivor",
            "--config-dir",
            str(folder / "conf"),
            f"run_dir={self.run_dir}",
            *words,
            cwd=folder,
        )
        self.code, self.said = done.returncode, done.stdout

    @property
    def log(self) -> str:
        """What happened to the ranks, in the words of the log of restarts."""
        path = self.run_dir / "logs" / "restarts.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each optimizer step, as logged; a step that was logged twice is an error."""
        with (self.run_dir / "metrics.csv").open(encoding="utf-8") as file:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row.get("loss")]
        steps = [step for step, _ in rows]
        assert len(steps) == len(set(steps)), f"logged twice: {sorted(s for s in set(steps) if steps.count(s) > 1)}"
        return dict(rows)

    @property
    def read(self) -> dict[int, list[int]]:
        """Samples that each optimizer step was made of, sorted: those of the last generation that made it."""
        found: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted((self.run_dir / "read").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                generation, step, data_rank, samples = json.loads(line)
                found[step, generation, data_rank][path.name] += samples
        last = {step: max(generation for at, generation, _ in found if at == step) for step, _, _ in found}
        read: dict[int, list[int]] = defaultdict(list)
        for (step, generation, _), by_process in found.items():
            if generation == last[step]:
                read[step] += next(iter(by_process.values()))  # stages of a pipeline read the same
        return {step: sorted(samples) for step, samples in sorted(read.items())}

    @property
    def common(self) -> dict[tuple[int, int], list[tuple[str, str, str]]]:
        """What replicas of local updates hold where a step begins, by generation and step, in the order of ranks.

        Digests of the common parameters, of the outer momentum, and of the rank's own parameters.
        """
        found: dict[tuple[int, int], dict[int, tuple[str, str, str]]] = defaultdict(dict)
        for path in sorted((self.run_dir / "common").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                generation, step, rank, common, momentum, own = json.loads(line)
                found[generation, step].setdefault(rank, (common, momentum, own))
        return {key: [of for _, of in sorted(ranks.items())] for key, ranks in sorted(found.items())}

    def ends(self) -> list[dict[str, Any]]:
        """What each rank of the last generation ended with."""
        paths = sorted(self.run_dir.glob("end_*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
