"""Run directories in the format of runs."""

import json
from pathlib import Path
from typing import Any

from trainwright.core.run.run_directory import command_words, write_command

BEGAN = 1_800_000_000.0
CONFIG = """\
name: gpt
devices: 4
nodes: 1
max_steps: 20
seed: 7
strategy:
  _target_: trainwright.strategies.compose.hybrid.HybridStrategy
  pipeline: 2
  replicate: 1
  shard: -1
  context: 1
  tensor: 1
  expert: 1
optimizer:
  lr: 0.004
"""


def small_run(path: Path, config: str = CONFIG) -> Path:
    """Write a run with only metrics.csv and config.yaml."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    rows = [f"{5 - step / 10},{10 * step + 1},{step}" for step in range(20)]
    (path / "metrics.csv").write_text("\n".join(["loss,samples_per_second,step", *rows]) + "\n")
    return path


def whole_run(path: Path) -> Path:
    """Write a run with all files: four ranks, a fault, a restart, a checkpoint, a sampled step of the pipeline."""
    small_run(path)
    write_command(path, command_words("fit", ["recipe=gpt", "strategy=hybrid", "strategy.shard=-1", "seed=7"]))
    for rank in range(4):
        write_records(path, rank, records_of(rank))
    (path / "logs").mkdir()
    (path / "logs" / "restarts.log").write_text(
        "2027-01-15 08:05:00.250 rank 1 was ended by SIGKILL (at step 12)\n    details\n"
        "2027-01-15 08:05:00.300 restart 1; more\n2027-01-15 08:05:01.000 resuming from step=10 with 4 rank(s)\n"
    )
    saved = path / "checkpoints" / "step=10"
    saved.mkdir(parents=True)
    about = {
        "step": 10, "bytes": 4096, "created": "2027-01-15T08:01:00+00:00", "kind": "run state",
        "versions": {"torch": "2.13.0"},
        "layout": {"pipeline": 2, "replicate": 1, "shard": 2, "context": 1, "tensor": 1, "expert": 1},
    }  # fmt: skip
    (saved / "manifest.json").write_text(json.dumps({"about": about}))
    predicted = {"parameters": 3e6, "gradients": 1e6, "optimizer": 2e6, "activations": 0, "buffers": 0}
    document = {"chosen": {"bytes": {**predicted, "total": 6e6, "moment": "step"}, "seconds": {"step": 0.5}}}
    (path / "plan.json").write_text(json.dumps(document))
    return path


def records_of(rank: int) -> list[dict[str, Any]]:
    stage = rank // 2
    seconds = {"data": 0.25, "forward": 1.0, "backward": 2.0, "communication": 0.5, "optimizer": 0.25, "other": 0.0}
    timeline = [[0.0, 1.0, "forward", 0, 0], [1.0, 2.0, "forward", 1, 0], [3.0, 4.0, "backward", 0, 0]]
    if stage:
        timeline = [[0.5, 1.5, "forward", 0, 1], [1.5, 2.5, "backward", 0, 1]]  # starts half a second later
    return [
        {"time": BEGAN, "step": 10, "kind": "step", "seconds": seconds, "total": 4.0, "steps": 4},
        {"time": BEGAN + 9, "step": 20, "kind": "step", "seconds": seconds, "total": 4.0, "steps": 2},
        {"time": BEGAN, "step": 10, "kind": "memory", "host": 2**30, "parameters": 2**20 * (rank + 1),
         "gradients": 2**20, "optimizer": 2**21},
        {"time": BEGAN, "step": 10, "kind": "rate", "samples_per_second": 12.5, "mfu": 0.321},
        {"time": BEGAN, "step": 10, "kind": "bubble", "idle": 1.0, "busy": 3.0,
         "began": BEGAN + stage / 2, "timeline": timeline},
        {"time": BEGAN + 5, "step": 15, "kind": "event", "what": "validation", "text": "", "seconds": 1.5},
    ]  # fmt: skip


def write_records(path: Path, rank: int, records: list[dict[str, Any]]) -> None:
    folder = path / "monitor"
    folder.mkdir(exist_ok=True)
    with (folder / f"rank_{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
