"""Runs with local updates, and reference loops in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts

LENGTH = 9
GLOBAL_BATCH = 12


@dataclass
class Seen:
    """Records of one rank."""

    replica: int = 0
    batches: list[Tensor] = field(default_factory=list)  # tokens of each optimizer step
    own: list[dict[str, Tensor]] = field(default_factory=list)  # its replica's parameters after each
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validated: list[dict[str, Tensor]] = field(default_factory=list)  # parameters at each validation
    final: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Watch(pl.Callback):
    """Fills a :class:`Seen`, discarding steps that are rolled back."""

    keeps_its_state = True

    def __init__(self) -> None:
        self.seen = Seen()
        self._parts: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._begin = self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin = self._step = trainer.global_step
        self.seen.replica = trainer.strategy.layout.coordinates(trainer.global_rank)["replicate"]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.gradients.append(dict(trainer.strategy.whole_gradients()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._parts.append(batch["tokens"])
        self._losses.append(outputs["loss"].detach())
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.seen.batches.append(torch.cat(self._parts))
            self.seen.losses.append(float(torch.stack(self._losses).sum()))
            self.seen.own.append(dict(trainer.strategy.whole_parameters()))
        if len(self._parts) == trainer.accumulate_grad_batches:
            self._parts, self._losses = [], []

    def on_gone_back(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        for several in (self.seen.batches, self.seen.losses, self.seen.own):
            del several[self._step - self._begin :]  # type: ignore[attr-defined]
        self._parts, self._losses = [], []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.validated.append(dict(trainer.strategy.whole_parameters()))


def fit(
    strategy: str,
    options: Mapping[str, Any],
    *,
    network: str = "gpt",
    optimizer: str = "sgd",
    steps: int = 6,
    accumulation: int = 1,
    validate_every: int | None = None,
    resume: str | None = None,
    callbacks: Sequence[Any] = (),
    **trainer_options: Any,
) -> Seen:
    """Train on the ranks of the default process group; returns the records of this rank."""
    watch = Watch()
    validation: dict[str, Any] = {"limit_val_batches": 0}
    if validate_every is not None:
        validation = {"val_check_interval": validate_every * accumulation, "check_val_every_n_epoch": None}
    trainer = make_trainer(
        strategy,
        dict(options),
        global_batch_size=GLOBAL_BATCH,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[watch, *callbacks],
        data_seed=5,
        **validation,
        **trainer_options,
    )
    module = make_module(network, optimizer)
    micro = GLOBAL_BATCH // (trainer.strategy.layout.data_ranks * accumulation)
    loader = DataLoader(Texts(48, LENGTH), batch_size=micro, shuffle=True)
    held_out = DataLoader(Texts(4, LENGTH), batch_size=1)
    trainer.fit(module, loader, held_out if validate_every is not None else None, ckpt_path=resume)
    watch.seen.final = dict(trainer.strategy.whole_parameters())
    watch.seen.values["held"] = trainer.strategy.measures.held_bytes()
    return watch.seen


@dataclass
class Outer:
    """Outer optimization of the reference: DiLoCo and its streaming variant, as in the papers."""

    sync_every: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0


def by_hand(
    seen: Sequence[Seen], outer: Outer, *, network: str = "gpt", optimizer: str = "sgd", clip: float | None = None
) -> list[Any]:
    """Train one module per replica on the batches of the ranks.

    Args:
        seen: records of all ranks.
        outer: optimization of the reference.
        network, optimizer: as in :func:`fit`.
        clip: largest norm of a replica's gradient; ``None``: off.

    Returns:
        Parameters by name after every step, for each replica.
    """
    replicas = max(each.replica for each in seen) + 1
    modules = [make_module(network, optimizer) for _ in range(replicas)]
    optimizers = [module.configure_optimizers() for module in modules]
    parameters = [dict(module.named_parameters()) for module in modules]
    common = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters[0].items()}
    fragments = [
        [name for name in common if _fragment(name, outer.fragments) == index] for index in range(outer.fragments)
    ]
    outer_optimizers = [
        torch.optim.SGD([common[n] for n in names], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
        for names in fragments
    ]
    due: dict[int, list[int]] = {}
    history: list[Any] = [[] for _ in modules]
    for step in range(1, len(seen[0].batches) + 1):
        for replica, module in enumerate(modules):
            # Ranks of one replica may share a batch, or read parts of it.
            read = {tuple(row.tolist()) for each in seen if each.replica == replica for row in each.batches[step - 1]}
            loss = module.loss({"tokens": torch.tensor(sorted(read))})
            optimizers[replica].zero_grad()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizers[replica].step()
        for index in due.pop(step, []):
            _merge(fragments[index], common, parameters, outer.mixing)
        for index, names in enumerate(fragments):
            if step % outer.sync_every == index * outer.sync_every // outer.fragments:
                for name in names:
                    mean = torch.stack([own[name].detach() for own in parameters]).mean(0)
                    common[name].grad = common[name].detach() - mean
                outer_optimizers[index].step()
                if outer.overlap:
                    due.setdefault(step + outer.overlap, []).append(index)
                else:
                    _merge(names, common, parameters, 0.0)
        for own, past in zip(parameters, history, strict=True):
            past.append({name: p.detach().clone() for name, p in own.items()})
    return history


def _merge(names: Sequence[str], common: Any, parameters: Sequence[Any], mixing: float) -> None:
    with torch.no_grad():
        for own in parameters:
            for name in names:
                own[name].copy_(mixing * own[name] + (1 - mixing) * common[name])


def _fragment(name: str, count: int) -> int:
    parts = name.split(".")
    if "blocks" in parts:
        return int(parts[parts.index("blocks") + 1]) % count
    return 0 if "embed" in name else count - 1


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of two sets of parameters."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-8)) for n in one)


def mean_of(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean by name."""
    return {name: torch.stack([each[name] for each in several]).mean(0) for name in several[0]}
