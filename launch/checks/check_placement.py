"""What cannot be had beside `strategy.placement` (tables on servers), as far as it is known before a start."""

from collections.abc import Iterator

from omegaconf import DictConfig

from trainwright.core.config.targets import class_of
from trainwright.strategies.local_updates.rules import PLACEMENT

# Lightning's; their subclasses are refused by the ranks.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
_LOCAL_UPDATES = ("LocalSGDStrategy", "DiLoCoStrategy")


def placement_refusals(cfg: DictConfig, verb: str) -> list[str]:
    """What speaks against `strategy.placement` in a resolved configuration; empty where none is given.

    What speaks against its own words and the layout is said by
    :func:`~trainwright.strategies.parameter_server.tables.placement.placement_problems`.

    Args:
        cfg: the configuration.
        verb: fit, validate, test or predict.
    """
    if not cfg.strategy.get("placement") or verb != "fit":
        return []
    return list(_problems(cfg))


def _problems(cfg: DictConfig) -> Iterator[str]:
    if class_of(cfg.strategy) in _LOCAL_UPDATES:
        yield f"strategy.{PLACEMENT}"
    if class_of(cfg.optimizer) == "LBFGS":
        yield (
            "optimizer LBFGS with strategy.placement: it computes the loss several times within a step (needs a "
            "closure), which a server cannot; type optimizer=adamw"
        )
    if cfg.nodes > 1 and cfg.strategy.get("interface") is None:
        yield (
            f"nodes={cfg.nodes} with strategy.interface=null: the servers of strategy.placement listen at the loopback "
            "address alone; type the name of a network interface, like strategy.interface=eth0 (messages are neither "
            "encrypted nor signed)"
        )
    if cfg.launch.recovery in ("replicas", "rejoin"):
        yield (
            f"launch.recovery={cfg.launch.recovery} with strategy.placement: the tables of a lost rank's server are "
            "nowhere else; type launch.recovery=restart"
        )
    name, sends = cfg.compression.get("name"), cfg.compression.get("sends")
    if name == "onebit" or sends == "steps":
        asked = f"compression={name}" + (" compression.sends=steps" if sends else "")
        yield (
            f"{asked} with strategy.placement: it takes part in the optimizer's step, which servers make for tables; "
            "type compression=int8"
        )
    for group in ("callbacks", "monitor"):
        for name, callback in cfg[group].items():
            if class_of(callback) in _AVERAGING:
                yield (
                    f"{group}.{name} with strategy.placement: the average would have tables of its own; type "
                    f"{group}.{name}=null"
                )
