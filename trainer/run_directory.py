"""The run directory: decided once by the launching process, and where a run is found again.

runs/<name>/<date>_<time>/
    config.yaml        the resolved configuration
    command.json       the words that the command was given
    plan.json          what `auto` was decided to be and what it was predicted to need; measured, once it has run
    metrics.csv        everything logged, one row per logged step
    summary.json       how it ended
    events.out.*       the same for TensorBoard
    checkpoints/       written by the checkpoint group; one folder per checkpoint
    logs/rank_<n>.log  what rank n had to say (rank 0 also speaks to the terminal)
    logs/restarts.log  what failed, and how the run went on
    report.html        all of it as a page
    predictions.pt     written by `predict`
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.references import settled

RUNS = Path("runs")
CONFIG_FILE = "config.yaml"
COMMAND_FILE = "command.json"
CHECKPOINTS = "checkpoints"
PLAN_FILE = "plan.json"


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """`runs/<name>/<date>_<time>`, with a number behind it when that second already has a run."""
    return next(path for path in _numbered(RUNS / name / timestamp(now)) if not path.exists())


def make_default_run_dir(name: str) -> Path:
    """Make the default run directory: this process alone gets it, even where others start in the same second."""
    for path in _numbered(RUNS / name / timestamp()):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers have no end")


def timestamp(now: datetime | None = None) -> str:
    """Local time as a directory name that sorts: 2026-01-31_14-05-09."""
    return (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")


def holds_run(run_dir: Path) -> bool:
    """Whether a run was started in this directory before."""
    return (run_dir / CONFIG_FILE).is_file()


def write_config(cfg: DictConfig) -> Path:
    """Make the run directory and write the resolved configuration there, whole or not at all.

    A run that goes on in its own directory keeps what was there: the old config.yaml, command.json, plan.json and
    metrics.csv are renamed to config.1.yaml, metrics.1.csv and so on: the new ones would overwrite them.

    Returns:
        The path of the written file.
    """
    run_dir = Path(cfg.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, COMMAND_FILE, PLAN_FILE, "metrics.csv"):
        _keep(run_dir / name)
    return write_config_file(cfg, run_dir)


def forget_beginning(run_dir: Path) -> None:
    """Let a directory hold no run in which nothing was started, so that the same command may be typed again.

    One that an earlier run was in keeps what there is.
    """
    if not (run_dir / f"{Path(CONFIG_FILE).stem}.1.yaml").exists():
        for name in (CONFIG_FILE, COMMAND_FILE, PLAN_FILE):
            (run_dir / name).unlink(missing_ok=True)


def write_config_file(cfg: DictConfig, folder: Path) -> Path:
    """Write a configuration into a folder, in the place of one that is there; returns the path of the file.

    References to environment variables are written as such, for their values may be secrets.
    """
    path = folder / CONFIG_FILE
    partial = path.with_suffix(".yaml.partial")
    partial.write_text(OmegaConf.to_yaml(settled(cfg)), encoding="utf-8")
    os.replace(partial, path)
    return path


def command_words(verb: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """What is typed after `trainwright` for one run."""
    return [verb, *overrides, *([] if config_dir is None else ["--config-dir", str(config_dir)])]


def write_command(run_dir: Path, words: Sequence[str]) -> None:
    """Keep what was typed after `trainwright` in the run directory, for people and for `trainwright report`."""
    text = json.dumps({"words": list(words)}, indent=1, ensure_ascii=False)
    (run_dir / COMMAND_FILE).write_text(text + "\n", encoding="utf-8")


def read_config(folder: Path | str) -> DictConfig:
    """The configuration that a folder holds: of a run, as its launching process wrote it, or of one attempt of it."""
    cfg = OmegaConf.load(Path(folder) / CONFIG_FILE)
    assert isinstance(cfg, DictConfig)
    return cfg


def runs_of(name: str) -> list[Path]:
    """The directories of the runs of a recipe under runs/<name>/ that have checkpoints or had them, newest first."""
    folder = RUNS / name
    return sorted((path.parent for path in folder.glob(f"*/{CHECKPOINTS}")), reverse=True)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(1):
        yield path.with_name(f"{path.name}-{number}")


def _keep(path: Path) -> None:
    number = 1
    while path.exists():
        kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not kept.exists():
            path.rename(kept)
        number += 1
