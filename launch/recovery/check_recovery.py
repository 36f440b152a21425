"""Checks of restarts and of recovery without restart, before any process starts."""

from collections.abc import Iterator

from omegaconf import DictConfig

from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import StrategyOptions

RESTART, REPLICAS, REJOIN, AUTO = "restart", "replicas", "rejoin", "auto"
RECOVERIES = (RESTART, REPLICAS, REJOIN, AUTO)


def recovery_problems(
    cfg: DictConfig, verb: str, options: StrategyOptions | None, layout: Layout | None, has_launcher: bool
) -> list[str]:
    """Return the problems of `launch.recovery`, `launch.spares` and `launch.mtbf`.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        options: of the strategy; None = of a class outside this project.
        layout: with all sizes resolved; None = unknown, or refused elsewhere.
        has_launcher: whether torchrun or SLURM has started this process.
    """
    problems = [] if cfg.launch.recovery != REPLICAS else list(_replica_problems(cfg, verb, layout, has_launcher))
    if cfg.launch.recovery == REPLICAS and options is None:
        problems.append(
            f"launch.recovery=replicas with {cfg.strategy.get('_target_')}: its configuration does not show which "
            "ranks are replicas; type launch.recovery=restart, or derive the class from one of Trainwright's"
        )
    if cfg.launch.recovery == REJOIN:
        problems += _rejoin_problems(cfg, verb, options, has_launcher)
    if cfg.launch.spares > 0 and cfg.launch.recovery in (RESTART, REJOIN):
        whom = "all ranks" if cfg.launch.recovery == RESTART else "the lost rank"
        problems.append(
            f"launch.spares={cfg.launch.spares} with launch.recovery={cfg.launch.recovery}: it restarts {whom}, and "
            "uses no standby processes; type launch.recovery=replicas, or leave launch.spares out"
        )
    return problems


def _replica_problems(cfg: DictConfig, verb: str, layout: Layout | None, has_launcher: bool) -> Iterator[str]:
    yield from _common_problems(cfg, verb, has_launcher)
    if layout is not None and layout.replicate < 2:
        yield (
            f"launch.recovery=replicas with the layout {layout}: no other replica has the state of a lost rank; type "
            "launch.recovery=restart, or a layout with several replicas (strategy=ddp, or strategy.replicate=2)"
        )


def _common_problems(cfg: DictConfig, verb: str, has_launcher: bool) -> Iterator[str]:
    given = f"launch.recovery={cfg.launch.recovery}"
    if has_launcher:
        yield (
            f"{given} under a launcher: it ends all ranks when one fails; type launch.recovery=restart "
            "(torchrun --max-restarts=...), or start the run without it"
        )
    elif verb != "fit":
        yield f"{given} with {verb}: only fit can recover from a loss; leave it out"
    elif cfg.launch.max_restarts == 0:
        yield (
            f"{given} with launch.max_restarts=0: lost ranks are never replaced; type launch=resilient, or "
            "launch.max_restarts=null"
        )
    elif cfg.launch.min_devices is not None:
        yield (
            f"{given} with launch.min_devices={cfg.launch.min_devices}: lost ranks are replaced instead; leave "
            "launch.min_devices out, or type launch.recovery=restart"
        )


def _rejoin_problems(cfg: DictConfig, verb: str, options: StrategyOptions | None, has_launcher: bool) -> Iterator[str]:
    yield from _common_problems(cfg, verb, has_launcher)
    if options is None or options.replaceable_ranks(0) is None:
        yield (
            "launch.recovery=rejoin: this strategy cannot continue after losing a rank; type launch.recovery=restart, "
            "launch.recovery=replicas for a layout with several replicas, or strategy=parameter_server"
        )
    elif cfg.devices != "auto" and not options.replaceable_ranks(int(cfg.devices)):
        servers = f"launch.recovery=rejoin with strategy.servers={cfg.strategy.servers}"
        if options.serving_ranks:
            yield (
                f"{servers} strategy.server_ranks={cfg.strategy.server_ranks} on {cfg.devices} device(s): there is "
                "only one worker, so no other worker could send the state to a replacement; type more devices, or "
                "launch.recovery=restart"
            )
        else:
            yield (
                f"{servers} on {cfg.devices} device(s): every rank holds a server, and the parameters of a lost server "
                "are lost; type fewer servers, or launch.recovery=restart"
            )


def restart_problems(cfg: DictConfig, verb: str, has_launcher: bool) -> list[str]:
    """Return the problems of the restart options of `launch`.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        has_launcher: whether torchrun or SLURM has started this process.
    """
    problems = []
    restarts = cfg.launch.max_restarts != 0
    if restarts and has_launcher:
        problems.append(
            f"launch.max_restarts={_word(cfg.launch.max_restarts)} under a launcher: the launcher restarts the ranks; "
            "type torchrun --max-restarts=... and launch=local, and leave launch.max_restarts out"
        )
    elif restarts and verb == "fit" and not _saves(cfg):
        problems.append(
            f"launch.max_restarts={_word(cfg.launch.max_restarts)} without checkpoints: every restart would start from "
            "scratch; type checkpoint=last (or async), or launch.max_restarts=0"
        )
    if cfg.launch.min_devices is not None and not restarts:
        problems.append(
            f"launch.min_devices={cfg.launch.min_devices} with launch.max_restarts=0: ranks are never restarted; type "
            "launch=resilient, or launch.max_restarts=null"
        )
    return problems


def _saves(cfg: DictConfig) -> bool:
    """Return whether checkpoints to restart from are saved: by the group checkpoint, or by a callback of the recipe."""
    own = (str(each.get("_target_", "")) for each in cfg.callbacks.values() if isinstance(each, DictConfig))
    return any(each is not None for each in cfg.checkpoint.values()) or any("Checkpoint" in each for each in own)


def _word(number: int | None) -> str:
    return "null" if number is None else str(number)
