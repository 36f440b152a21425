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
        given = f"launch.recovery=replicas with {cfg.strategy.get('_target_')}"
        problems.append(f"{given}: its configuration does not show its replicas; type launch.recovery=restart")
    if cfg.launch.recovery == REJOIN:
        problems += _rejoin_problems(cfg, verb, options, has_launcher)
    if cfg.launch.spares > 0 and cfg.launch.recovery in (RESTART, REJOIN):
        given = f"launch.spares={cfg.launch.spares} with launch.recovery={cfg.launch.recovery}"
        problems.append(f"{given}: only launch.recovery=replicas uses standby processes; leave launch.spares out")
    return problems


def _replica_problems(cfg: DictConfig, verb: str, layout: Layout | None, has_launcher: bool) -> Iterator[str]:
    yield from _common_problems(cfg, verb, has_launcher)
    if layout is not None and layout.replicate < 2:
        given = f"launch.recovery=replicas with the layout {layout}, which has only one replica"
        yield f"{given}: type launch.recovery=restart, or a layout with several (strategy=ddp, or strategy.replicate=2)"


def _common_problems(cfg: DictConfig, verb: str, has_launcher: bool) -> Iterator[str]:
    given = f"launch.recovery={cfg.launch.recovery}"
    if has_launcher:
        yield f"{given} under a launcher, which ends all ranks when one fails: type launch.recovery=restart"
    elif verb != "fit":
        yield f"{given} with {verb}: only fit can recover from a loss; leave it out"
    elif cfg.launch.max_restarts == 0:
        yield f"{given} with launch.max_restarts=0: type launch=resilient, or launch.max_restarts=null"
    elif cfg.launch.min_devices is not None:
        yield f"{given} with launch.min_devices={cfg.launch.min_devices}: lost ranks are replaced; leave one out"


def _rejoin_problems(cfg: DictConfig, verb: str, options: StrategyOptions | None, has_launcher: bool) -> Iterator[str]:
    yield from _common_problems(cfg, verb, has_launcher)
    if options is None or options.replaceable_ranks(0) is None:
        yield (
            "launch.recovery=rejoin: this strategy cannot continue after losing a rank; type launch.recovery=restart "
            "(replicas with several replicas), or strategy=parameter_server"
        )
    elif cfg.devices != "auto" and not options.replaceable_ranks(int(cfg.devices)):
        servers = f"launch.recovery=rejoin with strategy.servers={cfg.strategy.servers}"
        if options.serving_ranks:
            servers += f" strategy.server_ranks={cfg.strategy.server_ranks}"
            why = "there is only one worker, so no other could send the state to a replacement; type more devices"
        else:
            why = "every rank holds a server, and the parameters of a lost server are lost; type fewer servers"
        yield f"{servers} on {cfg.devices} device(s): {why}, or launch.recovery=restart"


def restart_problems(cfg: DictConfig, verb: str, has_launcher: bool) -> list[str]:
    """Return the problems of the restart options of `launch`.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        has_launcher: whether torchrun or SLURM has started this process.
    """
    restarts, fewest = cfg.launch.max_restarts, cfg.launch.min_devices
    given = f"launch.max_restarts={'null' if restarts is None else restarts}"
    if restarts == 0:
        advice = "ranks are never restarted; type launch=resilient, or launch.max_restarts=null"
        return [] if fewest is None else [f"launch.min_devices={fewest} with {given}: {advice}"]
    if has_launcher:
        return [f"{given} under a launcher: type torchrun --max-restarts=... and launch=local, and leave it out"]
    if verb == "fit" and not _saves(cfg):
        advice = "type checkpoint=last (or async), or launch.max_restarts=0"
        return [f"{given} without checkpoints: every restart would start from scratch; {advice}"]
    return []


def _saves(cfg: DictConfig) -> bool:
    """Return whether checkpoints to restart from are saved: by the group checkpoint, or by a callback of the recipe."""
    own = (str(each.get("_target_", "")) for each in cfg.callbacks.values() if isinstance(each, DictConfig))
    return any(each is not None for each in cfg.checkpoint.values()) or any("Checkpoint" in each for each in own)
