"""Rows of libraries: a module that a library defines, trained, validated, predicted and loaded.

A file ``tests/libraries/<library>.py`` imports the library and holds ``ROWS``:

    ROWS = [
        *rows_of("MPNN", mpnn, molecules),
        *rows_of("a module that only trains", other, molecules, predicts=False, loads=None),
    ]

Data is generated, small and has no randomness of its own; dropout is turned off. A library on
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
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from tests.zoo.cells import DATA_RANKS, Row, tensors_of

LAYOUTS = ("single", "ddp", "zero2", "zero3", "tensor", "pipeline")
# Ends of the names of rows that are shuffled, or saved and loaded.
SHUFFLED, LOADED = ", shuffled", ", loaded"
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
    """Return the rows of a module: trained, validated and predicted on all layouts, shuffled on two, loaded on two.

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
    batch, make_module = fields.get("batch", 8), partial(_without_dropout, make_module)
    make = partial(_loaders, make_loader, batch, validates)
    given: dict[str, Any] = {"observe": partial(_observed, make_loader, batch, validates, predicts), **fields}
    if batch_norm:
        given["trainers"] = {layout: {"sync_batchnorm": True} for layout, ranks in DATA_RANKS.items() if ranks > 1}
    found = [
        Row(name, make_module, partial(make, False), equal=", ".join((*LAYOUTS, hybrid)), **given),
        Row(f"{name}{SHUFFLED}", make_module, partial(make, True), equal="ddp, zero3", **given),
    ]
    if loads is not None:
        given |= {"observe": partial(_reloaded, loads), "late": True}
        found.append(Row(f"{name}{LOADED}", make_module, partial(make, False), equal="single, zero3", **given))
    return found


def _without_dropout(make_module: Callable[[], Any]) -> Any:
    """Build a module that draws nothing; some have rates of dropout that cannot be given."""
    module = make_module()
    for part in module.modules():
        # Layers of dropout, attention and recurrent layers, and stochastic depth.
        for name in ("p",) if isinstance(part, _DropoutNd) else ("dropout", "drop_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def _loaders(make_loader: MakeLoader, whole: int, validates: bool, shuffled: bool, batch: int) -> tuple[Any, ...]:
    train = make_loader(batch, shuffled)
    return (train, make_loader(whole, False)) if validates else (train,)


def _observed(
    make_loader: MakeLoader,
    batch: int,
    validates: bool,
    predicts: bool,
    trainer: pl.Trainer,
    module: pl.LightningModule,
) -> dict[str, Any]:
    """Return the trained module's validation metrics and predictions."""
    found: dict[str, Any] = {}
    if validates:
        for metrics in trainer.validate(module, make_loader(batch, False), verbose=False):
            found |= {f"validation {key}": value for key, value in metrics.items()}
    if predicts:
        made = trainer.predict(module, make_loader(batch, False))
        found["predictions"] = torch.cat([each.detach().double().flatten() for each in _tensors(made)])
    return found


def _reloaded(
    loads: Callable[[], Mapping[str, Any]], trainer: pl.Trainer, module: pl.LightningModule
) -> dict[str, Any]:
    """Return the tensors of the module that is loaded from a checkpoint of the trained one."""
    trainer.save_checkpoint("trained.ckpt")
    loaded = type(module).load_from_checkpoint("trained.ckpt", map_location="cpu", **loads())
    return dict(tensors_of(trainer, loaded, None))


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
