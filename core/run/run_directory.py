"""Layout of run directories, chosen once by the launching process.

runs/<name>/elsewhere.txt  the newest runs with their own run_dir=
runs/<name>/<date>_<time>/
    config.yaml        the resolved configuration
    command.json       the words of the command
    plan.json          the choice of `auto` and its predicted needs; measured ones once it has run
    metrics.csv        everything logged, one row per logged step
    summary.json       how the run ended
    loggers.json       runs of external services that its loggers write to
    events.out.*       the metrics for TensorBoard
    checkpoints/       written by the checkpoint group; one folder per checkpoint
    logs/rank_<n>.log  output of rank n (rank 0 also prints to the terminal)
    logs/restarts.log  failures, and how the run resumed
    report.html        all of it as a page
    predictions.pt     written by `predict`
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.references import settled
from trainwright.core.failures.records import write_whole

RUNS = Path("runs")
CONFIG_FILE = "config.yaml"
COMMAND_FILE = "command.json"
CHECKPOINTS = "checkpoints"
PLAN_FILE = "plan.json"
ELSEWHERE = "elsewhere.txt"  # in runs/<name>/: times and paths of run directories that were typed
# A command that resumes in a run directory keeps the previous versions of these under numbered names.
_OF_ONE_COMMAND = (Path(CONFIG_FILE), Path(COMMAND_FILE), Path(PLAN_FILE), Path("metrics.csv"))


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """Return `runs/<name>/<date>_<time>`, with a numeric suffix if that exists."""
    return next(path for path in _numbered(RUNS / name / timestamp(now)) if not path.exists())


def make_default_run_dir(name: str) -> Path:
    """Create the default run directory, exclusively for this process even if others start in the same second."""
    for path in _numbered(RUNS / name / timestamp()):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def timestamp(now: datetime | None = None) -> str:
    """Return the local time as a sortable directory name: 2026-01-31_14-05-09."""
    return (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")


def holds_run(run_dir: Path) -> bool:
    """Return whether a run was started in this directory before."""
    return (run_dir / CONFIG_FILE).is_file()


def write_config(cfg: DictConfig) -> Path:
    """Create the run directory and write the resolved configuration there atomically.

    A run that resumes in its own directory keeps the old config.yaml, command.json, plan.json and metrics.csv as
    config.1.yaml, metrics.1.csv and so on.

    Returns:
        The path of the written file.
    """
    run_dir = Path(cfg.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    for path in _OF_ONE_COMMAND:
        _keep(run_dir / path)
    return write_config_file(cfg, run_dir)


class RunDirRollback:
    """State of a run directory before a command writes to it, restored if the command is refused.

    Covers only the directory and its immediate subfolders: nothing is written deeper before training starts.

    Args:
        run_dir: that the command is about to write to.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.absolute()
        self._missing = [path for path in (self.run_dir, *self.run_dir.parents) if not os.path.lexists(path)]
        self._sizes = {path: path.lstat().st_size for path in self._paths()}

    def restore(self) -> None:
        """Remove new files and restore renamed ones."""
        if self._missing:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            for folder in self._missing[1:]:
                with contextlib.suppress(OSError):  # not empty: another run has written there
                    folder.rmdir()
            return
        new = [path for path in self._paths() if path not in self._sizes]
        for path in _OF_ONE_COMMAND:
            kept = [each for each in new if each.match(f"{path.stem}.*{path.suffix}") and each.parent == self.run_dir]
            if kept and self.run_dir / path in self._sizes:
                kept[0].replace(self.run_dir / path)
        for path in new:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for path, size in self._sizes.items():
            if path.is_file() and path.stat().st_size > size:
                os.truncate(path, size)  # appended logs

    def _paths(self) -> list[Path]:
        return [path for pattern in ("*", "*/*") for path in self.run_dir.glob(pattern)]


def write_config_file(cfg: DictConfig, folder: Path) -> Path:
    """Write a configuration into a folder, replacing an existing one; return the path of the file.

    References to environment variables are kept as such, since their values may be secrets.
    """
    path = folder / CONFIG_FILE
    write_whole(path, OmegaConf.to_yaml(settled(cfg)))
    return path


def command_words(verb: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """Return the command line after `trainwright` for one run."""
    return [verb, *overrides, *([] if config_dir is None else ["--config-dir", str(config_dir)])]


def write_command(run_dir: Path, words: Sequence[str]) -> None:
    """Write the words typed after `trainwright` into the run directory, for `trainwright report`."""
    text = json.dumps({"words": list(words)}, indent=1, ensure_ascii=False)
    (run_dir / COMMAND_FILE).write_text(text + "\n", encoding="utf-8")


def read_config(folder: Path | str) -> DictConfig:
    """Read the configuration of a run, or of one of its attempts, from its folder."""
    cfg = OmegaConf.load(Path(folder) / CONFIG_FILE)
    assert isinstance(cfg, DictConfig)
    return cfg


def runs_of(name: str) -> list[Path]:
    """Return the run directories of a name that have or had checkpoints, newest first."""
    found = {path.parent.name: path.parent for path in (RUNS / name).glob(f"*/{CHECKPOINTS}")}
    found |= {time: path for path, time in _elsewhere(name).items() if (path / CHECKPOINTS).is_dir()}
    return [found[time] for time in sorted(found, reverse=True)]


def list_run(name: str, run_dir: Path) -> None:
    """Add a run directory outside of runs/<name>/ to the list there, so that later commands find its checkpoints."""
    folder = RUNS / name
    if run_dir.absolute().parent == folder.absolute() or not holds_run(run_dir):
        return
    listed = _elsewhere(name) | {run_dir.absolute(): timestamp()}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ELSEWHERE, "".join(f"{time} {path}\n" for path, time in listed.items()))


def _elsewhere(name: str) -> dict[Path, str]:
    """Return the times of the last runs in directories outside of runs/<name>/."""
    file = RUNS / name / ELSEWHERE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {Path(path): time for time, _, path in (line.partition(" ") for line in lines)}


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
