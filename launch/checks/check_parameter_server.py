"""What is impossible about parameter servers, as far as it can be told before a process starts."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import class_of
from trainwright.launch.checks.check_compression import compression_of
from trainwright.launch.recovery.check_recovery import replaceable_ranks
from trainwright.strategies.averaging.compression.options import OFF, compression_problems
from trainwright.strategies.parameter_server.options import (
    DEFAULTS,
    OWN,
    push_problems,
    rank_problems,
    server_problems,
)
from trainwright.trainer.leases.check import lease_problems

_PREFIX = "strategy."
# Callbacks that run collectives as training goes, and what to type to be without.
_TIED = {"LossGuard": "guard=none", "ReplicaCheck": "monitor=default", "Stragglers": "monitor=default"}


def parameter_server_problems(cfg: DictConfig, world_size: int | None) -> list[str]:
    """What speaks against `strategy=parameter_server` in a resolved configuration; empty for other strategies.

    Args:
        cfg: the configuration.
        world_size: ranks of the run; None = not known, or refused elsewhere.
    """
    if not str(cfg.strategy.get("_target_", "")).endswith("ParameterServerStrategy"):
        return []
    plain: Any = OmegaConf.to_container(cfg.strategy, resolve=True)
    options = {**DEFAULTS, **{key: value for key, value in plain.items() if key in DEFAULTS}}
    problems = server_problems(options, _PREFIX)
    if not problems and world_size is not None:
        problems += rank_problems(options["servers"], world_size, _PREFIX, own=options["server_ranks"] == OWN)
    problems += [*_pushes(cfg), *_in_any_case(cfg)]
    if options.get("consistency") in ("ssp", "async"):
        problems += _when_alone(cfg, f"strategy.consistency={options['consistency']}")
    elif replaceable_ranks(cfg, "fit"):
        problems += _when_alone(cfg, f"launch.recovery={cfg.launch.recovery}")
    if options.get("leases", "none") != "none":
        problems += lease_problems(cfg)
    return problems


def _pushes(cfg: DictConfig) -> list[str]:
    """What speaks against the group `compression`, which fills that argument of the strategy."""
    name = cfg.compression.name
    if name == OFF:
        return []
    if cfg.strategy.get("compression") not in (None, OFF):
        return [
            f"compression={name} with strategy.compression={cfg.strategy.compression}: both say how gradients are "
            "pushed; leave strategy.compression out"
        ]
    given = compression_of(cfg)
    return [] if compression_problems(given) else push_problems(given)


def _in_any_case(cfg: DictConfig) -> Iterator[str]:
    if class_of(cfg.optimizer) == "LBFGS":
        yield (
            "optimizer LBFGS with strategy=parameter_server: it computes the loss several times within a step (needs "
            "a closure), which a server cannot; type optimizer=adamw, or strategy=ddp"
        )
    if cfg.nodes > 1 and cfg.strategy.get("interface") is None:
        yield (
            f"nodes={cfg.nodes} with strategy.interface=null: servers listen at the loopback address alone; type the "
            "name of a network interface, like strategy.interface=eth0 (messages are neither encrypted nor signed)"
        )
    for group in ("monitor", "callbacks"):
        for name, callback in cfg[group].items():
            if class_of(callback) == "Norms":
                yield (
                    f"{group}.{name} with strategy=parameter_server: the averaged gradients of a step are the servers' "
                    f"alone, no worker sees them; type monitor=default, or {group}.{name}=null"
                )
    if cfg.launch.recovery == "replicas":
        yield (
            "launch.recovery=replicas with strategy=parameter_server: the state of a lost rank's server is nowhere "
            "else; type launch.recovery=rejoin with launch.max_restarts=3"
        )


def _when_alone(cfg: DictConfig, why: str) -> Iterator[str]:
    """What ties ranks together at every step, or every few."""
    ending = f"with {why}: it ties ranks together, but there they step by themselves"
    instead = ", or strategy.consistency=sync" if "consistency" in why else ", or launch.recovery=restart"
    for group in ("guard", "monitor", "callbacks"):
        for name, callback in cfg[group].items():
            if class_of(callback) in _TIED:
                yield f"{group}.{name} {ending}; type {_TIED[class_of(callback)]}{instead}"
    if cfg.trainer.max_time is not None:
        yield f"trainer.max_time={cfg.trainer.max_time} {ending}; type max_steps or max_epochs"
    if cfg.trainer.sync_batchnorm:
        yield (
            f"trainer.sync_batchnorm=true {ending}; leave it out: statistics are averaged where ranks meet (before a "
            "validation, a save and the end of an epoch)"
        )
    if cfg.trainer.loss_weighting == "tokens":
        yield f"trainer.loss_weighting=tokens {ending}; type trainer.loss_weighting=micro_batch"
