"""Reading of pretrained weights by ranks."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM

from tests.command.project import environment
from tests.parity.harness import QUIET
from tests.recipes.finetune.fixtures import write_base, write_chats
from trainwright import Trainer
from trainwright.recipes.finetune.data import FineTuneData
from trainwright.recipes.finetune.module import FineTuneModule

ID = "someone/small-llama"
SNAPSHOT = "0123456789abcdef0123456789abcdef01234567"


def losses(folder: str, meta: bool | str) -> list[float]:
    """Return the losses of rows after two steps that train an adapter and a copy of the head."""
    targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    seed_everything(0, verbose=False)
    module = FineTuneModule(folder, {"kind": "ia3", **targets, "modules_to_save": ["lm_head"]}, meta=meta, seq_len=64)
    assert (module.model is None) == (meta == "auto")
    data = FineTuneData(f"{folder}/chat.jsonl", folder, "chat", 64, 2, cache_dir=folder, held_out=0.25)
    trainer = Trainer(strategy="zero3", devices=2, max_steps=2, global_batch_size=4, **QUIET)
    trainer.fit(module, data)
    return [float(each.sum()) for each in trainer.predict(module, data.val_dataloader())]


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_saved_modules_are_copied_when_ranks_read_parts(
    tmp_path: Path, ranks: Callable[..., list[Any]], tied: bool
) -> None:
    folder = str(write_base(tmp_path / "base", tie_word_embeddings=tied))
    write_chats(tmp_path / "base" / "chat.jsonl", even=True)
    whole, parts = (ranks(losses, 2, folder, meta) for meta in (False, "auto"))
    assert whole[0]
    assert whole[0] == pytest.approx(parts[0], rel=1e-4)


def fit(base: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Train two steps by the command, in a new process."""
    command = [
        sys.executable, "-m", "trainwright", "fit", "recipe=finetune", f"module.pretrained={base}", "max_steps=2",
        "data.path=chat.jsonl", "data.format=chat", "data.cache_dir=cache", "module.seq_len=64", "logger=csv",
        "report=false", "monitor=none", "trainer.log_every_n_steps=1", *words,
    ]  # fmt: skip
    environ = {**environment(), "HF_HUB_OFFLINE": "1", **settings}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def read_losses(run_dir: Path) -> list[float]:
    """Return the losses of training steps."""
    (file,) = run_dir.rglob("metrics.csv")
    with file.open(newline="") as rows:
        return [float(row["train_loss"]) for row in csv.DictReader(rows) if row.get("train_loss")]


def cached(home: Path) -> Path:
    """Write a sharded model in the cache format of ``huggingface_hub``; return its snapshot."""
    repository = home / "hub" / f"models--{ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(SNAPSHOT)
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / SNAPSHOT
    write_base(snapshot)
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    (snapshot / "model.safetensors").unlink()
    model.save_pretrained(snapshot, max_shard_size="30KB")
    assert len(list(snapshot.glob("model-*.safetensors"))) > 1
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.thorough
def test_id_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home, chats = tmp_path / "home", write_chats(tmp_path / "chat.jsonl")
    snapshot = cached(home)
    assert chats.exists()
    two = ("strategy=zero3", "devices=2")
    for base, name in ((ID, "id"), (str(snapshot), "folder")):
        done = fit(base, *two, f"run_dir={name}", "module.allow_download=true", HF_HOME=str(home))
        assert done.returncode == 0, done.stderr
    found, wanted = (read_losses(Path(name)) for name in ("id", "folder"))
    assert len(found) == 2
    assert found == wanted


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [([], "module.allow_download=true to download"), (["module.allow_download=true"], "HF_HUB_OFFLINE")],
)
def test_id_that_is_not_in_the_cache(tmp_path: Path, words: list[str], said: str) -> None:
    write_chats(tmp_path / "chat.jsonl")
    done = fit("someone/other", *words, "run_dir=none", HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not Path("none").exists()
