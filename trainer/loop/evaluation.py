"""Evaluation on the batches of one process, and prediction in sample order, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.lightning_internals import _EvaluationLoop, _Loop, _PredictionLoop
from trainwright.core.run.peers import peers_of
from trainwright.core.run.traits import traits_of
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.plan.module_state import ModuleState
from trainwright.trainer.data.data_order import DealingSampler
from trainwright.trainer.data.even import EvenLoader
from trainwright.trainer.data.reading import weigher_of
from trainwright.trainer.loop.collected_outputs import CollectedOutputs
from trainwright.trainer.loop.reloaded import made_in_epoch
from trainwright.trainer.loop.remembered_logs import match_logged
from trainwright.trainer.loop.results import LeanResults


class Turn(NamedTuple):
    """What this rank does with a batch.

    Args:
        number: index of the batch in one process.
        shown: index that user code sees.
        runs: whether the batch is this rank's.
        pads: whether it runs along without weight instead, as other ranks have a batch.
        ends: whether all ranks are at the same place afterwards.
        weight: factor of this rank's value in a mean over ranks that leaves out those that pad.
    """

    number: int
    shown: int
    runs: bool
    pads: bool
    ends: bool = True
    weight: float = 1.0


class DealtEvaluation:
    """The batches of an evaluation, of which data rank r of R runs r, r + R, ...

    User code sees the index that a batch has in one process; under strategies whose forward pass is a collective, that
    of the wave, so that all ranks take the same branches.

    Batches of loaders that are read side by side (a ``CombinedLoader`` in another mode than ``sequential``) are made as
    in one process: each rank reads all of them and skips those of others.

    Args:
        trainer: the Trainer.
        combined: the loaders.
        numbers: batches of each loader that one process would run; for loaders not dealt here, batches of each rank.

    Attributes:
        is_exact: whether each sample counts once, as loaders are read by us, on several data ranks.

    Raises:
        ValueError: if streams are read side by side with others on several data ranks.
    """

    def __init__(self, trainer: Any, combined: Any, numbers: list[int | float]) -> None:
        ranks, loaders = ranks_of(trainer.strategy), combined.flattened
        self.numbers = self._most = numbers
        self._rank, self._ranks, self._loaders = ranks.data_rank, ranks.num_data_ranks, loaders
        self._shows_waves = traits_of(trainer.strategy).forward_is_collective
        weighers = [weigher_of(loader) for loader in loaders]
        self.is_exact = self._ranks > 1 and any(each is not None for each in weighers)
        self._all_read = self.is_exact and combined._mode != "sequential"
        for weigher in weighers if self._all_read else ():
            if not isinstance(weigher, DealingSampler):
                raise ValueError(
                    f'Loaders are evaluated side by side (CombinedLoader in mode "{combined._mode}"), and one reads a '
                    f"stream, which cannot be dealt like that to {self._ranks} data ranks. Use mode "
                    '"sequential", or DataLoaders over map-style data sets.'
                )
            weigher.data_rank, weigher.data_ranks = 0, 1

    def _dealt_to(self, loader: int) -> int:
        """Return the number of ranks to which the batches of a loader are dealt; 1: each counts its own."""
        return self._ranks if self._all_read or getattr(weigher_of(self._loaders[loader]), "is_dealt", False) else 1

    def shown(self) -> list[int | float]:
        """Return the number of batches of each loader that user code sees."""
        return self._in_waves() if self._shows_waves else self.numbers

    def _in_waves(self) -> list[int | float]:
        # Infinity stays itself.
        return [-(-number // self._dealt_to(loader)) for loader, number in enumerate(self._most)]

    def limits(self, most: float) -> list[int | float]:
        """Return the batches to read from each loader, given the most of one process; streams are limited too."""
        self._most = [min(number, most) for number in self.numbers]
        for loader, number in zip(self._loaders, self._most, strict=True):
            if isinstance(loader, EvenLoader):
                loader.limit = None if math.isinf(number) else int(number)
        return self._most if self._all_read else self._in_waves()

    def turn(self, place: int, loader: int, is_last: bool) -> Turn:
        """Return what this rank does with the ``place``-th batch that it reads of a loader."""
        ranks = self._dealt_to(loader)
        if self._all_read:
            wave, owner = divmod(place, ranks)
            pads, ends = is_last and owner < self._rank, is_last or owner + 1 == ranks
            return Turn(place, wave if self._shows_waves else place, owner == self._rank, pads, ends)
        index = place * ranks + (self._rank if ranks > 1 else 0)
        weigher, number = weigher_of(self._loaders[loader]), self._most[loader]
        pads = index >= number or (weigher is not None and weigher.is_padding(place))
        weight = ranks / min(number - place * ranks, ranks) if ranks > 1 else 1.0
        return Turn(index, place if self._shows_waves else index, not pads, pads, weight=weight)


@contextmanager
def without_trace(trainer: Any) -> Iterator[None]:
    """Restore the module after a ``with`` block (buffers, metrics, lists, numbers), in which no callback is called."""
    module: LightningModule = trainer.lightning_module
    kept = ModuleState(module)
    try:
        with with_attributes(trainer, callbacks=[]):
            yield
    finally:
        kept.restore()


class _DealtLoop(_Loop):
    """Parts shared by loops on dealt batches."""

    _dealt: DealtEvaluation
    _collected: CollectedOutputs

    def on_run_start(self) -> None:
        """Call the hooks of the start."""
        super().on_run_start()  # type: ignore[misc]
        self._collected = CollectedOutputs(self.trainer, self._dealt.is_exact)

    def on_run_end(self) -> Any:
        """Call the hooks of the end."""
        with self._collected.whole():
            return super().on_run_end()  # type: ignore[misc]


class ExactEvaluationLoop(_DealtLoop, _EvaluationLoop):
    """Lightning's evaluation loop on the batches of one process; those that a rank runs along have no effect."""

    _results: LeanResults

    def __init__(
        self, trainer: Trainer, trainer_fn: TrainerFn, stage: RunningStage, verbose: bool, inference_mode: bool
    ) -> None:
        super().__init__(trainer, trainer_fn, stage, verbose=verbose, inference_mode=inference_mode)
        self._results = LeanResults(training=False)
        self._random_state: dict[str, Tensor] = {}
        self._reloaded: float | None = None  # as saved, the epoch at which loaders were last reloaded

    def run(self) -> Any:
        """Evaluate on all batches."""
        if self._is_within_training:
            self._random_state = random_state(self.trainer.strategy.root_device)
        return super().run()

    @property
    def _is_within_training(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def setup_data(self) -> None:
        """Set up the loaders, if that is due; after a resume as of their last reload."""
        before, reloaded, self._reloaded = self._max_batches, self._reloaded, None
        if reloaded not in (None, self._last_val_dl_reload_epoch):
            self._combined_loader, self._last_val_dl_reload_epoch = None, reloaded
            reloaded = None if self._should_reload_val_dl else reloaded
        with made_in_epoch(reloaded, self._data_source, self.trainer):
            super().setup_data()
        self._last_val_dl_reload_epoch = self._last_val_dl_reload_epoch if reloaded is None else reloaded
        if self._max_batches is not before:
            self._dealt = DealtEvaluation(self.trainer, self._combined_loader, self._max_batches)
            self._max_batches = self._dealt.shown()

    @property
    def reloaded(self) -> float | None:
        """Epoch in which the loaders of a fit were last made; ``None``: never."""
        return None if self._combined_loader is None else self._last_val_dl_reload_epoch

    @reloaded.setter
    def reloaded(self, epoch: float | None) -> None:
        self._reloaded = epoch

    def reset(self) -> None:
        """Start reading."""
        shown = self._max_batches
        self._max_batches = self._dealt.limits(
            self.trainer.num_sanity_val_steps if self.trainer.sanity_checking else float("inf")
        )
        super().reset()
        self._max_batches = shown

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if batch_idx == dataloader_idx == 0:
            peers_of(self.trainer.strategy).share()  # after hooks, which may exchange weights for averages
        if dataloader_iter is not None and self.num_dataloaders == 1:
            batch_idx = dataloader_iter.fetched  # of the batch that the step reads
        turn = self._dealt.turn(batch_idx, dataloader_idx, self.batch_progress.is_last_batch)
        if turn.runs:
            with self._results.weighted(turn.weight):
                super()._evaluation_step(batch, turn.shown, dataloader_idx, dataloader_iter)
            self._collected.note(dataloader_idx, turn.number)
        elif turn.pads:
            with without_trace(self.trainer), self._results.padding():
                super()._evaluation_step(batch, turn.shown, dataloader_idx, dataloader_iter)
        if turn.ends and _must_stop(self.trainer, dataloader_iter) and not self.batch_progress.is_last_batch:
            self._stop()

    def _stop(self) -> None:
        trainer: Any = self.trainer
        if self._is_within_training:
            # Saved is the state before this validation, which a resumed run repeats.
            trainer.fit_loop.epoch_loop.leave_validation()
            set_random_state(self._random_state, trainer.strategy.root_device)
        trainer._signal_connector.end()

    def _store_dataloader_outputs(self) -> None:
        if self._dealt.is_exact:
            trainer: Any = self.trainer
            gather = trainer.fit_loop.data_ranks.gather
            match_logged(self._results, gather, trainer.lightning_module, trainer.strategy.reduce)
        super()._store_dataloader_outputs()


class OrderedPredictionLoop(_DealtLoop, _PredictionLoop):
    """Lightning's prediction loop; every rank returns the predictions of all ranks in sample order.

    A ``BasePredictionWriter`` writes each sample once: on the first of the ranks that share it, and no padding.
    """

    _place = 0  # of the present batch among those that this rank reads of a loader

    def setup_data(self) -> None:
        """Set up the loaders."""
        super().setup_data()
        if self._combined_loader is not None:
            self._dealt = DealtEvaluation(self.trainer, self._combined_loader, self.max_batches)
            self.max_batches = self._dealt.shown()

    def reset(self) -> None:
        """Start reading."""
        shown, self.max_batches = self.max_batches, self._dealt.limits(float("inf"))
        super().reset()
        self.max_batches = shown

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if dataloader_iter is not None and self.num_dataloaders == 1:
            batch_idx = dataloader_iter.fetched  # of the batch that the step reads
        self._place = batch_idx
        turn = self._dealt.turn(batch_idx, dataloader_idx, False)
        kept = self._predictions[dataloader_idx]
        count = len(kept)
        with without_trace(self.trainer) if turn.pads else self._writing():
            super()._predict_step(batch, turn.shown, dataloader_idx, dataloader_iter)
        if turn.pads:
            del kept[count:]
        else:
            self._collected.note(dataloader_idx, turn.number)
        progress: Any = self.batch_progress
        if _must_stop(self.trainer, dataloader_iter) and not progress.is_last_batch:
            signals: Any = self.trainer._signal_connector
            signals.end()

    def _store_data_for_prediction_writer(self, batch_idx: int, dataloader_idx: int) -> bool:
        return bool(super()._store_data_for_prediction_writer(self._place, dataloader_idx))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Disable prediction writers on all but the first rank that shares a sample."""
        trainer: Any = self.trainer
        ranks, callbacks = ranks_of(trainer.strategy), trainer.callbacks
        others = [each for each in callbacks if not isinstance(each, BasePredictionWriter)]
        if len(others) == len(callbacks):
            yield
            return
        called = callbacks if ranks.leads_data_rank else others
        with with_attributes(trainer, callbacks=called), ranks.among_data_ranks():
            yield

    def _on_predict_epoch_end(self) -> Any:
        with self._writing():
            predictions = super()._on_predict_epoch_end()
        ranks, ours = ranks_of(self.trainer.strategy), hasattr(self.trainer.strategy, "ranks")
        if predictions is None or not ours or ranks.num_data_ranks == 1:
            return predictions
        group = ranks.data_group  # ranks along other axes predict for the same samples
        gathered = all_gather_values(self._predictions, group, self.trainer.strategy.root_device)
        merged = [self._merge(batches, index) for index, batches in enumerate(zip(*gathered, strict=True))]
        return merged if self.num_dataloaders > 1 else merged[0]

    def _merge(self, by_rank: tuple[list[Any], ...], dataloader_idx: int) -> list[Any]:
        assert self._combined_loader is not None
        loader = weigher_of(self._combined_loader.flattened[dataloader_idx])
        if loader is None or not loader.is_dealt:
            # Not dealt here: ranks have no common order.
            return [batch for batches in by_rank for batch in batches]
        waves = max(map(len, by_rank))
        return [batches[wave] for wave in range(waves) for batches in by_rank if wave < len(batches)]


def _must_stop(trainer: Any, dataloader_iter: Any) -> bool:
    """Return whether the ranks have agreed to end, after a batch."""
    # Ranks agree only with our loaders, under which all have equally many batches.
    even = dataloader_iter is None and hasattr(trainer.strategy, "ranks")
    return bool(trainer._signal_connector.passed(fits=False, even=even))
