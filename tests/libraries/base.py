"""Rows of libraries: a module that a library defines, trained, validated, predicted and loaded.

A file ``tests/libraries/<library>.py`` imports the library and holds ``ROWS``:

    ROWS = [
        *rows_of("MPNN", mpnn, molecules),
        *rows_of("a module that only trains", other, molecules, predicts=False, loads=None),
    ]

Data is generated, small and has no randomness of its own; modules have no dropout. A library on
``pytorch_lightning`` is imported after ``import tests.libraries.alias``, and its rows have
``package="pytorch_lightning"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from tests.zoo.cells import DATA_RANKS, Row, tensors_of

LAYOUTS = ("single", "ddp", "zero2", "zero3", "tensor", "pipeline")
SHUFFLED = ", shuffled"
# ``make_loader(batch_size, shuffled)``.
MakeLoader = Callable[[int, bool], Any]


def order(samples: Any, shuffled: bool) -> Sampler[int]:
    """Return a sampler for a data set; its first epoch is the same under Lightning's Trainer and ours."""
    if not shuffled:
        return SequentialSampler(samples)
    return RandomSampler(samples, generator=torch.Generator().manual_seed(0))


def rows_of(
    name: str,
    make_module: Callable[[], Any],
    make_loader: MakeLoader,
    *,
    hybrid: str = "tensor x shard",
    validates: bool = True,
    predicts: bool = True,
    loads: Callable[[], Mapping[str, Any]] | None = dict,
    batch_norm: bool = False,
    **fields: Any,
) -> list[Row]:
    """Return the rows of a module: on all layouts, and shuffled on two of them.

    Args:
        name: of the module's class.
        make_module: builds it, under a fixed seed.
        make_loader: ``make_loader(batch_size, shuffled)`` builds a loader, whose sampler is of :func:`order`.
        hybrid: the layout of two axes to try.
        validates, predicts: whether the module has such a step; ``predict`` needs a ``forward`` at least.
        loads: returns keyword arguments of ``load_from_checkpoint``; ``None``: that is not called.
        batch_norm: whether it has statistics of a batch, which several data ranks take together with
            ``sync_batchnorm``.
        fields: of :class:`tests.zoo.cells.Row`.
    """
    batch = fields.get("batch", 8)
    observe = partial(_observed, make_loader, batch, validates, predicts, loads)
    given: dict[str, Any] = {"observe": observe, **fields}
    if batch_norm:
        given["trainers"] = {layout: {"sync_batchnorm": True} for layout, ranks in DATA_RANKS.items() if ranks > 1}
    make = partial(_loaders, make_loader, batch, validates)
    return [
        Row(name, make_module, partial(make, False), equal=", ".join((*LAYOUTS, hybrid)), **given),
        Row(f"{name}{SHUFFLED}", make_module, partial(make, True), equal="ddp, zero3", **given),
    ]


def _loaders(make_loader: MakeLoader, whole: int, validates: bool, shuffled: bool, batch: int) -> tuple[Any, ...]:
    train = make_loader(batch, shuffled)
    return (train, make_loader(whole, False)) if validates else (train,)


def _observed(
    make_loader: MakeLoader,
    batch: int,
    validates: bool,
    predicts: bool,
    loads: Callable[[], Mapping[str, Any]] | None,
    trainer: pl.Trainer,
    module: pl.LightningModule,
) -> dict[str, Any]:
    """Return what the trained module gives: validation metrics, predictions, and tensors of the loaded module."""
    found: dict[str, Any] = {}
    if validates:
        for metrics in trainer.validate(module, make_loader(batch, False), verbose=False):
            found |= {f"validation {key}": value for key, value in metrics.items()}
    if predicts:
        made = trainer.predict(module, make_loader(batch, False))
        found["predictions"] = torch.cat([each.detach().double().flatten() for each in _tensors(made)])
    if loads is not None:
        trainer.save_checkpoint("trained.ckpt")
        loaded = type(module).load_from_checkpoint("trained.ckpt", map_location="cpu", **loads())
        found |= {f"loaded {name}": tensor for name, tensor in tensors_of(trainer, loaded, None).items()}
    return found


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
