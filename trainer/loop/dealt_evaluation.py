"""Which batches of an evaluation a data rank runs: those of one process, dealt whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from trainwright.core.run.traits import traits_of
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.strategies.plan.module_state import ModuleState
from trainwright.trainer.data.data_order import DealingSampler
from trainwright.trainer.data.even import EvenLoader
from trainwright.trainer.data.reading import weigher_of


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
