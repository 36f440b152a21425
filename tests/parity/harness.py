"""Parity of ``trainwright.Trainer`` under a strategy with a bare PyTorch loop on one process.

Both give a :class:`Record`: the loss of every optimizer step, the gradients that the last step saw, and all parameters
after it, by name, as whole tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, default_collate

from tests.parity.modules import Tokens, make_module

TOLERANCE = 1e-5
CLIPPING: dict[str, dict[str, Any]] = {
    "off": {},
    "norm": {"gradient_clip_val": 0.2, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "norm-1": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"},
}


@dataclass(frozen=True)
class Case:
    """A training run, the same for the reference and every strategy.

    Args:
        module: name in :data:`tests.parity.modules.MODULES`.
        clipping: name in :data:`CLIPPING`.
        accumulation: micro-batches of one optimizer step on each data rank.
        global_batch_size: samples per optimizer step.
        steps: optimizer steps.
        samples: samples of the data set; one epoch may end with a smaller step.
    """

    module: str = "decoder-sgd"
    clipping: str = "off"
    accumulation: int = 1
    global_batch_size: int = 12
    steps: int = 3
    samples: int = 48


@dataclass
class Record:
    """Results of a run."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor on the CPU; a collective for a DTensor."""
    if isinstance(tensor, DTensor):
        from trainwright.strategies.state.wholes import whole_tensor

        return whole_tensor(tensor)
    return tensor.detach().cpu().clone()


# ---- The reference --------------------------------------------------------------------------------------------------


@cache
def bare_loop(case: Case) -> Record:
    """Return the record of a bare loop; cached, so callers must not change it."""
    module, data = make_module(case.module), Tokens(case.samples)
    return train_bare(module, data, case.global_batch_size, case.steps, **CLIPPING[case.clipping])


def global_batches(data: Any, size: int, steps: int) -> Iterator[Any]:
    """Yield the batch of each step of an unshuffled run; the last one of an epoch may be smaller."""
    for step in range(steps):
        first = step % -(-len(data) // size) * size
        yield default_collate([data[i] for i in range(first, min(first + size, len(data)))])


def train_bare(
    module: pl.LightningModule,
    data: Any,
    batch_size: int,
    steps: int,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
) -> Record:
    """Train in a bare loop, one batch per optimizer step."""
    record, made = Record(), module.configure_optimizers()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]
    optimizer: Any = made["optimizer"] if isinstance(made, dict) else made
    for step, batch in enumerate(global_batches(data, batch_size, steps)):
        optimizer.zero_grad()
        output: Any = module.training_step(batch, step)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        record.losses.append(loss.item())
        record.gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        if gradient_clip_val is not None and gradient_clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(module.parameters(), gradient_clip_val)
        elif gradient_clip_val is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), gradient_clip_val)
        optimizer.step()
        if isinstance(made, dict):
            made["lr_scheduler"]["scheduler"].step()
    record.parameters = {name: whole(p) for name, p in module.named_parameters()}
    return record


# ---- Under a strategy -----------------------------------------------------------------------------------------------


class Losses(pl.Callback):
    """Records the loss of each optimizer step, averaged over ranks."""

    def __init__(self) -> None:
        self.record = Record()
        self._parts: list[Tensor] = []
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self._parts.append(outputs["loss"].detach().float())
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            if not self._parts:
                return
            loss = torch.stack(self._parts).sum()
            if dist.is_initialized():
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            self.record.losses.append(loss.item())
            self._parts.clear()


class Recorder(Losses):
    """Fills a :class:`Record` from a callback."""

    looks_at_parameters = False  # where Trainers ask: between a step and the next forward

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.looks_at(trainer):
            self.record.gradients = {n: whole(g) for n, g in trainer.strategy.named_gradients()}

    @staticmethod
    def looks_at(trainer: pl.Trainer) -> bool:
        """Return whether this step may be the last; gathering gradients takes half of a step, so only its are kept."""
        if trainer.max_steps != -1:
            return trainer.global_step + 1 >= trainer.max_steps
        left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_idx
        return trainer.current_epoch + 1 == trainer.max_epochs and left <= 2 * trainer.accumulate_grad_batches

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.parameters = {n: whole(p) for n, p in pl_module.named_parameters()}


# Strategies that need a plan of the module: see test_layouts.py.
CUTTING = ("hybrid", "tensor", "pipeline", "context", "expert")
# Ranks never have the averaged gradient of a step, which a Record holds: see tests/strategies/parameter_server.
AVERAGED_ELSEWHERE = ("parameter_server",)
# Replicas differ between synchronizations: see tests/strategies/local_updates.
DIFFERING = ("local_sgd", "diloco")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def data_parallel_names() -> tuple[str, ...]:
    """Return the strategies that work with any module and compute what one process computes."""
    from trainwright.strategies.contract.registry import strategy_names

    return tuple(name for name in strategy_names() if name not in (*CUTTING, *AVERAGED_ELSEWHERE, *DIFFERING))


def make_loader(samples: int, batch_size: int, **options: Any) -> DataLoader:
    """Return a loader over :class:`Tokens`."""
    return DataLoader(Tokens(samples), batch_size=batch_size, **options)


def world_size() -> int:
    """Return the number of ranks of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def make_trainer(
    strategy: str, options: dict[str, Any] | None = None, kind: type[pl.Trainer] | None = None, **trainer_options: Any
) -> Any:
    """Return a Trainer on the default process group that writes nothing and has no certificate.

    Args:
        strategy, options: name and options of the strategy.
        kind: class of the Trainer; ``None`` is ours.
        trainer_options: its options.
    """
    from trainwright.strategies.contract.registry import make_strategy
    from trainwright.trainer.trainer import Trainer

    built = make_strategy(strategy, **{"certificate": "off", **(options or {})})
    return (kind or Trainer)(strategy=built, devices=world_size(), **{**QUIET, **trainer_options})


class Saver(Checkpoint):
    """Saves once: in the first hook ``batch``, ``validation`` or ``epoch`` after so many optimizer steps."""

    def __init__(self, path: str, hook: str, after: int) -> None:
        self.path, self.hook, self.after, self.has_saved = path, hook, after, False

    def _save_in(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        if hook == self.hook and trainer.global_step >= self.after and not (self.has_saved or trainer.sanity_checking):
            self.has_saved = True
            self.save(trainer, module)

    def save(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._save_in("batch", trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save_in("validation", trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save_in("epoch", trainer, pl_module)


def train(case: Case, strategy: str, options: dict[str, Any], **trainer_options: Any) -> Record:
    """Train ``case`` with ``trainwright.Trainer`` on the ranks of the default process group."""
    recorder = Recorder()
    trainer = make_trainer(
        strategy,
        options,
        global_batch_size=case.global_batch_size,
        max_steps=case.steps,
        callbacks=[recorder],
        **CLIPPING[case.clipping],
        **trainer_options,
    )
    micro_batch_size = case.global_batch_size // (world_size() * case.accumulation)
    trainer.fit(make_module(case.module), make_loader(case.samples, micro_batch_size))
    return recorder.record


def train_with_lightning(case: Case, strategy: str, options: dict[str, Any]) -> Record:
    """Train as :func:`train` does, with Lightning's own Trainer and a loader that selects the samples of a rank."""
    recorder = Recorder()
    trainer = make_trainer(
        strategy,
        options,
        pl.Trainer,
        accumulate_grad_batches=case.accumulation,
        use_distributed_sampler=False,
        max_steps=case.steps,
        callbacks=[recorder],
        **CLIPPING[case.clipping],
    )
    micro_batch_size = case.global_batch_size // (world_size() * case.accumulation)
    rank = dist.get_rank() if dist.is_initialized() else 0
    starts = range(rank * micro_batch_size, case.samples, world_size() * micro_batch_size)
    batches = [list(range(start, start + micro_batch_size)) for start in starts]
    trainer.fit(make_module(case.module), DataLoader(Tokens(case.samples), batch_sampler=batches))
    return recorder.record


# ---- Comparing ------------------------------------------------------------------------------------------------------


def differences(record: Record, reference: Record, tolerance: float = TOLERANCE) -> list[str]:
    """Describe what differs by more than ``tolerance``, relative to a loss or the norm of a gradient or parameter."""
    found = []
    if len(record.losses) != len(reference.losses):
        found.append(f"{len(record.losses)} losses instead of {len(reference.losses)}")
    for step, (ours, theirs) in enumerate(zip(record.losses, reference.losses, strict=False)):
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            found.append(f"loss of step {step}: {ours!r} instead of {theirs!r}")
    for kind in ("gradients", "parameters"):
        found += _tensor_differences(kind, getattr(record, kind), getattr(reference, kind), tolerance)
    return found


def _tensor_differences(kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"{kind}: missing {sorted(theirs.keys() - ours.keys())}, extra {sorted(ours.keys() - theirs.keys())}"]
    found = []
    for name, expected in theirs.items():
        distance, norm = (ours[name] - expected).norm().item(), expected.norm().item()
        if not distance <= tolerance * norm:
            found.append(f"{kind} {name}: off by {distance:.3e} of norm {norm:.3e} (relative {distance / norm:.1e})")
    return found
