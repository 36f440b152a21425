"""What servers cannot do in a run, seen when it begins: its module, optimizers and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from trainwright.strategies.contract.same_model import varying_buffers
from trainwright.strategies.parameter_server.options import ParameterServerOptions, learning_rate_warning
from trainwright.strategies.parameter_server.refusals import needs_interface, rank_problems
from trainwright.strategies.parameter_server.server.shard import refuse_unserved


def setup_problems(trainer: Trainer, options: ParameterServerOptions, alone: str | None) -> Iterator[str]:
    """What of a run servers cannot do, each with what to type instead.

    Args:
        trainer: of the run.
        options: of the strategy.
        alone: the option by which ranks step by themselves; ``None``: they step together.
    """
    module = trainer.lightning_module
    if not options.serving_ranks:
        yield from rank_problems(options.servers, trainer.world_size)
    if not module.automatic_optimization:
        yield (
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), but servers have to know "
            "where a step ends; use automatic optimization, or strategy=ddp"
        )
    if trainer.num_nodes > 1 and options.interface is None:
        yield needs_interface(trainer.num_nodes)
    if alone is None:
        return
    ending = f"which ties ranks together at every step, but with {alone} they step by themselves"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if getattr(callback, "needs_collective_steps", False) or isinstance(callback, Timer):
            yield f"the callback {type(callback).__name__}, {ending}; leave it out, or use consistency=sync"
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        yield f"sync_batchnorm=True, {ending}; leave it out: statistics are averaged where ranks meet"


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that servers cannot step.

    Raises:
        ValueError: with what to use instead.
    """
    for optimizer in optimizers:
        refuse_unserved(optimizer)
    if len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers made {len(optimizers)} optimizers; servers step one, with as many "
            "parameter groups as you like. Put the parameters into groups of one, or use strategy=ddp."
        )


def refuse_other_optimizers(digests: Sequence[int]) -> None:
    """Refuse ranks that train their parameters otherwise than the first, by the digests of all ranks' plans."""
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"Rank(s) {', '.join(map(str, other))} optimize otherwise than rank 0, so servers cannot step what "
            "they push: the optimizer, its groups or their options differ. Build the same one on every rank."
        )


def warn_of_learning_rates(options: ParameterServerOptions, workers: int, optimizers: Sequence[Optimizer]) -> None:
    """Say what to consider where workers step by themselves."""
    if options.consistency != "sync" and workers > 1 and not options.scale_by_staleness:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rank_zero_warn(learning_rate_warning(options.consistency, workers, groups))


def say_what_varies(module: nn.Module) -> None:
    """Say that running statistics are averaged where ranks meet alone."""
    if varying := varying_buffers(module):
        rank_zero_info(
            f"Statistics such as {varying[0]} differ from rank to rank while training; they are averaged where all "
            "ranks meet: before a validation, a save and the end of an epoch."
        )
