"""Cost of the certificate at the start of a run and of the spot checks along it, and peak memory of a rank.

Each layout trains once. The certificate comes before the first step; the steps behind the first are timed in the same
processes: some without checks, and then every second one with a spot check. Memory is the most that a rank has
resident, above what it had when training began: until the first step is made, and in the steps behind it that have no
checks. The goal is that of the design: no more than two optimizer steps and a second, no more memory than training and
one whole block, and spot checks that take no more than 0.5 % of 1,000 steps. Their number in 1,000 steps is that of
their schedule with the measured times, the mean over seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch import seed_everything

from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from trainwright import compose
from trainwright.command.run import prepare
from trainwright.core.run.run_directory import read_config
from trainwright.strategies.base.certificate.spots import SHARE, STEPS, SpotChecks

_MIB = 2**20
# Layouts by name: recipe, and axes of the layout.
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "tensor": ("gpt", {"tensor": 2}),
    "pipeline": ("gpt", {"pipeline": 2}),
    "context": ("gpt", {"context": 2}),
    "expert": ("moe", {"expert": 2, "shard": 2}),
    "3-D": ("gpt", {"pipeline": 2, "shard": 2, "tensor": 2}),
}
# Optimizer steps that are timed, behind one that is not; and pairs of steps, of which the second has a spot check.
_STEPS, _PAIRS = 3, 4
_CHECKED = range(_STEPS + 2, _STEPS + 2 * _PAIRS + 1, 2)
# Seeds of the schedule of spot checks.
_SEEDS = 50


class Watch(pl.Callback):
    """Times steps and looks at resident memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.with_certificate = 0
        self.training = 0
        self._base = 0
        self._began = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from here."""
        self._base = _resident("VmRSS")
        _forget_peak()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Note what the step took."""
        now = time.perf_counter()
        if self._began:
            self.seconds.append(now - self._began)
        else:
            self.with_certificate = _resident("VmHWM") - self._base
            _forget_peak()
        if len(self.seconds) <= _STEPS:
            self.training = _resident("VmHWM") - self._base
        self._began = time.perf_counter()


def _resident(field: str) -> int:
    """Bytes of this process: ``VmRSS`` resident now, ``VmHWM`` the most since the peak was forgotten."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def configure(name: str, options: argparse.Namespace, run_dir: str) -> None:
    """Write what ``trainwright fit`` is given to ``run_dir``."""
    recipe, axes = CASES[name]
    world, data_ranks = _ranks(axes), axes.get("shard", 1)
    overrides = [
        "strategy=hybrid",
        *[f"strategy.{axis}={size}" for axis, size in {"shard": 1, **axes}.items()],
        *([f"size={options.size}"] if recipe == "gpt" else []),
        f"devices={world}",
        "accelerator=cpu",
        f"micro_batch_size={options.batch // data_ranks}",
        f"global_batch_size={options.batch}",
        f"max_steps={_STEPS + 2 * _PAIRS + 1}",
        f"run_dir={run_dir}",
        "checkpoint=none",
        "monitor=none",
        "callbacks.sample=null",
        "trainer.limit_val_batches=0",
        *([f"module.config.seq_len={options.length}"] if options.length else []),
        *([f"data.path={options.data}"] if options.data else []),
    ]
    prepare(compose(recipe, overrides), "fit")


def _ranks(axes: dict[str, int]) -> int:
    world = 1
    for axis, size in axes.items():
        world *= size if axis != "expert" else 1
    return world


def measure(run_dir: str) -> dict[str, Any]:
    """Train on this rank."""
    from trainwright.launch.worker import build_trainer

    cfg = read_config(Path(run_dir))
    module = instantiate(cfg.module, _convert_="all")
    seed_everything(cfg.seed, workers=True, verbose=False)
    trainer, watch = build_trainer(cfg), Watch()
    trainer.callbacks += [watch]  # type: ignore[attr-defined]
    blocks = [b for b in module.modules() if type(b).__name__.endswith("Block")]
    block = max((4 * sum(p.numel() for p in b.parameters()) for b in blocks), default=0)
    with mock.patch.object(SpotChecks, "is_drawn", lambda _, step: step in _CHECKED):
        trainer.fit(module, datamodule=instantiate(cfg.data, _convert_="all"))
    outcome, *later = (check.outcome for check in trainer.strategy.certificate.checks)  # type: ignore[attr-defined]
    checked = [watch.seconds[step - 1] for step in _CHECKED]
    plain = [seconds for step, seconds in enumerate(watch.seconds, 1) if step not in _CHECKED]
    return {
        "certificate": outcome.seconds,
        "spot_check": median(each.seconds for each in later),
        "written": median(each.written_seconds for each in later),
        "checked_step": median(checked),
        "step": median(plain),
        "parameters": outcome.parameters,
        "largest": outcome.largest[1],
        "with_certificate": watch.with_certificate,
        "training": watch.training,
        "block": block,
    }


def spot_checks(rank: dict[str, Any]) -> float:
    """Mean number of drawn spot checks in the first 1,000 steps, if checks and steps take as long as on ``rank``."""

    def count(seed: int) -> int:
        spots, found = SpotChecks(seed, 0, (), rank["written"]), 0
        spots._pace = rank["step"]
        for number in range(1, STEPS):
            if spots.is_drawn(number):
                spots.spend(mock.Mock(seconds=rank["spot_check"], written_seconds=rank["written"]), is_new=False)
                found += 1
        return found

    return mean(map(count, range(_SEEDS)))


def row_of(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """One line of the table, and whether the goals hold."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        run_dir = f"{folder}/run"
        configure(name, options, run_dir)
        found = run_ranks(measure, _ranks(CASES[name][1]), run_dir, threads=options.threads)
    slowest = max(found, key=lambda rank: rank["certificate"])
    fullest = max(found, key=lambda rank: rank["with_certificate"] - rank["training"] - rank["block"])
    spots = spot_checks(slowest)
    share = spots * slowest["spot_check"] / (STEPS * slowest["step"])
    row = {
        "layout": name,
        "ranks": len(found),
        "certificate_s": round(slowest["certificate"], 2),
        "step_s": round(slowest["step"], 3),
        "steps": round(slowest["certificate"] / slowest["step"], 2),
        "spot_check_s": round(slowest["spot_check"], 2),
        "step_with_check_s": round(slowest["checked_step"], 3),
        "spot_checks": round(spots, 1),
        "of_1000_steps": f"{share:.2%}",
        "with_new": f"{share + 2 * slowest['spot_check'] / (STEPS * slowest['step']):.2%}",
        "difference": f"{slowest['largest']:.1e}",
        "certificate_mib": round(fullest["with_certificate"] / _MIB, 1),
        "training_mib": round(fullest["training"] / _MIB, 1),
        "block_mib": round(fullest["block"] / _MIB, 1),
    }
    most = 2 * slowest["step"] + 1
    goals = [
        Goal(f"{name} {options.size}: seconds of the certificate", slowest["certificate"], most),
        Goal(
            f"{name} {options.size}: MiB until the first step",
            fullest["with_certificate"] / _MIB,
            (fullest["training"] + fullest["block"]) / _MIB,
        ),
        Goal(f"{name} {options.size}: share of spot checks in 1,000 steps", share, SHARE),
    ]
    return row, goals


def main() -> None:
    """Measure all layouts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--size", default="nano", help="of the gpt recipe: nano, mini, 125m, 350m ...")
    parser.add_argument("--batch", type=int, default=8, help="windows of text per optimizer step")
    parser.add_argument("--length", type=int, default=0, help="positions of a window; 0: as the size has it")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each rank")
    parser.add_argument("--data", default="", help="text file; default: that of the recipe")
    options = parser.parse_args()
    rows, goals = [], []
    for name in options.layouts:
        say(f"{name} ...")
        row, found = row_of(name, options)
        rows.append(row)
        goals += found
    title = f"certificate: gpt {options.size} (expert: moe), fp32, {options.batch} windows a step"
    finish("certificate", [table_of(title, rows)], goals, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
