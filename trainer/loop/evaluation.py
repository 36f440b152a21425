"""Evaluation that counts each sample once, and prediction in sample order, on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torchmetrics import Metric

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.lightning_internals import _EvaluationLoop, _PredictionLoop
from trainwright.core.run.peers import peers_of
from trainwright.strategies.contract.collectives.data import metric_states, set_metric_states
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.trainer.data.reading import weigher_of
from trainwright.trainer.loop.results import LeanResults


class ExactEvaluationLoop(_EvaluationLoop):
    """Lightning's evaluation loop, in which padding batches have no effect."""

    _results: LeanResults

    def __init__(
        self, trainer: Trainer, trainer_fn: TrainerFn, stage: RunningStage, verbose: bool, inference_mode: bool
    ) -> None:
        super().__init__(trainer, trainer_fn, stage, verbose=verbose, inference_mode=inference_mode)
        self._results = LeanResults(training=False)
        self._random_state: dict[str, Tensor] = {}

    def run(self) -> Any:
        """Evaluate on all batches."""
        if self._is_within_training:
            self._random_state = random_state(self.trainer.strategy.root_device)
        return super().run()

    @property
    def _is_within_training(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if batch_idx == dataloader_idx == 0:
            peers_of(self.trainer.strategy).share()  # after hooks, which may exchange weights for averages
        if dataloader_iter is None and _is_padding(self._combined_loader, batch_idx, dataloader_idx):
            with _preserve_state(self.trainer.lightning_module), self._results.padding():
                self._run_padding(batch, batch_idx, dataloader_idx)
        else:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        if _must_stop(self.trainer, dataloader_iter) and not self.batch_progress.is_last_batch:
            self._stop()

    def _stop(self) -> None:
        trainer: Any = self.trainer
        if self._is_within_training:
            # Saved is the state before this validation, which a resumed run repeats.
            trainer.fit_loop.epoch_loop.leave_validation()
            set_random_state(self._random_state, trainer.strategy.root_device)
        trainer._signal_connector.end()

    def _run_padding(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Run the step for its collectives only, without hooks of callbacks."""
        trainer = self.trainer
        several = self._is_sequential and self.num_dataloaders > 1
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        kwargs = self._build_kwargs(batch, batch_idx, dataloader_idx if several else None)
        self.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch, dataloader_idx if several else None)
        self.batch_progress.increment_started()
        hook = "test_step" if trainer.testing else "validation_step"
        call._call_strategy_hook(trainer, hook, *self._build_step_args_from_hook_kwargs(kwargs, hook))
        self.batch_progress.increment_processed()
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()


class OrderedPredictionLoop(_PredictionLoop):
    """Lightning's prediction loop; every rank returns the predictions of all ranks in sample order.

    A ``BasePredictionWriter`` writes each sample once: on the first of the ranks that share it, and no padding.
    """

    _others: list[Any] | None = None  # callbacks except prediction writers, if there are any

    def on_run_start(self) -> None:
        """Find the prediction writers."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
        self._others = [callback for callback in callbacks if callback not in writers] if writers else None
        super().on_run_start()

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        padding = dataloader_iter is None and _is_padding(self._combined_loader, batch_idx, dataloader_idx)
        with self._writing(padding):
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        if padding:
            kept = self._predictions[dataloader_idx]
            if len(kept) > batch_idx:
                kept.pop()
        progress: Any = self.batch_progress
        if _must_stop(self.trainer, dataloader_iter) and not progress.is_last_batch:
            signals: Any = self.trainer._signal_connector
            signals.end()

    @contextmanager
    def _writing(self, padding: bool = False) -> Iterator[None]:
        """Disable prediction writers for padding, and on all but the first rank that shares a sample."""
        trainer: Any = self.trainer
        if self._others is None:
            yield
            return
        ranks, callbacks = ranks_of(trainer.strategy), trainer.callbacks
        if padding or not ranks.leads_data_rank:
            trainer.callbacks = self._others
        try:
            with ranks.among_data_ranks():
                yield
        finally:
            trainer.callbacks = callbacks

    def _on_predict_epoch_end(self) -> Any:
        with self._writing():
            predictions = super()._on_predict_epoch_end()
        ranks, ours = ranks_of(self.trainer.strategy), hasattr(self.trainer.strategy, "ranks")
        if predictions is None or not ours or ranks.num_data_ranks == 1:
            return predictions
        several = self.num_dataloaders > 1
        group = ranks.data_group  # ranks along other axes predict for the same samples
        gathered = all_gather_values(
            predictions if several else [predictions], group, self.trainer.strategy.root_device
        )
        merged = [self._merge(batches, index) for index, batches in enumerate(zip(*gathered, strict=True))]
        return merged if several else merged[0]

    def _merge(self, by_rank: tuple[list[Any], ...], dataloader_idx: int) -> list[Any]:
        assert self._combined_loader is not None
        loader = weigher_of(self._combined_loader.flattened[dataloader_idx])
        if loader is None or not getattr(loader, "is_dealt", True):
            # Not dealt here: ranks have no common order.
            return [batch for batches in by_rank for batch in batches]
        waves = max(map(len, by_rank))
        return [batches[wave] for wave in range(waves) for batches in by_rank if wave < len(batches)]


def _must_stop(trainer: Any, dataloader_iter: Any) -> bool:
    """Return whether the ranks have agreed to end, after a batch."""
    # Ranks agree only with our loaders, under which all have equally many batches.
    even = dataloader_iter is None and hasattr(trainer.strategy, "ranks")
    return bool(trainer._signal_connector.passed(fits=False, even=even))


def _is_padding(combined_loader: Any, batch_idx: int, dataloader_idx: int) -> bool:
    weigher = weigher_of(combined_loader.flattened[dataloader_idx])
    return weigher is not None and weigher.is_padding(batch_idx)


@contextmanager
def _preserve_state(module: LightningModule) -> Iterator[None]:
    """Restore what ``module`` collects in its torchmetrics and in lists, numbers and tensors that it holds."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    kept = [(copy.deepcopy(metric_states(metric)), metric._computed) for metric in metrics]
    collected = {name: _copy_collected(value) for name, value in vars(module).items() if not name.startswith("_")}
    try:
        yield
    finally:
        for metric, (states, computed) in zip(metrics, kept, strict=True):
            set_metric_states(metric, states)
            metric._computed = computed
        for name, value in collected.items():
            if value is not None:
                vars(module)[name] = _restore_collected(vars(module).get(name), value)


def _copy_collected(value: Any) -> Any:
    """Return a copy of a value collected step by step, containers included; ``None`` for anything else."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, int, float):
        return copy.copy(value)
    if isinstance(value, dict):
        return {key: _copy_collected(item) for key, item in value.items()}
    return None


def _restore_collected(value: Any, before: Any) -> Any:
    """Return ``before``; a list or dictionary stays the same object."""
    if isinstance(value, list) and isinstance(before, list):
        value[:] = before
        return value
    if isinstance(value, dict) and isinstance(before, dict):
        for key in value.keys() - before.keys():
            del value[key]
        value.update({k: _restore_collected(value.get(k), item) for k, item in before.items() if item is not None})
        return value
    return before
