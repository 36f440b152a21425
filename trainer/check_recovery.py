"""What is impossible about recovery without restart, as far as it can be told before a process starts."""

from collections.abc import Iterator

from omegaconf import DictConfig

from trainwright.callbacks.option_rules import is_positive
from trainwright.strategies.layout import Layout

RESTART, REPLICAS, AUTO = "restart", "replicas", "auto"
RECOVERIES = (RESTART, REPLICAS, AUTO)


def recovery_problems(cfg: DictConfig, verb: str, layout: Layout | None, has_launcher: bool) -> list[str]:
    """What speaks against `launch.recovery`, `launch.spares` and `launch.mtbf`.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        layout: closed; None = not known, or refused elsewhere.
        has_launcher: whether torchrun or SLURM has started this process.
    """
    problems = [] if cfg.launch.recovery != REPLICAS else list(_against_replicas(cfg, verb, layout, has_launcher))
    if not is_positive(cfg.launch.mtbf):
        problems.append(f"launch.mtbf={cfg.launch.mtbf}: must be a number of hours above 0; 3 is the default")
    if cfg.launch.spares < 0:
        problems.append(f"launch.spares={cfg.launch.spares}: must be at least 0, which is none")
    elif cfg.launch.spares > 0 and cfg.launch.recovery == RESTART:
        problems.append(
            f"launch.spares={cfg.launch.spares} with launch.recovery=restart: a restart starts all ranks anew, and "
            "takes none that stands ready; type launch.recovery=replicas, or leave launch.spares out"
        )
    return problems


def _against_replicas(cfg: DictConfig, verb: str, layout: Layout | None, has_launcher: bool) -> Iterator[str]:
    if has_launcher:
        yield (
            "launch.recovery=replicas under a launcher: it ends all ranks when one fails; type launch.recovery=restart "
            "(torchrun --max-restarts=...), or start the run without it"
        )
    elif verb != "fit":
        yield f"launch.recovery=replicas with {verb}: only fit goes on after a loss; leave it out"
    elif cfg.launch.max_restarts == 0:
        yield (
            "launch.recovery=replicas with launch.max_restarts=0: nothing is ever replaced; type launch=resilient, or "
            "launch.max_restarts=null"
        )
    elif cfg.launch.min_devices is not None:
        yield (
            f"launch.recovery=replicas with launch.min_devices={cfg.launch.min_devices}: replicas that are lost are "
            "gone without it, down to one; leave launch.min_devices out, or type launch.recovery=restart"
        )
    if layout is not None and layout.replicate < 2:
        yield (
            f"launch.recovery=replicas with the layout {layout}: no other replica has the state of a lost rank; type "
            "launch.recovery=restart, or a layout with several replicas (strategy=ddp, or strategy.replicate=2)"
        )
