"""Run directory that restarted ranks of a launcher belong to.

Every machine's agent (the torchrun process) has a unique name. Its ranks record it as an empty file in the run
directory; ranks that find the name of one of their agents there resume that run instead of starting another.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainwright.core.processes.process import START_TIME, stat_of
from trainwright.core.run.run_directory import RUNS, holds_run

_FOLDER = Path("logs") / "torchrun"


def agent_id(environment: Mapping[str, str]) -> str | None:
    """Return the unique name of the agent that has started this process; None without an agent that restarts ranks.

    Args:
        environment: variables of the process.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "GROUP_RANK" not in environment:
        return None
    error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file:
        # <folder of the agent>/attempt_<n>/<rank>/error.json; the folder has a random name, the same in every attempt.
        process = str(Path(error_file).parents[2])
    else:
        started = stat_of(os.getppid())[START_TIME : START_TIME + 1]  # empty where the system does not provide it
        process = f"{os.getppid()} {''.join(started)}"
    text = "\n".join((environment["TORCHELASTIC_RUN_ID"], socket.gethostname(), process))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def remember(run_dir: Path, agent: str) -> None:
    """Record the name of an agent in the run directory of its ranks."""
    folder = run_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / agent).touch()


def begun_run(name: str, run_dir: str | None, agents: Sequence[str]) -> Path | None:
    """Return the run directory that ranks of these agents belong to; None = they have none yet.

    Args:
        name: of the recipe.
        run_dir: as set by the user; None = not set.
        agents: of all machines.
    """
    if run_dir is not None:
        places = [Path(run_dir)]
    else:
        places = [path.parents[2] for agent in agents for path in (RUNS / name).glob(f"*/{_FOLDER}/{agent}")]
    begun = [place for place in places if holds_run(place) and _names(place, agents)]
    return max(begun, default=None)


def _names(run_dir: Path, agents: Sequence[str]) -> bool:
    return any((run_dir / _FOLDER / agent).exists() for agent in agents)
