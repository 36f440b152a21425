"""A fit in which one rank fails in one hook."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer, world_size
from tests.parity.modules import Tokens, make_module
from tests.parity.test_resume_watched import Points
from trainwright import RunStateCheckpoint
from trainwright.callbacks.end.preemption import Preemption

# What a fit calls of a module. (`configure_callbacks` and the loaders are asked before ranks meet, as hooks are.)
_OF_MODULE = """
    configure_callbacks prepare_data setup configure_model configure_optimizers train_dataloader val_dataloader
    on_fit_start on_train_start on_train_epoch_start on_before_batch_transfer transfer_batch_to_device
    on_after_batch_transfer on_train_batch_start training_step on_before_zero_grad optimizer_zero_grad
    on_before_backward backward on_after_backward on_before_optimizer_step configure_gradient_clipping
    optimizer_step lr_scheduler_step on_train_batch_end on_validation_model_zero_grad on_validation_model_eval
    on_validation_start on_validation_epoch_start on_validation_batch_start validation_step on_validation_batch_end
    on_validation_epoch_end on_validation_end on_validation_model_train on_save_checkpoint on_train_epoch_end
    on_train_end on_fit_end teardown
"""
OF_MODULE = tuple(_OF_MODULE.split())

# What a fit calls of a callback.
_OF_CALLBACK = """
    setup on_fit_start on_sanity_check_start on_sanity_check_end on_train_start on_train_epoch_start
    on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    on_train_batch_end on_validation_start on_validation_epoch_start on_validation_batch_start
    on_validation_batch_end on_validation_epoch_end on_validation_end on_save_checkpoint state_dict
    on_train_epoch_end on_train_end on_fit_end teardown
"""
OF_CALLBACK = tuple(_OF_CALLBACK.split())
# Options of a Trainer that calls all of them.
_ALL_HOOKS: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0}
_ALL_HOOKS |= {"enable_checkpointing": True}


class Model(pl.LightningModule):
    """Brings its own loaders, a scheduler and everything else that makes a fit call all its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Points(8, 0), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Points(4, 1), batch_size=2)


class Boom(Exception):
    """Error of the failing rank."""


def make_failing(target: Any, hook: str) -> None:
    """Let a hook of a module or a callback raise on one rank."""
    original = getattr(target, hook)
    rank = 0 if hook == "prepare_data" else world_size() - 1  # which is for the first rank of a node alone

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            raise Boom(f"in {hook}")
        return original(*args, **kwargs)

    fail.__name__ = hook
    # On the class: Lightning asks it which hooks are overridden.
    setattr(type(target), hook, lambda self, *args, **kwargs: fail(*args, **kwargs))


def end_of_fit(strategy: str, options: dict[str, Any], of: str, hook: str, folder: str) -> str:
    """How a fit ends on this rank: "finished", or the error's name and text."""
    plain = strategy == "ddp"
    module: Any = type("Failing", (Model,), {})() if plain else make_module("decoder-adamw")
    data = () if plain else (DataLoader(Tokens(8), batch_size=2),)
    callback = type("FailingCallback", (pl.Callback,), {})()
    make_failing(module if of == "module" else callback, hook)
    callbacks = [callback, RunStateCheckpoint(folder, every_n_steps=1), Preemption(check_seconds=1e-6)]
    trainer = make_trainer(strategy, options, callbacks=callbacks, **_ALL_HOOKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(module, *data)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "finished"


def hooks_of_a_fit(folder: str) -> dict[str, set[str]]:
    """Names of all hooks that a fit calls of a module and of a callback."""
    called: dict[str, set[str]] = {"module": set(), "callback": set()}
    hooks = {"module": (ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule), "callback": (pl.Callback,)}
    targets: dict[str, Any] = {
        "module": type("Heard", (Model,), {}),
        "callback": type("HeardCallback", (pl.Callback,), {}),
    }
    for of, target in targets.items():
        for name in {name for base in hooks[of] for name, value in vars(base).items() if callable(value)}:
            if not name.startswith("_") and name not in _NO_HOOKS[of]:
                _hear(target, name, called[of])
    callbacks = [targets["callback"](), RunStateCheckpoint(folder, every_n_steps=1)]
    trainer = make_trainer("ddp", callbacks=callbacks, **_ALL_HOOKS)
    trainer.fit(targets["module"]())
    return called


# What Lightning, or the module itself, calls for other reasons than to let the user do something.
_NO_HOOKS: dict[str, frozenset[str]] = {
    "module": frozenset(vars(torch.nn.Module))
    | {"log", "log_dict", "optimizers", "lr_schedulers", "all_gather", "toggle_optimizer", "clip_gradients", "print"}
    | {"configure_sharded_model"},  # deprecated
    "callback": frozenset(),
}


def _hear(target: type, name: str, called: set[str]) -> None:
    original = getattr(target, name)

    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.add(name)
        return original(self, *args, **kwargs)

    setattr(target, name, heard)  # not by functools.wraps, which Lightning looks through
