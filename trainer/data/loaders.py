"""Loaders whose order of samples is set here: which they are, and copies of them with other batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainwright.core.lightning_internals import (
    _get_dataloader_init_args_and_kwargs,
    _IndexBatchSamplerWrapper,
    _reinstantiate_wrapped_cls,
)
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.trainer.data.data_order import RankBatchSampler
from trainwright.trainer.data.dealt_batches import DealtBatchSampler
from trainwright.trainer.data.epoch_order import EpochOrder

OrderedSampler = RankBatchSampler | DealtBatchSampler
# Users' loaders in single-process runs: what each read last in training, and those used for evaluation.
_IN_PLACE: WeakKeyDictionary[DataLoader[Any], OrderedSampler] = WeakKeyDictionary()
_KEPT: WeakSet[DataLoader[Any]] = WeakSet()
# Attributes of what a loader reads, and how.
_PLAIN = ("dataset", "_dataset_kind", "collate_fn", "batch_size", "drop_last", "sampler", "batch_sampler")
_OWN = ("batch_sampler", "sampler", "worker_init_fn", "_iterator")


def ordered_sampler(loader: object) -> OrderedSampler | None:
    """Return the sampler of ours that ``loader`` uses, if any."""
    sampler = index_batches(loader)
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler = sampler._batch_sampler
    if isinstance(sampler, RankBatchSampler | DealtBatchSampler):
        return sampler
    return _IN_PLACE.get(loader) if isinstance(loader, DataLoader) else None  # restored after training


def index_batches(loader: Any) -> Any:
    """Return what yields the indices that ``loader`` reads at a time: with ``batch_size=None`` its sampler."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None) if batches is None else batches


def keep_for_evaluation(loader: DataLoader[Any]) -> bool:
    """Return whether the user's own loader can evaluate as it is: in a single process, in the order of the data set,
    and not read by training.
    """
    stays = type(loader.batch_sampler) is BatchSampler and isinstance(batches_of(loader)[0], SequentialSampler)
    if stays and loader not in _IN_PLACE:
        _KEPT.add(loader)
        return True
    return False


def read_in_place(loader: DataLoader[Any], batches: OrderedSampler) -> Callable[[], None] | None:
    """Let the user's own loader read ``batches`` in single-process training.

    Returns:
        A function that restores it; ``None`` if that is impossible, as it has a state or is used for evaluation.
    """
    if loader in _KEPT or hasattr(loader, "state_dict"):
        return None
    own = {name: loader.__dict__.get(name) for name in _OWN}
    slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
    loader.__dict__.update({slot: batches, "_iterator": None})
    _IN_PLACE[loader] = batches

    def restore() -> None:
        for name in ("state_dict", "load_state_dict"):
            loader.__dict__.pop(name, None)
        loader.__dict__.update(own)

    return restore


def can_order(loader: object) -> bool:
    """Return whether ``loader`` reads a map-style data set whose order is set here.

    False for a loader with a ``DistributedSampler``, or over an ``IterableDataset``.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
        and not isinstance(getattr(index_batches(loader), "sampler", None), DistributedSampler)
    )


def has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Return whether ``loader`` cuts batches of one size, without a batch sampler of the user's."""
    return isinstance(index_batches(loader), RankBatchSampler) or type(index_batches(loader)) is BatchSampler


def batches_of(loader: DataLoader[Any]) -> tuple[Iterable[int], bool]:
    """Return the sampler of plain batches, and whether an incomplete last batch is left out.

    The loader's own sampler is unused if it was given a ``BatchSampler``.
    """
    batches = index_batches(loader)
    sampler = batches.sampler
    return sampler.sampler if isinstance(sampler, EpochOrder) else sampler, bool(batches.drop_last)


def replace_batches(loader: DataLoader[Any], batches: OrderedSampler, stage: RunningStage) -> DataLoader[Any]:
    """Return a copy of ``loader`` (of its own class, with its own arguments) that reads ``batches``."""
    if loader.batch_sampler is None:
        return rebuild(loader, sampler=batches, batch_sampler=None, batch_size=None, shuffle=False, drop_last=False)
    wrapped = _IndexBatchSamplerWrapper(batches) if stage == RunningStage.PREDICTING else batches
    return rebuild(loader, batch_sampler=wrapped, batch_size=1, shuffle=False, sampler=None, drop_last=False)


def rebuild(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of ``loader``, of its own class and with its own arguments except for ``changes``.

    If the class does not keep its arguments, the copy is shallow.
    """
    # Lightning would insist on rebuilding a user's batch sampler around another sampler; we replace it as a whole.
    try:
        with with_attributes(loader, batch_sampler=BatchSampler(SequentialSampler(range(1)), 1, False)):
            args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    except MisconfigurationException:
        return _shallow_copy(loader, changes)
    # Positional arguments by name: a positional batch_size would contradict batch_sampler.
    kwargs = {**dict(zip(getattr(loader, "__pl_saved_arg_names", ()), args, strict=False)), **kwargs, **changes}
    return _reinstantiate_wrapped_cls(loader, **kwargs)  # type: ignore[no-any-return]


def _shallow_copy(loader: DataLoader[Any], changes: dict[str, Any]) -> DataLoader[Any]:
    """Return a copy with other attributes, those that a plain ``DataLoader`` has with these arguments."""
    plain = DataLoader(**{"dataset": loader.dataset, "collate_fn": loader.collate_fn, **changes})
    made = copy.copy(loader)
    vars(made).update({name: vars(plain)[name] for name in _PLAIN}, _iterator=None)
    return made
