"""The loader of a stream on one data rank, with the sample counts of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from trainwright.trainer.data.data_order import Resumed
from trainwright.trainer.data.loaders import rebuild
from trainwright.trainer.data.wrapped_loader import WrappedLoader


class Tag(NamedTuple):
    """Sample counts that weight a micro-batch.

    Args:
        own: samples of this rank.
        wave: samples of all ranks in the wave.
        step: samples of all ranks in the optimizer step.
    """

    own: int
    wave: int
    step: int


class _CollateTagged:
    """Collates the samples of a micro-batch, and keeps what comes with them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, tagged: tuple[list[Any], Any]) -> tuple[Any, list[Any]]:
        samples, tag = tagged
        return self._collate(samples) if samples else None, list(tag)


class TaggedLoader(WrappedLoader):
    """A loader whose micro-batches are weighted by their tags.

    Attributes:
        data_ranks: number of ranks.
    """

    # At most two steps are read ahead; the loop needs those of the present one too.
    _REMEMBERED = 8
    regular_waves = 0  # unknown in advance
    data_ranks: int
    _tags: dict[int, Tag]

    def _tag(self, index: int, tag: Tag, waves: int) -> None:
        """Remember the tag of the ``index``-th batch of the epoch, given the waves of a step."""
        self._tags[index] = tag
        self._tags.pop(index - waves - self._REMEMBERED, None)

    def is_padding(self, batch_idx: int) -> bool:
        """Return whether this rank has no sample of its own in the ``batch_idx``-th batch of the epoch."""
        return self._tags[batch_idx].own == 0

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """See :meth:`trainwright.trainer.data.data_order.RankBatchSampler.loss_divisor`."""
        tag = self._tags[batch_idx]
        if tag.own == 0:
            return float("inf")
        return (tag.step if whole_step else tag.wave * accumulation) / (tag.own * self.data_ranks)


class StreamLoader(TaggedLoader):
    """The micro-batches of one data rank, weighted by the samples of all ranks.

    Args:
        loader: the user's loader over the stream.
        batches: yields micro-batches instead, each a list of samples and what is kept beside them.
        data_ranks: number of ranks.
        group: waves per optimizer step; 1 if undefined, 0 outside of training.
    """

    whole_step = False  # only if a global batch is set, as for data of known length
    is_dealt = True

    def __init__(self, loader: DataLoader[Any], batches: IterableDataset[Any], data_ranks: int, group: int) -> None:
        unbatched = {"batch_size": None, "batch_sampler": None, "sampler": None, "shuffle": False, "drop_last": False}
        super().__init__(rebuild(loader, dataset=batches, collate_fn=_CollateTagged(loader.collate_fn), **unbatched))
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.data_ranks = data_ranks
        self.group = max(group, 1)
        self.epoch = 0
        self.sampler = self  # Lightning finds set_epoch by this name
        self._resumed: Resumed | None = None
        self._tags = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    @property
    def _of_this_epoch(self) -> Resumed:
        resumed = self._resumed
        return resumed if resumed is not None and resumed.epoch == self.epoch else Resumed(self.epoch, 0, 0)

    @property
    def first_batch(self) -> int:
        """Index in the epoch of the first batch read now."""
        return self._of_this_epoch.first_batch

    def resume(self, resumed: Resumed) -> None:
        """Resume within an epoch at its next iteration."""
        self._resumed = resumed

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        for index, (batch, tag, read) in enumerate(self._tagged(), start=self.first_batch):
            self._tag(index, tag, self.group)
            self._remember(index, read)
            yield batch

    def _begin(self) -> None:
        self._tags = {}

    def _tagged(self) -> Iterator[tuple[Any, Tag, Any]]:
        """Yield micro-batches, each with its tag and what :meth:`_remember` needs."""
        raise NotImplementedError

    def _remember(self, index: int, read: Any) -> None:
        """Remember what was read for the ``index``-th batch of the epoch, and drop what is no longer needed."""
        raise NotImplementedError

    def position(self, batches: int) -> dict[str, Any]:
        """Return what has been read after so many batches of the epoch."""
        raise NotImplementedError
