"""Loaders whose length nobody knows, kept in step over ranks.

An ``IterableDataset`` may give one rank more batches than another. The rank that runs out first would leave the others
waiting in their next collective for ever. So each rank fetches one batch ahead, and all tell each other whether they
have it, while the step before still runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.trainer.wrapped_loader import WrappedLoader


class EvenLoader(WrappedLoader):
    """Gives every rank the same number of batches of a loader of unknown length.

    Args:
        loader: this rank's loader.
        group: a gloo group of all ranks, apart from those that train, so that its messages overlap with theirs.
        pad: at the end, ``False`` stops all ranks when the first has run out and says how much is left unread;
            ``True`` goes on until the last has run out, and the others repeat their last batch as padding.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, pad: bool) -> None:
        super().__init__(loader)
        self._group = group
        self._pad = pad
        self._real = float("inf")

    def is_padding(self, batch_idx: int) -> bool:
        """Whether the ``batch_idx``-th batch of the current pass is a repetition."""
        return batch_idx >= self._real

    def __iter__(self) -> Iterator[Any]:
        self._real = float("inf")
        batches = iter(self.loader)
        batch, has = self._fetch(batches)
        if not has and self._pad:
            self._refuse_empty()
        count = 0
        last = batch
        work, flags = self._ask(has)
        while True:
            work.wait()
            if (not flags[0].item()) if not self._pad else (not flags[1].item()):
                break
            if not has and self._real == float("inf"):
                self._real = count
            current = batch if has else last
            last = current
            count += 1
            batch, has = self._fetch(batches) if has else (None, False)
            work, flags = self._ask(has)
            yield current
        if not self._pad and flags[1].item():
            rank_zero_warn(
                f"The epoch ended after {count} batches because one rank's IterableDataset ran out of data while "
                "another still had some, which stays unread. Give all ranks the same number of batches to use it all."
            )

    @staticmethod
    def _fetch(batches: Iterator[Any]) -> tuple[Any, bool]:
        try:
            return next(batches), True
        except StopIteration:
            return None, False

    def _ask(self, has: bool) -> tuple[Any, torch.Tensor]:
        """Begin to learn whether all ranks, and whether any rank, has a next batch: MIN of ``(has, -has)``."""
        flags = torch.tensor([int(has), -int(has)])
        return dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._group, async_op=True), flags

    def _refuse_empty(self) -> None:
        raise RuntimeError(
            "The IterableDataset of this rank gave no batch at all, so it has nothing to keep in step with. "
            "Give every rank at least one batch."
        )
