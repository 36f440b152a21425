"""Checks of module, optimizers and callbacks when a run with parameter servers begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from trainwright.strategies.base.optimizer_probe import study
from trainwright.strategies.contract.same_model import varying_buffers
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.problems import needs_interface, rank_problems
from trainwright.strategies.parameter_server.server.shard import refuse_unserved


def setup_problems(trainer: Trainer, options: ParameterServerOptions, alone: str | None) -> Iterator[str]:
    """Yield what parameter servers do not support in a run, with what to type instead.

    Args:
        trainer: of the run.
        options: of the strategy.
        alone: option that makes ranks step independently; ``None``: they step together.
    """
    module = trainer.lightning_module
    if not options.serving_ranks:
        yield from rank_problems(options.servers, trainer.world_size)
    if not module.automatic_optimization:
        yield (
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), but servers must know where a "
            "step ends; use automatic optimization, or strategy=ddp"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            yield (
                f"the callback {type(callback).__name__} adds parameter groups during training, but servers step those "
                "of its start; use strategy=ddp"
            )
    if trainer.num_nodes > 1 and options.interface is None:
        yield needs_interface(trainer.num_nodes)
    if alone is None:
        return
    ending = f"which needs collectives in every step, but with {alone} ranks step independently"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if getattr(callback, "needs_collective_steps", False) or isinstance(callback, Timer):
            yield f"the callback {type(callback).__name__}, {ending}; leave it out, or use consistency=sync"
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        yield f"sync_batchnorm=True, {ending}; leave it out: statistics are averaged when ranks meet"


def refuse_optimizers(optimizers: Sequence[Optimizer], servers: int) -> None:
    """Raise for optimizers that servers cannot step.

    Raises:
        ValueError: with what to use instead.
    """
    for optimizer in optimizers:
        refuse_unserved(optimizer)
        refuse_coupled(optimizer, "Type strategy.servers=1" if servers > 1 else "")
    if len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers made {len(optimizers)} optimizers; servers step one optimizer, with any number of "
            "parameter groups. Put the parameters into groups of one, or use strategy=ddp."
        )


def refuse_coupled(optimizer: Optimizer, remedy: str) -> None:
    """Raise for an optimizer that servers with some of its parameters cannot step as it would step all.

    Args:
        optimizer: of the user.
        remedy: what to type for one that uses several parameters at once; empty: one server has them all.

    Raises:
        ValueError: with what to use instead.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    behaviour = study(optimizer, lambda parameter: parameter.shape)
    if behaviour.problem is not None:
        raise ValueError(f"{behaviour.problem}, so servers cannot make its steps. Type strategy=ddp.")
    if behaviour.counted:
        raise ValueError(
            f"{type(optimizer).__name__} changes its own option {behaviour.counted[0]!r} in a step, which servers "
            "make, while they take options from the workers, where schedulers change them. Keep it in "
            "optimizer.state[parameter], or type strategy=ddp."
        )
    if behaviour.joint is not None and remedy:
        raise ValueError(f"{behaviour.joint}, but servers have some of them. {remedy}.")


def refuse_other_optimizers(digests: Sequence[int]) -> None:
    """Raise if ranks have different optimizers, by the digests of their plans."""
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"The optimizer of rank(s) {', '.join(map(str, other))} differs from that of rank 0 (its class, groups or "
            "options), so servers cannot step what they push. Build the same one on every rank."
        )


def warn_of_learning_rates(options: ParameterServerOptions, workers: int, optimizers: Sequence[Optimizer]) -> None:
    """Warn about learning rates where workers step independently."""
    if options.consistency == "sync" or workers == 1 or options.scale_by_staleness:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rate = max((float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups), default=0.0)
    momentum = max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)
    lower = f", and lower momentum={momentum:g}, which every worker feeds" if momentum else ""
    rank_zero_warn(
        f"consistency={options.consistency}: {workers} workers make {workers} steps, each from a smaller batch, where "
        "synchronous workers make one, so training with a learning rate chosen for those may diverge. Divide "
        f"lr={rate:g} by about {workers} (optimizer.lr={rate / workers:.2g}) unless you did{lower}; or type "
        "strategy.consistency=sync."
    )


def log_varying_statistics(module: nn.Module) -> None:
    """Log that running statistics are averaged only when ranks meet."""
    if varying := varying_buffers(module):
        rank_zero_info(
            f"Statistics such as {varying[0]} differ between ranks during training; they are averaged when all ranks "
            "meet: before a validation, a save and the end of an epoch."
        )
