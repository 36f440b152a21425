"""What is impossible about restarts, as far as it can be told before a process starts."""

from collections.abc import Iterator

from omegaconf import DictConfig


def restart_problems(cfg: DictConfig, verb: str, has_launcher: bool) -> list[str]:
    """What speaks against what `launch` says of restarts.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        has_launcher: whether torchrun or SLURM has started this process.
    """
    problems = list(_impossible_numbers(cfg))
    restarts = cfg.launch.max_restarts != 0
    if restarts and has_launcher:
        problems.append(
            f"launch.max_restarts={_word(cfg.launch.max_restarts)} under a launcher: the launcher starts the ranks "
            "again; type torchrun --max-restarts=... and launch=local, and leave launch.max_restarts out"
        )
    elif restarts and verb == "fit" and not _saves(cfg):
        problems.append(
            f"launch.max_restarts={_word(cfg.launch.max_restarts)} without checkpoints: every restart would begin from "
            "the start; type checkpoint=last (or async), or launch.max_restarts=0"
        )
    if cfg.launch.min_devices is not None and not restarts:
        problems.append(
            f"launch.min_devices={cfg.launch.min_devices} with launch.max_restarts=0: ranks are never started again, "
            "on fewer devices either; type launch=resilient, or launch.max_restarts=null"
        )
    return problems


def _impossible_numbers(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    if launch.max_restarts is not None and launch.max_restarts < 0:
        yield f"launch.max_restarts={launch.max_restarts}: must be at least 0 (off), or null for no limit"
    if launch.same_failure_limit < 1:
        yield f"launch.same_failure_limit={launch.same_failure_limit}: must be at least 1; 1 ends the run at once"
    if launch.backoff_seconds < 0:
        yield f"launch.backoff_seconds={launch.backoff_seconds:g}: must be at least 0, which is no wait"
    if launch.min_devices is not None and launch.min_devices < 1:
        yield f"launch.min_devices={launch.min_devices}: must be at least 1, or null for as many as devices says"
    if launch.probe_seconds <= 0:
        yield f"launch.probe_seconds={launch.probe_seconds:g}: must be more than 0; type launch.probe_seconds=60"


def _saves(cfg: DictConfig) -> bool:
    """Whether something saves that a restart can go on from: the group checkpoint, or a callback of the recipe."""
    own = (str(each.get("_target_", "")) for each in cfg.callbacks.values() if isinstance(each, DictConfig))
    return any(each is not None for each in cfg.checkpoint.values()) or any("Checkpoint" in each for each in own)


def _word(number: int | None) -> str:
    return "null" if number is None else str(number)
