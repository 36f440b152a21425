"""Options of ``strategy=parameter_server``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainwright.core.config.options import class_of, number, word
from trainwright.strategies.averaging.compression.options import (
    ONLY_OF_AVERAGES,
    choose_compression,
    compression_problems,
)
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions
from trainwright.strategies.parameter_server.problems import needs_closure, needs_interface, rank_problems

INCARNATION = "TRAINWRIGHT_INCARNATION"
"""Environment variable: how often a rank was restarted, where lost ranks are restarted individually."""

# Default of staleness with ssp.
_STALENESS = 3
# Compressors with a codec for single messages.
CODECS = ("fp16", "bf16", "int8", "topk", "onebit")
# Treatment of samples leased by a dead worker; none: samples are dealt in equal shares.
LEASES = ("none", "at_least_once", "at_most_once")
# Placement of servers: on ranks that train, or on dedicated ranks.
BESIDE, OWN = "beside", "own"
# Callbacks with collectives in every step, and what to type to disable them.
_TIED = {"LossGuard": "guard=none", "ReplicaCheck": "monitor=default", "Stragglers": "monitor=default"}


@dataclass
class ParameterServerOptions(StrategyOptions):
    """`strategy=parameter_server`: servers hold parameters and optimizer, workers push gradients and pull."""

    _target_: str = "trainwright.strategies.parameter_server.strategy.ParameterServerStrategy"
    # Synchronization of workers: sync (all make each step together, equal to ddp), ssp (a worker may be some steps
    # ahead of the slowest) or async (workers wait only at the end of an epoch, a validation and a save).
    consistency: str = word("sync", "sync", "ssp", "async")
    # Steps that a worker may be ahead of the slowest, with consistency=ssp (null = 3); unused otherwise.
    staleness: int | None = number(None, least=1, unit="steps; consistency=sync is 0", null="for strategy.staleness=3")
    # Number of servers that share the parameters.
    servers: int = number(1, least=1)
    # Placement of servers: beside = in the first ranks, which also train; own = on the last ranks, which only serve, so
    # that devices - servers ranks train.
    server_ranks: str = word(BESIDE, BESIDE, OWN)
    # Strength of the correction of late gradients (DC-ASGD); 0 = off.
    delay_compensation: float = number(0.0, unit="0 is off")
    # Divide learning rates by the staleness of a gradient; false = off.
    scale_by_staleness: bool = False
    # Compressor of pushed gradients: a name like topk, or its name and options; null = as set by the group compression.
    compression: Any = None
    # Network interface of the servers, like eth0; null = the loopback address, for one machine.
    interface: str | None = None
    # With consistency=async, let workers lease samples, so that fast ones read more: at_least_once or at_most_once
    # (those of a dead worker are read again, or lost); none = off, equal shares.
    leases: str = word("none", *LEASES)
    # Overlap pushes with backward, and pulls with the next forward; false = off.
    overlap: bool = True

    takes_sparse_gradients = True

    # ---- facts ----------------------------------------------------------------------------------------------------

    @property
    def bound(self) -> int | None:
        """Steps that a worker may be ahead of the slowest; ``None``: unbounded."""
        of_ssp = _STALENESS if self.staleness is None else self.staleness
        return {"sync": 0, "ssp": of_ssp}.get(self.consistency)

    @property
    def serving_ranks(self) -> int:
        """See the base class."""
        return self.servers if self.server_ranks == OWN else 0

    @property
    def averages_every_step(self) -> bool:
        """See the base class."""
        return self.consistency == "sync"

    def replaceable_ranks(self, devices: int) -> tuple[int, ...]:
        """Return the ranks whose state is held elsewhere, too.

        The first rank provides the state of the run to replacements, beside a server or not.
        """
        own = self.serving_ranks
        return tuple(range(1, devices - own) if own else range(self.servers, devices))

    # ---- values ---------------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        if self.consistency in ("sync", "async") and self.staleness is not None:
            given = f"strategy.staleness={self.staleness} with strategy.consistency={self.consistency}"
            yield f"{given}: it applies to strategy.consistency=ssp only; leave it out"
        never_late = "with strategy.consistency=sync: gradients are never late with it; leave it out"
        if self.delay_compensation and self.consistency == "sync":
            yield f"strategy.delay_compensation={self.delay_compensation} {never_late}"
        if self.scale_by_staleness and self.consistency == "sync":
            yield f"strategy.scale_by_staleness=true {never_late}"
        yield from self._lease_problems()
        yield from push_problems(self.compression)

    def _lease_problems(self) -> Iterator[str]:
        if self.leases not in LEASES[1:] or self.consistency not in ("sync", "ssp"):
            return
        why = "all workers make each step together, so none can read more than another"
        if self.consistency == "ssp":
            why = (
                "the bound is on steps, and each chunk is a step, so in an epoch no worker could read over "
                f"strategy.staleness={self.bound} chunks more than the slowest"
            )
        yield (
            f"strategy.leases={self.leases} with strategy.consistency={self.consistency}: {why}; type "
            "strategy.consistency=async, or leave it out"
        )

    # ---- beside ---------------------------------------------------------------------------------------------------

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        cfg = run.cfg
        if run.world_size is not None and not list(self.problems()):
            yield from rank_problems(self.servers, run.world_size, own=self.server_ranks == OWN)
        if class_of(cfg.optimizer) == "LBFGS":
            yield needs_closure("LBFGS")
        if cfg.nodes > 1 and self.interface is None:
            yield needs_interface(cfg.nodes)
        for key, _, callback in run.parts("monitor", "callbacks"):
            if callback == "Norms":
                yield f"{key}: only parameter servers see averaged gradients; type monitor=default, or {key}=null"
        if cfg.launch.recovery == "replicas":
            yield (
                "launch.recovery=replicas with strategy=parameter_server: the state of a lost rank's server has no "
                "copy; type launch.recovery=rejoin with launch.max_restarts=3"
            )
        yield from self._independent_problems(run)
        if self.leases in LEASES[1:]:
            yield from self._lease_run_problems(run)

    def _independent_problems(self, run: PlannedRun) -> Iterator[str]:
        """Yield problems of components with collectives in steps, if ranks step independently."""
        cfg, instead = run.cfg, ", or strategy.consistency=sync"
        if self.consistency == "sync":
            if run.verb != "fit" or not run.replaceable_ranks(self):
                return
            why, instead = f"launch.recovery={cfg.launch.recovery}", ", or launch.recovery=restart"
        else:
            why = f"strategy.consistency={self.consistency}"
        ending = f"with {why}: it needs collectives in steps, but ranks step independently"
        for key, _, callback in run.parts("guard", "monitor", "callbacks"):
            if callback in _TIED:
                yield f"{key} {ending}; type {_TIED[callback]}{instead}"
        if cfg.trainer.max_time is not None:
            yield f"trainer.max_time={cfg.trainer.max_time} {ending}; type max_steps or max_epochs"
        if cfg.trainer.sync_batchnorm:
            yield f"trainer.sync_batchnorm=true {ending}; leave it out: statistics are averaged when ranks meet"
        if cfg.trainer.loss_weighting == "tokens":
            yield f"trainer.loss_weighting=tokens {ending}; type trainer.loss_weighting=micro_batch"

    def _lease_run_problems(self, run: PlannedRun) -> Iterator[str]:
        ending, trainer = f"with strategy.leases={self.leases}", run.cfg.trainer
        interval, limit = trainer.val_check_interval, trainer.limit_train_batches
        if interval is not None and (isinstance(interval, int) or interval != 1.0):
            yield (
                f"trainer.val_check_interval={interval} {ending}: workers synchronize at the end of an epoch only; "
                "type trainer.val_check_interval=1.0"
            )
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            yield f"trainer.limit_train_batches={limit} {ending}: type a whole number of micro-batches per worker"
        if trainer.data_partition != "interleave":
            yield (
                f"trainer.data_partition={trainer.data_partition} {ending}: leases assign samples to ranks; type "
                "trainer.data_partition=interleave"
            )
        if trainer.uneven_steps:
            yield (
                f"trainer.uneven_steps=true {ending}: a chunk is a step of one worker; type trainer.uneven_steps=false"
            )
        for key, node, _ in run.parts("checkpoint"):
            every = node.get("every_n_steps") if hasattr(node, "get") else None
            if every is not None:
                yield f"{key}.every_n_steps={every} {ending}: step counts are unequal; type {key}.every_n_epochs=1"


def push_problems(compression: Any) -> list[str]:
    """Return the problems of a compression of pushes.

    Args:
        compression: a name, a mapping of ``name`` and options, or ``None``.
    """
    found = compression_problems(compression)
    choice = None if found else choose_compression(compression)
    if choice is None:
        return found
    if choice.name in CODECS:
        return [
            f"compression.{key}={choice.options[key]} with parameter servers: pushes are gradients, compressed from "
            "the first one on; leave it out"
            for key in ONLY_OF_AVERAGES
            if key in choice.options
        ]
    return [
        f"compression={choice.name} with parameter servers: it only averages over a group of ranks; pushes to a server "
        f"can be compressed by {', '.join(CODECS)}, or none; type compression=int8"
    ]
