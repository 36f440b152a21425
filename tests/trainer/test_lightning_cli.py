"""LightningCLI with this package's Trainer: options that are typed, printed as a configuration and read from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.command.project import MODULE, environment
from tests.warm import warm_run

MAIN = """
from lightning.pytorch.cli import LightningCLI
from my_module import MyData, MyModule

from trainwright import Trainer

if __name__ == "__main__":
    LightningCLI(MyModule, MyData, trainer_class=Trainer, seed_everything_default=1)
"""
CHOSEN = (
    *("--trainer.strategy=trainwright.ZeroStrategy", "--trainer.strategy.stage=3", "--trainer.devices=2"),
    *("--trainer.strategy.dict_kwargs.activation_checkpointing=full", "--trainer.accelerator=cpu"),
    *("--trainer.max_epochs=1", "--trainer.global_batch_size=8", "--trainer.logger=false"),
    *("--trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor=val_loss"),
    *("--trainer.callbacks+=trainwright.RunStateCheckpoint", "--trainer.callbacks.dirpath=saved"),
)


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = warm_run(
        [sys.executable, "main.py", *words], timeout=150, cwd=folder, env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_printed_configuration_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "main.py").write_text(MAIN)
    printed = cli(tmp_path, "fit", *CHOSEN, "--print_config").stdout
    chosen = yaml.safe_load(printed)["trainer"]
    assert (chosen["strategy"]["init_args"]["stage"], chosen["global_batch_size"]) == (3, 8)
    (tmp_path / "printed.yaml").write_text(printed)
    done = cli(tmp_path, "fit", "--config=printed.yaml")
    assert "certified: shard 2" in done.stdout + done.stderr
    [saved] = (tmp_path / "saved").iterdir()
    assert sorted(path.name for path in saved.glob("rank_*")) == ["rank_00000.safetensors", "rank_00001.safetensors"]
