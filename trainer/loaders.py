"""Loaders whose order of samples is ours: which they are, and copies of them that read other batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, _reinstantiate_wrapped_cls
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainwright.trainer.data_order import RankBatchSampler
from trainwright.trainer.dealt_batches import DealtBatchSampler

OrderedSampler = RankBatchSampler | DealtBatchSampler


def ordered_sampler(loader: object) -> OrderedSampler | None:
    """Our sampler that ``loader`` uses, if any."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler = sampler._batch_sampler
    return sampler if isinstance(sampler, RankBatchSampler | DealtBatchSampler) else None


def can_order(loader: object) -> bool:
    """Whether ``loader`` reads a map-style data set whose order we decide.

    A loader with a ``DistributedSampler`` of its own, without batches, or over an ``IterableDataset`` stays as it is.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and not isinstance(loader.sampler, DistributedSampler)
        and not isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler)
    )


def has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Whether ``loader`` cuts batches of one size, not by a batch sampler of the user's own."""
    return type(loader.batch_sampler) is BatchSampler or isinstance(loader.batch_sampler, RankBatchSampler)


def replace_batches(loader: DataLoader[Any], batches: OrderedSampler, stage: RunningStage) -> DataLoader[Any]:
    """A copy of ``loader`` (of its own class, with its own arguments) that reads ``batches``."""
    wrapped = _IndexBatchSamplerWrapper(batches) if stage == RunningStage.PREDICTING else batches
    return rebuild(loader, batch_sampler=wrapped, batch_size=1, shuffle=False, sampler=None, drop_last=False)


def rebuild(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of ``loader``, of its own class and with its own arguments but for ``changes``."""
    held = loader.__dict__["batch_sampler"]
    # Lightning would insist on rebuilding a user's batch sampler around another sampler; we replace it as a whole.
    loader.__dict__["batch_sampler"] = BatchSampler(SequentialSampler(range(1)), 1, False)
    try:
        args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    finally:
        loader.__dict__["batch_sampler"] = held
    # Positional arguments by name: a positional batch_size would contradict batch_sampler.
    kwargs = {**dict(zip(getattr(loader, "__pl_saved_arg_names", ()), args, strict=False)), **kwargs, **changes}
    return _reinstantiate_wrapped_cls(loader, **kwargs)  # type: ignore[no-any-return]
