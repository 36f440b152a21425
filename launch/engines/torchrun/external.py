"""Ranks that torchrun or SLURM has started: rank 0 decides for all, and knows whether it is a restart."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.missing import resolved
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.launch.engines.torchrun.begun import agent_id, remember
from trainwright.launch.engines.torchrun.handed_over import give, problem_of, read_by, take

_AGENT = "trainwright/agent"


def agree(launcher: Launcher, decide: Callable[[Launcher], DictConfig]) -> DictConfig | None:
    """Let rank 0 decide on the configuration, and hand it to every rank.

    The resolved configuration travels as text, so that machines need not share a file system, and authenticated; see
    :mod:`~trainwright.launch.engines.torchrun.handed_over`.

    Args:
        launcher: as `detect_launcher` found it.
        decide: composes and checks the configuration and makes the run directory, or finds the run that was begun
            before a restart; called on rank 0 alone, with the launcher and its agents.

    Returns:
        The configuration; None on the ranks that learn that rank 0 has refused it.

    Raises:
        Exception: on rank 0, whatever `decide` raised.
    """
    store = _meet(launcher)
    agent = agent_id(os.environ)
    if agent is not None and _is_first_of_machine():
        store.set(f"{_AGENT}/{os.environ['GROUP_RANK']}", agent)
    cfg = _decided(store, launcher, decide) if launcher.rank == 0 else _heard(store, launcher.world_size - 1)
    if cfg is not None and agent is not None and _is_first_of_machine():
        remember(Path(cfg.run_dir), agent)
    return cfg


def _decided(store: Any, launcher: Launcher, decide: Callable[[Launcher], DictConfig]) -> DictConfig:
    """On rank 0."""
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
            _wait_for_readers(store, launcher.world_size - 1)  # the store may live in this process, which ends now


def _heard(store: Any, readers: int) -> DictConfig | None:
    """On the other ranks."""
    text = take(store, readers)
    if text is None:
        return None
    cfg = OmegaConf.create(text)
    assert isinstance(cfg, DictConfig)
    return cfg


def _meet(launcher: Launcher) -> Any:
    from trainwright.launch.ranks.meeting import meet  # imports torch

    return meet(launcher)


def _is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK") == "0"


def _agents(store: Any) -> tuple[str, ...]:
    """Of every machine; waits until each has said its own."""
    if agent_id(os.environ) is None:
        return ()
    machines = range(int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    return tuple(store.get(f"{_AGENT}/{machine}").decode() for machine in machines)


def _wait_for_readers(store: Any, readers: int, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while read_by(store) < readers and time.monotonic() < end:
        time.sleep(0.05)
