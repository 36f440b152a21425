"""Whether a run can write into its directory."""

import os
from pathlib import Path

from omegaconf import DictConfig

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.run.run_directory import holds_run
from trainwright.strategies.compose.world import Surroundings


def run_dir_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """A file in its place, a link to nothing, a directory that is not writable, or one that holds another run."""
    run_dir = Path(cfg.run_dir)
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if not existing.exists():
        return [
            f"run_dir={run_dir}: {existing} is a link to {os.readlink(existing)}, which does not exist; make that "
            "folder, or type another run_dir=..."
        ]
    if not existing.is_dir():
        return [f"run_dir={run_dir}: {existing} is a file; type another run_dir=..."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run_dir={run_dir}: {existing} is not writable for this user; type another run_dir=..."]
    if surroundings.verb == "fit" and holds_run(run_dir) and not _continues(cfg, run_dir):
        return [
            f"run_dir={run_dir}: holds a run already; type ckpt_path=last or resume=auto to go on from it, or "
            "another run_dir=..."
        ]
    return []


def _continues(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether the run goes on in its own directory; with resume=auto it may have ended before its first checkpoint."""
    if cfg.resume == AUTO:
        return True
    return cfg.ckpt_path is not None and Path(cfg.ckpt_path).resolve().is_relative_to(run_dir.resolve())
