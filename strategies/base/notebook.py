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
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainwright.checkpoint.read.run_state import RunState, materialised
from trainwright.core.lightning_internals import _MultiProcessingLauncher, _WorkerOutput
from trainwright.core.run.hooks import refuse_missing_hooks
from trainwright.core.text.messages import token_environment
from trainwright.strategies.plan.deferred import is_deferred


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for sharded modules.

    After ``fit``, ranks write their weights to a temporary checkpoint, which the notebook's module loads.

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
            weights = {"state_dict": strategy.lightning_module_state_dict(), "global_step": trainer.global_step}
            strategy.save_checkpoint(weights, path)
        if strategy.local_rank != 0:
            return None
        saved: Any = [
            each.state_dict() if hasattr(each, "take_over") else getattr(each, "best_model_path", None)
            for each in trainer.checkpoint_callbacks
        ]
        return _WorkerOutput(saved, path, trainer.state, results, self.get_extra_results(trainer))

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        if worker_output.weights_path is not None:
            _load(trainer.lightning_module, materialised(RunState.open(str(worker_output.weights_path)).tree))
        saved: Any = worker_output.best_model_path
        for callback, of_rank in zip(trainer.checkpoint_callbacks, saved, strict=True):
            if hasattr(callback, "take_over"):
                callback.take_over(of_rank)
            elif of_rank is not None:
                callback.best_model_path = of_rank  # type: ignore[attr-defined]
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)


def fork_in_notebook(strategy: Any, launcher: Any) -> Any:
    """Return ``launcher``, or a :class:`ForkLauncher` if it does not support this interactive process."""
    if not accelerator_connector._IS_INTERACTIVE or launcher is None or launcher.is_interactive_compatible:
        return launcher
    return launcher if strategy.cluster_environment.creates_processes_externally else ForkLauncher(strategy)


def _load(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    if is_overridden("configure_model", module):  # so far called only in the ranks
        module.configure_model()
    # Not strict, as in Lightning: training may have added or removed submodules.
    module.load_state_dict(checkpoint["state_dict"], strict=False, assign=is_deferred(module))


def _single_threaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # OpenMP threads do not survive a fork: a parallel region in the child would hang.
    torch.set_num_threads(1)
    return function(*args, **kwargs)
