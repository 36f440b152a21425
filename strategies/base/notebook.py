"""Forked ranks for notebooks, which have no script to start processes from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.read.run_state import RunState, materialised
from trainwright.core.lightning_internals import _MultiProcessingLauncher, _WorkerOutput
from trainwright.core.run.hooks import refuse_missing_hooks
from trainwright.core.text.messages import token_environment
from trainwright.strategies.plan.deferred import is_deferred

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for sharded modules.

    After ``fit``, ranks write their weights and progress to a temporary checkpoint, which the notebook's module and
    Trainer load. Optimizer states stay in the ranks.

    Args:
        strategy: whose ranks to start, all on this machine.

    Raises:
        MisconfigurationException: if there are several nodes.
    """

    def __init__(self, strategy: Any) -> None:
        if strategy.num_nodes > 1:
            raise MisconfigurationException(
                f"Trainer(num_nodes={strategy.num_nodes}) in a notebook: ranks are forks of this process, so all are "
                "on this machine. Set num_nodes=1, or start a script on every node."
            )
        super().__init__(strategy, start_method="fork")
        self._folder = ""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Fork the ranks, call ``function`` in each, and return rank 0's result."""
        refuse_missing_hooks(trainer)
        # A port, which a launch adds to the environment, belongs to this launch.
        with TemporaryDirectory(prefix="trainwright-") as self._folder, patch.dict(os.environ, token_environment()):
            return super().launch(partial(_single_threaded, function), *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        strategy = self._strategy
        path = None
        if trainer.state.fn == TrainerFn.FITTING:
            path = str(Path(self._folder, "weights"))
            state = {
                "state_dict": strategy.lightning_module_state_dict(),
                "global_step": trainer.global_step,
                "progress": {k: v for k, v in trainer.fit_loop.state_dict().items() if not k.endswith("state_dict")},
                "saved": [each.state_dict() for each in trainer.checkpoint_callbacks],
            }
            strategy.save_checkpoint(state, path)
        if strategy.local_rank != 0:
            return None
        return _WorkerOutput(None, path, trainer.state, results, self.get_extra_results(trainer))

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        if worker_output.weights_path is not None:
            _load(trainer, materialised(RunState.open(str(worker_output.weights_path)).tree))
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Write the metrics of rank 0 to a file: the queue blocks a rank that sends more than a pipe holds."""
        metrics = {name: move_data_to_device(getattr(trainer, name), "cpu") for name in _METRICS}
        Path(self._folder, "metrics").write_bytes(pack(metrics))
        return {}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Read what :meth:`get_extra_results` has written."""
        for name, values in unpack(Path(self._folder, "metrics").read_bytes()).items():
            getattr(trainer, name).update(values)


def fork_in_notebook(strategy: Any, launcher: Any) -> Any:
    """Return ``launcher``, or a :class:`ForkLauncher` if it does not support this interactive process."""
    if not accelerator_connector._IS_INTERACTIVE or launcher is None or launcher.is_interactive_compatible:
        return launcher
    return launcher if strategy.cluster_environment.creates_processes_externally else ForkLauncher(strategy)


def weights_of_ended_ranks(strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a notebook can save of a checkpoint: all but optimizers and schedulers, which ended with the ranks.

    Returns:
        ``None`` in a rank, and if no ranks were forked.
    """
    if not isinstance(strategy.launcher, ForkLauncher) or dist.is_initialized():
        return None
    rank_zero_warn(
        "The ranks have ended, and their optimizer states with them: this checkpoint holds the weights, and cannot be "
        "resumed. To resume training, pass a checkpoint that the ranks have saved: fit(ckpt_path='last')."
    )
    return {key: value for key, value in checkpoint.items() if key not in ("optimizer_states", "lr_schedulers")}


def _load(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    module: Any = trainer.lightning_module
    module.trainer = trainer
    if is_overridden("configure_model", module):  # so far called only in the ranks
        module.configure_model()
    # Not strict, as in Lightning: training may have added or removed submodules.
    module.load_state_dict(state["state_dict"], strict=False, assign=is_deferred(module))
    trainer.fit_loop.load_state_dict(state["progress"])
    for callback, saved in zip(trainer.checkpoint_callbacks, state["saved"], strict=True):
        if hasattr(callback, "take_over"):
            callback.take_over(saved)
        else:
            vars(callback).update({"dirpath": saved["dirpath"]} if "dirpath" in saved else {})  # found by the ranks
            callback.load_state_dict(saved)


def _single_threaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # OpenMP threads do not survive a fork: a parallel region in the child would hang.
    torch.set_num_threads(1)
    return function(*args, **kwargs)
