"""A program of the fuzzer: one component per slot, which :mod:`tests.fuzz.draw` draws and this module puts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

from tests.fuzz import data, losses, modules, networks, pieces

# Samples of a global batch.
GLOBAL_BATCH = 8

# Network -> (class, class of its blocks or None for its default).
NETWORKS: dict[str, tuple[Any, Any]] = {
    "mlp": (networks.Mlp, None),
    "scaled": (networks.Mlp, networks.ScaledBlock),
    "batch_norm": (networks.Mlp, networks.NormedBlock),
    "mixed": (networks.Mlp, networks.MixedBlock),
    "conv": (networks.ConvNet, None),
    "transformer": (networks.Sequence, None),
    "tied": (networks.TiedLanguageModel, None),
    "encoder": (networks.Encoder, None),
    "gru": (networks.Sequence, networks.GruBlock),
    "lstm": (networks.Sequence, networks.LstmBlock),
    "two_names": (networks.TwoNames, None),
    "conditioned": (networks.Conditioned, None),
    "dropping": (networks.Mlp, networks.DroppingBlock),
    "mixed_sequence": (networks.Sequence, networks.MixedBlock),
}
SEQUENCES = ("transformer", "tied", "encoder", "gru", "lstm", "two_names", "mixed_sequence")
CALLBACKS: dict[str, Callable[[], Any]] = {
    "norms": pieces.Norms,
    "average": pieces.Average,
    "early_stopping": partial(EarlyStopping, "val_loss", patience=1, strict=False),
    "ema": partial(EMAWeightAveraging, decay=0.8),
    "swa": partial(StochasticWeightAveraging, swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1),
    "checkpoint": partial(ModelCheckpoint, "saved", monitor="val_loss", save_top_k=1, save_last=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sanity": {"num_sanity_val_steps": 2},
    "profiler": {"profiler": "simple"},
    "every_second": {"check_val_every_n_epoch": 2},
    "limit_val": {"limit_val_batches": 3},
    "anomalies": {"detect_anomaly": True},
    "not_in_inference": {"inference_mode": False},
}
# Losses that equal the mean of those of any equal parts of a batch.
MEANS = ("cross_entropy", "mse", "later_term", "per_sample_mean")
# Losses that draw random numbers.
RANDOM = ("noisy", "drawn_mask")
# What one process does as a layout only with the same batches.
BY_BATCH_ALONE = ("pulled", "Tracking")
# What happens once per batch: a layout must have as many of them as one process.
ONCE_PER_BATCH = ("plateau_by_step", "Taught", "average", "ByHand")


@dataclass(frozen=True)
class Program:
    """What a user's script would say; the defaults are the simplest program.

    Attributes:
        network, loss, module, optimizer, scheduler, loader: names of components.
        accumulation: micro-batches of a step in one process; a layout has as many on all its data ranks, or one each.
        double: whether numbers are float64 (sharper comparisons) rather than float32.
        precision: ``Trainer(precision=...)``.
        clip: ``norm``, ``value`` or nothing.
        epochs, steps: epochs, and steps per epoch.
        rest: samples of an incomplete last step of each epoch.
        padded_from: the first sample with targets that do not count; -1: none.
        after: what follows ``fit``: ``validate``, ``test``, ``predict``, ``all`` of them, twice, or nothing.
        validation: ``epoch``, ``steps`` (every second) or nothing; validation data have an incomplete last batch.
        callbacks: names of callbacks.
        options: names of :data:`OPTIONS`, and ``two_loaders`` (for validation), ``global_batch`` (given to the Trainer
            instead of the accumulation) and ``schedule`` (twice the micro-batches per step from the second epoch on).
        stop: step after which the run is saved and stopped, to be resumed under another layout; 0: none.
        seed: of weights and data.
    """

    network: str = "mlp"
    loss: str = "mse"
    module: str = "Trained"
    optimizer: str = "momentum"
    scheduler: str = ""
    loader: str = "plain"
    accumulation: int = 1
    double: bool = True
    precision: str = "32-true"
    clip: str = ""
    epochs: int = 1
    steps: int = 4
    rest: int = 0
    padded_from: int = -1
    validation: str = ""
    after: str = ""
    callbacks: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    stop: int = 0
    seed: int = 0

    @property
    def is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of those of its samples."""
        return self.loss in MEANS and self.loader != "ragged" and self.network != "batch_norm"

    @property
    def components(self) -> set[str]:
        """Names of what it is made of."""
        named = (self.network, self.loss, self.module, self.optimizer, self.scheduler, self.loader)
        return {*named, *self.callbacks}

    @property
    def drops(self) -> bool:
        """Whether layouts draw numbers of their own: a run is then compared with the same one, uninterrupted."""
        return self.network == "dropping"

    @property
    def per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.steps + (self.rest > 0 and self.loader != "dropping")

    def simplifications(self) -> list[dict[str, Any]]:
        """Return new values of slots, each nearer to the default."""
        plain, found = Program(), list[dict[str, Any]]()
        for slot in fields(self):
            mine, default = getattr(self, slot.name), getattr(plain, slot.name)
            if mine == default or slot.name == "seed":
                continue
            found.append({slot.name: default})
            if isinstance(mine, tuple) and len(mine) > 1:
                found += [{slot.name: (name,)} for name in mine]
            elif isinstance(mine, int) and slot.name in ("epochs", "steps", "stop", "rest") and mine > default + 1:
                found.append({slot.name: mine - 1})
        return found

    def __str__(self) -> str:
        plain = Program()
        said = [f"{slot.name}={getattr(self, slot.name)!r}" for slot in fields(self)]
        return ", ".join(
            text
            for slot, text in zip(fields(self), said, strict=True)
            if getattr(self, slot.name) != getattr(plain, slot.name)
        )


def make_module(program: Program) -> pl.LightningModule:
    """Return the module of a program, built under its seed."""
    torch.manual_seed(program.seed)
    network, block = NETWORKS[program.network]
    built = network() if block is None else network(block)
    loss = getattr(losses, program.loss)
    module: pl.LightningModule = getattr(modules, program.module)(built, loss, partial(configure, program))
    return module.double() if program.double else module


def configure(program: Program, module: Any) -> Any:
    """Return what ``configure_optimizers`` returns."""
    made = getattr(pieces, program.optimizer)(module)
    if not program.scheduler:
        return made
    schedule = getattr(pieces, program.scheduler)
    total = program.epochs * program.per_epoch
    if isinstance(made, list):
        return made, [schedule(each, total) for each in made]
    return {"optimizer": made, "lr_scheduler": schedule(made, total)}


def make_loaders(program: Program, batch: int) -> tuple[Any, Any]:
    """Return loaders for training and validation whose batches have so many samples."""
    kind = data.Texts if program.network in SEQUENCES else data.Vectors
    dtype = torch.float64 if program.double else torch.float32
    padded_from = None if program.padded_from < 0 else program.padded_from
    size = GLOBAL_BATCH * program.steps + program.rest
    samples, held_out = kind(size, padded_from, dtype), kind(14, None if padded_from is None else 4, dtype, 12)
    # A loader of its own form for validation, too, but neither in a drawn order nor without the last samples.
    form = "plain" if program.loader in ("shuffled", "dropping") else program.loader
    evaluated = [getattr(data, form)(held_out, size) for size in (4, 3)]
    return getattr(data, program.loader)(samples, batch), evaluated if "two_loaders" in program.options else evaluated[
        0
    ]


def trainer_options(program: Program) -> dict[str, Any]:
    """Return what Trainers get, besides devices, strategy and accumulation."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": "checkpoint" in program.callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "max_epochs": program.epochs,
    }
    if program.precision != "32-true":
        options["precision"] = program.precision
    if program.clip:
        clips = {"norm": 0.3, "value": 0.02}
        options |= {"gradient_clip_val": clips[program.clip], "gradient_clip_algorithm": program.clip}
    for name in program.options:
        options |= OPTIONS.get(name, {})
    return options


def make_callbacks(program: Program) -> list[Any]:
    """Return the callbacks of a program."""
    return [CALLBACKS[name]() for name in program.callbacks]
