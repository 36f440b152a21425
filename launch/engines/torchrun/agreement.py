"""Agreement of ranks started by torchrun or SLURM: rank 0 decides, and detects a restart.

It sends the configuration to the others sealed, because the configuration determines which code runs. Ranks of one
machine without a shared secret get one from rank 0, in a file that only this user can read.

Every machine's agent (the torchrun process) has a unique name. Its ranks record it as an empty file in the run
directory; ranks that find the name of one of their agents there resume that run instead of starting another.
"""

import hashlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.missing import resolved
from trainwright.core.problems import ConfigError
from trainwright.core.processes.process import START_TIME, stat_of
from trainwright.core.run.launcher import Launcher
from trainwright.core.run.run_directory import RUNS, holds_run
from trainwright.core.text.bounded import open_regular
from trainwright.core.text.messages import RUN_TOKEN, run_token, seal, token_environment, unseal

_KEY = "trainwright/run"
_READ = f"{_KEY}/read"
_REFUSED = "refused"
_SECRET = re.compile(rb"[0-9a-f]{32}")
_LONGEST = 2**24
"""Largest size of a configuration, in bytes."""


def problem_of(launcher: Launcher) -> str | None:
    """Return why a configuration cannot be sent safely; ``None`` = it can."""
    if run_token() or launcher.world_size == launcher.local_world_size:
        return None
    here, everywhere = launcher.local_world_size, launcher.world_size
    return (
        f"{launcher.name} has started {everywhere} ranks, {here} of them on this machine, and they share no secret: "
        "anyone with network access could send other machines a configuration, and so code. Set the same secret on all "
        f"machines: export {RUN_TOKEN}=<secret>, made once with `openssl rand -hex 32`."
    )


def give(store: Any, text: str | None) -> None:
    """Send a configuration from rank 0 to the others, or (``None``) that it was refused."""
    if text is None:
        store.set(_KEY, _REFUSED)
        return
    place = "" if run_token() else _written_secret()
    store.set(_KEY, seal(run_token(), text) + place.encode())


def take(store: Any, readers: int) -> str | None:
    """Receive the configuration on another rank; ``None`` = rank 0 has refused it.

    Args:
        store: of the ranks.
        readers: number of receiving ranks; the last one cleans up.

    Raises:
        ConfigError: if it does not come from rank 0 of this run.
    """
    said = store.get(_KEY)
    shared, is_last = run_token(), store.add(_READ, 1) == readers
    if said == _REFUSED.encode():
        return None
    sealed, _, place = said[: _LONGEST + 4096].partition(b"\n")
    try:
        token = shared or _secret_in(place)
        text = str(unseal(token, sealed, _LONGEST))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"The configuration in the store of the ranks is not from this run's rank 0 ({error}). Start the run "
                "again; if ranks do not share a folder for temporary files, or are on several machines, export "
                f"{RUN_TOKEN}=<secret> with the same value for all."
            ]
        ) from None
    os.environ[RUN_TOKEN] = token
    if is_last and not shared:
        with suppress(OSError):
            os.unlink(place)
    return text


def _written_secret() -> str:
    """Create the secret of this run and write it to a file; return its path."""
    os.environ.update(token_environment())
    file, path = tempfile.mkstemp(prefix="trainwright-secret-")
    with os.fdopen(file, "w") as opened:
        opened.write(run_token())
    return path


def _secret_in(path: bytes) -> str:
    """Return the secret of rank 0 from a file that only this user can have written and read."""
    with open_regular(path.decode(), os.O_NOFOLLOW) as file:
        state, secret = os.fstat(file.fileno()), file.read(64)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077 or not _SECRET.fullmatch(secret):
        raise OSError(f"{path[:100]!r} is not a secret that only this user can read")
    return secret.decode()


_AGENT = "trainwright/agent"


def agree(launcher: Launcher, decide: Callable[[Launcher], DictConfig]) -> DictConfig | None:
    """Let rank 0 decide on the configuration, and send it to every rank.

    The resolved configuration is sent as authenticated text, so that machines need not share a file system.

    Args:
        launcher: of `detect_launcher`.
        decide: composes and checks the configuration and creates the run directory, or finds the run of the previous
            attempt; called on rank 0 only, with the launcher and its agents.

    Returns:
        The configuration; None on other ranks if rank 0 has refused it.

    Raises:
        Exception: on rank 0, raised by `decide`.
    """
    from trainwright.launch.ranks.torchrun_store import meet  # imports torch

    store = meet(launcher)
    agent = agent_id(os.environ)
    if agent is not None and _is_first_of_machine():
        store.set(f"{_AGENT}/{os.environ['GROUP_RANK']}", agent)
    cfg = _decided(store, launcher, decide) if launcher.rank == 0 else _heard(store, launcher.world_size - 1)
    if cfg is not None and agent is not None and _is_first_of_machine():
        record_agent(Path(cfg.run_dir), agent)
    return cfg


def _decided(store: Any, launcher: Launcher, decide: Callable[[Launcher], DictConfig]) -> DictConfig:
    """Decide on rank 0, and send the result."""
    text = None
    try:
        problem = problem_of(launcher)
        if problem is not None:
            raise ConfigError([problem])
        cfg = decide(replace(launcher, agents=_agents(store)))
        text = OmegaConf.to_yaml(resolved(cfg))
        return cfg
    finally:
        if launcher.world_size > 1:
            give(store, text)
        if text is None:
            _wait_for_readers(store, launcher.world_size - 1)  # the store may be in this process


def _heard(store: Any, readers: int) -> DictConfig | None:
    """Receive on the other ranks."""
    text = take(store, readers)
    if text is None:
        return None
    cfg = OmegaConf.create(text)
    assert isinstance(cfg, DictConfig)
    return cfg


def _is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK") == "0"


def _agents(store: Any) -> tuple[str, ...]:
    """Return the agents of every machine; waits until each is recorded."""
    if agent_id(os.environ) is None:
        return ()
    machines = range(int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    return tuple(store.get(f"{_AGENT}/{machine}").decode() for machine in machines)


def _wait_for_readers(store: Any, readers: int, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while store.add(_READ, 0) < readers and time.monotonic() < end:
        time.sleep(0.05)


# ---- the run of the previous attempt ---------------------------------------------------------------------------------

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


def record_agent(run_dir: Path, agent: str) -> None:
    """Record the name of an agent in the run directory of its ranks."""
    folder = run_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / agent).touch()


def previous_run(name: str, run_dir: str | None, agents: Sequence[str]) -> Path | None:
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
    recorded = (place for place in places if any((place / _FOLDER / agent).exists() for agent in agents))
    return max(filter(holds_run, recorded), default=None)
