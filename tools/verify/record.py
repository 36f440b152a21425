"""Recorder of a verified run; the ranks write one folder per run.

run.json            of rank 0: global batch, disabled dropout, order of execution
rank_<n>.json       loss and sample hashes of every step on rank n
gradients_<k>.bin   whole gradients of the k-th optimizer step (from 1), before clipping; .json has the offsets
parameters_<k>.bin  whole parameters after k optimizer steps, 0: initial
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from trainwright.core.torch_internals import _DropoutNd

_DROPOUT_NAMES = ("dropout", "drop_prob", "drop_path")


class Recorder(Callback):
    """Callback that disables dropout and records every optimizer step.

    Reading whole gradients and parameters is one collective per tensor; rank 0 streams them to disk, so at most one is
    in memory in addition to the run's own.

    Args:
        folder: to write to; created if missing. All ranks must be on one machine.
        watch_execution: record the order of first execution of modules, and the parameters stepped by each optimizer.
            For the one-process run, which leaves modules and optimizers as the user wrote them.
    """

    def __init__(self, folder: str, watch_execution: bool = False) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._watches = watch_execution
        self._execution: list[str] = []
        self._handles: list[Any] = []
        self._dropout: list[str] = []
        self._stepped: dict[int, list[str]] = {}
        self._steps = 0
        self._seen = 0
        self._micro_losses: list[float] = []
        self._micro_samples: list[list[str]] = []
        self._losses: list[float | None] = []
        self._samples: list[list[list[str]]] = []

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Disable dropout and TF32 before the strategy takes the module."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._dropout += disable_dropout(pl_module)

    def on_fit_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Disable dropout in modules built by ``configure_model``."""
        self._dropout += disable_dropout(pl_module)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the initial parameters.

        Raises:
            TypeError: if the strategy has no whole gradients.
        """
        strategy = trainer.strategy
        if not hasattr(strategy, "whole_gradients"):
            raise TypeError(
                f"{type(strategy).__name__} has no whole_gradients(), from which verify reads gradients under any "
                "layout. Use a strategy of trainwright, or a subclass of LayoutStrategy."
            )
        for config in strategy.lr_scheduler_configs:
            config.strict = False  # no validation runs that could log a scheduler's metric
        self._seen = trainer.global_step
        if self._watches:
            self._watch(pl_module)
        self._write_tensors(trainer, "parameters", 0)

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hash the samples, except for padding batches."""
        is_padding = getattr(trainer.fit_loop.epoch_loop, "_is_padding", None)
        if is_padding is None or not is_padding(batch_idx):
            self._micro_samples.append(hash_samples(batch))

    def on_before_optimizer_step(
        self, trainer: LightningTrainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Write the gradients."""
        self._steps += 1
        if self._watches and len(trainer.optimizers) > 1:
            # Gradients of other optimizers' parameters are stale or missing, depending on the strategy.
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._stepped[self._steps] = [name for name, p in pl_module.named_parameters() if id(p) in stepped]
        self._write_tensors(trainer, "gradients", self._steps)

    def on_train_batch_end(
        self, trainer: LightningTrainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of the micro-batch; after the last one of a step, write the parameters."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._micro_losses.append(float(loss.detach()))
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self._unwatch()
        weights = getattr(trainer, "token_weights", None)
        if weights is not None and weights.step_loss is not None:
            self._micro_losses = [float(weights.step_loss)]  # exact, and the same on every rank
        self._losses.append(sum(self._micro_losses) if self._micro_losses else None)
        self._samples.append(self._micro_samples)
        self._micro_losses, self._micro_samples = [], []
        self._write_tensors(trainer, "parameters", self._steps)

    def on_train_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the JSON files."""
        strategy: Any = trainer.strategy
        rank = {"data_rank": strategy.ranks.data_rank, "losses": self._losses, "samples": self._samples}
        _write_json(self._folder / f"rank_{trainer.global_rank}.json", rank)
        if not trainer.is_global_zero:
            return
        batch = getattr(trainer, "global_batch", None)
        run = {
            "micro_batch_size": getattr(batch, "micro_batch_size", None),
            "accumulation": getattr(batch, "accumulation", None),
            "data_ranks": strategy.ranks.num_data_ranks,
            "layout": {axis: size for axis, size in asdict(strategy.layout).items() if size != 1},
            "automatic_optimization": pl_module.automatic_optimization,
            "dropout": self._dropout,
            "execution": self._execution,
            "stepped": self._stepped,
            "steps": self._steps,
        }
        _write_json(self._folder / "run.json", run)

    def _watch(self, module: nn.Module) -> None:
        for name, child in module.named_modules():
            if child._parameters:
                self._handles.append(child.register_forward_pre_hook(partial(self._note, name)))

    def _note(self, name: str, *_: Any) -> None:
        if name not in self._execution:
            self._execution.append(name)

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _write_tensors(self, trainer: LightningTrainer, kind: str, number: int) -> None:
        strategy: Any = trainer.strategy
        named = strategy.whole_gradients() if kind == "gradients" else strategy.whole_parameters()
        if trainer.is_global_zero:
            write_tensors(self._folder / f"{kind}_{number}", named)
        else:
            for _ in named:
                pass


def write_tensors(path: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors consecutively to ``path.bin``, and their offsets to ``path.json``.

    Args:
        path: without suffix.
        named: name and tensor; float64 is kept, other numbers become float32.
    """
    index: dict[str, Any] = {}
    with path.with_suffix(".bin").open("wb") as file:
        for name, tensor in named:
            tensor = tensor.detach().cpu()
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            values = tensor.contiguous() if tensor.dtype == torch.float64 else tensor.float().contiguous()
            kind = "float64" if values.dtype == torch.float64 else "float32"
            index[name] = {"offset": file.tell(), "dtype": kind, "shape": list(values.shape)}
            values.numpy().tofile(file)
    _write_json(path.with_suffix(".json"), index)


def disable_dropout(module: nn.Module) -> list[str]:
    """Set the probability of every dropout in ``module`` to 0, since masks depend on the rank.

    Affects ``p`` of torch's dropout modules, and number attributes with ``dropout``, ``drop_prob`` or ``drop_path`` in
    their names.

    Returns:
        ``module.attribute`` of each that was not 0.
    """
    changed = []
    for name, child in module.named_modules():
        for attribute, value in list(vars(child).items()):
            by_name = any(word in attribute.lower() for word in _DROPOUT_NAMES)
            if not (by_name or (attribute == "p" and isinstance(child, _DropoutNd))):
                continue
            if isinstance(value, float | int) and not isinstance(value, bool) and value != 0:
                setattr(child, attribute, 0.0)
                changed.append(f"{name}.{attribute}" if name else attribute)
    return changed


def hash_samples(batch: Any) -> list[str]:
    """Return a hash of every sample of a batch, from the bytes of its tensors.

    The number of samples is the first dim of the first tensor with dims. Tensors with another first dim, and other
    values, are ignored.

    Returns:
        One short text per sample; empty for a batch without tensors.
    """
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append, allow_frozen=True)
    tensors = [tensor.detach() for tensor in found if tensor.dim() > 0]
    samples = tensors[0].shape[0] if tensors else 0
    if samples == 0:
        return []
    rows = [_bytes(tensor) for tensor in tensors if tensor.shape[0] == samples]
    hashes = []
    for number in range(samples):
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            digest.update(row[number].numpy().tobytes())
        hashes.append(digest.hexdigest())
    return hashes


def _bytes(tensor: Tensor) -> Tensor:
    """Return bytes on the CPU, (samples, bytes per sample)."""
    flat = tensor.cpu().contiguous().reshape(tensor.shape[0], -1)
    return flat.view(torch.uint8) if flat.shape[1] else flat.new_zeros(flat.shape, dtype=torch.uint8)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
