"""Probing of `micro_batch_size=auto` before training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.command.test_auto import TINY, here, losses  # noqa: F401 - a fixture
from trainwright import compose, run
from trainwright.command import probe
from trainwright.command.run import plan, prepare
from trainwright.core.failures.failure import Failure, RankError
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.planning.memory.measured import host_peak
from trainwright.recipes.gpt.module import GPTModule

MIB = 2**20
WORDS = ["monitor=none", "global_batch_size=16", "trainer.log_every_n_steps=1", "max_steps=3"]


class Greedy(GPTModule):
    """GPT whose second rank runs out of memory with more than four samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples = len(batch[0] if isinstance(batch, (list, tuple)) else batch)
        if samples > 4 and self.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


def composed(*words: str) -> DictConfig:
    return compose("gpt", [*TINY, *WORDS, *words])


def record(host: int, device: int = 0, there: int = 0, retries: int = 0) -> dict[str, int]:
    return {"host": host, "device": device, "device_there": there, "retries": retries}


def test_peak_memory_verdict() -> None:
    fits = probe.judge(8, [record(10), record(30)], 100)
    assert (fits.fits, fits.needed, fits.there) == (True, 40, 100)
    assert not probe.judge(8, [record(60), record(36)], 100).fits
    device = probe.judge(8, [record(1, 10, 100), record(1, 99, 100)], 100)
    assert not device.fits
    assert "rank 1 held" in device.text
    assert "rank 1 continued only after" in probe.judge(8, [record(1, 10, 100), record(1, 10, 100, 2)], 100).text


def test_next_size_to_try() -> None:
    smaller = (4, 8, 16, 32)
    assert probe.ProbeResult(64, False).next_of(smaller) == 32
    # At least a quarter of 400 is held with a quarter of the samples.
    assert probe.ProbeResult(64, False, "", 400, 120).next_of(smaller) == 16
    assert probe.ProbeResult(64, False, "", 400, 4).next_of(smaller) is None
    assert probe.ProbeResult(1, False).next_of(()) is None


@pytest.mark.parametrize(("failure", "exit_code", "fits"), [
    (("OutOfMemoryError", "CUDA out of memory"), 1, False),
    (("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), 1, False),
    (("MemoryError", ""), 1, False),
    (None, -9, False),
    (("ValueError", "boom"), 1, None),
    (None, -11, None),
])  # fmt: skip
def test_out_of_memory_detection(failure: tuple[str, str] | None, exit_code: int, fits: bool | None) -> None:
    said = None if failure is None else Failure(1, *failure, time_ns=0)
    assert probe._failed(8, RankError("", 1, exit_code, said)).fits is fits


def test_host_peak() -> None:
    held = torch.ones(64 * MIB)
    assert 256 * MIB <= host_peak() < 64 * 256 * MIB
    del held
    assert host_peak() >= 256 * MIB


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_probed_run_equals_the_explicit_one(tmp_path: Path) -> None:
    """One of two ranks runs out of memory with the predicted size, which must leave no trace."""
    words = ["strategy=zero2", "devices=2", f"module._target_={__name__}.Greedy"]
    tried = run(composed(*words, "micro_batch_size=auto", f"run_dir={tmp_path / 'auto'}")).run_dir
    document = json.loads((tried / "plan.json").read_text())
    first, second = document["tried"]
    assert (first["micro_batch_size"], first["fits"]) == (8, False)
    assert "rank 1 failed with OutOfMemoryError" in first["why"]
    assert (second["micro_batch_size"], second["fits"]) == (4, True)
    assert second["needed"] > 0
    assert (document["chosen"]["micro_batch_size"], document["why"]) == (4, "larger ones did not fit when tried.")
    assert document["lines"][2] == "the same by hand: micro_batch_size=4 global_batch_size=16"
    assert [line.split(":")[0] for line in document["lines"][3:]] == ["tried", "tried"]

    by_hand = run(composed(*words, "micro_batch_size=4", f"run_dir={tmp_path / 'hand'}")).run_dir
    assert len(losses(tried)) == 3
    assert losses(tried) == losses(by_hand)
    kept = [sorted(folder.glob("checkpoints/*/*.safetensors")) for folder in (tried, by_hand)]
    assert kept[0]
    assert [path.read_bytes() for path in kept[0]] == [path.read_bytes() for path in kept[1]]


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "words", [["strategy=tensor", "devices=2"], ["strategy=pipeline", "devices=2"]], ids=["tensor", "pipeline"]
)
def test_no_size_fits(words, tmp_path, monkeypatch):
    class Little:
        available = 100 * MIB  # less than a rank takes that computes nothing

    monkeypatch.setattr(probe, "machine_facts", Little)
    with pytest.raises(ConfigError, match=r"all ranks together held .* of the host's 100.00 MiB, more than 95 %; type"):
        prepare(composed(*words, "micro_batch_size=auto", f"run_dir={tmp_path / 'run'}"), "fit")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("here")
def test_no_probe_under_a_launcher(tmp_path: Path) -> None:
    cfg = composed("micro_batch_size=auto", f"run_dir={tmp_path}")
    planned, problems = plan(cfg, "fit")
    assert not problems
    found = probe.probe(planned, Launcher("torchrun", 0, 2, 2))
    assert found.fits is None
    assert found.text.startswith("not tried: under torchrun the ranks are running already")
