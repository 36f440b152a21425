"""Compressed averages of gradients over replicas, and their error-feedback state in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.adam import (
    EXCHANGES,
    GRADIENTS,
    LEAST_WARMUP,
    CompressedAdam,
    adam_problems,
)
from trainwright.strategies.averaging.compression.buckets import CHUNK_RESIDUAL, RESIDUAL, ReplicaPart
from trainwright.strategies.averaging.compression.options import (
    CompressionChoice,
    nothing_to_compress,
    scaled_steps_problem,
)
from trainwright.strategies.averaging.compression.replica_average import ReplicaAverage
from trainwright.strategies.contract.part import Host
from trainwright.strategies.contract.precision import before_update, takes_before_update
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.rank_state import COMPRESSION, OF_REPLICA, KeptBack, is_transferred, of_rank, rank_of
from trainwright.strategies.state.run_state import read_into
from trainwright.strategies.state.shards import spread_like


class Averaged(Host, Protocol):
    """Strategy as seen by its averaging part."""

    @property
    def placement(self) -> Placement: ...

    @property
    def _rank(self) -> int: ...

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        """Yield the parts that this rank optimizes, in module order."""


class CompressedAverage:
    """Averages gradients over replicas with compression; created after optimizers and precision are set up.

    Args:
        strategy: that owns the gradients.
        choice: of the compressor.
        against_steps: further reasons why replicas cannot be averaged within Adam's steps.

    Raises:
        ValueError: if the module or its optimizers do not support it.
    """

    def __init__(self, strategy: Averaged, choice: CompressionChoice, against_steps: Iterable[str]) -> None:
        self._strategy, self._choice = strategy, choice
        against = [*self._against_steps(), *against_steps]
        refuse(self._problems(against))
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        self.replicas = ReplicaAverage(choice, strategy.root_device, None if scaler is None else scaler.get_scale)
        self._adam: CompressedAdam | None = None
        if choice.sends != "gradients" and not against:
            self._average_in_adam()
        elif choice.sends == "auto":
            rank_zero_info(f"compression={choice.name} compresses gradients, not steps (sends=auto): {against[0]}.")
        self._parts = list(strategy._replica_parts())
        self._update_parts()

    def _average_in_adam(self) -> None:
        choice = self._choice
        self.replicas.warmup_steps = 0  # the optimizer counts its own warm-up
        self._adam = CompressedAdam(self.replicas, EXCHANGES[choice.name], choice.warmup_steps)
        before_update(self._strategy.precision_plugin, self._adam.before_step)
        for optimizer in self._strategy.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._adam.after_step())  # type: ignore[union-attr]
        if choice.warmup_steps < LEAST_WARMUP and self._adam.exchange.keeps_variance:
            rank_zero_warn(
                f"compression={choice.name} with compression.warmup_steps={choice.warmup_steps}: Adam's variance is "
                "frozen after so few steps, and where it is too small by chance, updates become huge (gpt diverged "
                f"with 1). Type compression.warmup_steps=100, or better 15 to 25 % of the run; at least {LEAST_WARMUP}."
            )

    def _against_steps(self) -> Iterator[str]:
        choice, precision = self._choice, self._strategy.precision_plugin
        yield from adam_problems(self._strategy.optimizers, choice.asked, choice.instead)
        if getattr(precision, "scaler", None) is not None:
            yield scaled_steps_problem(choice)
        if choice.warmup_steps == 0:
            yield "without a warm-up Adam has no variance (compression.warmup_steps=0)"
        if not takes_before_update(precision):
            plugin = type(precision).__name__
            yield f"the precision plugin {plugin} does not report when gradients are clipped"

    def _problems(self, against_steps: Iterable[str]) -> Iterator[str]:
        choice, module = self._choice, self._strategy.lightning_module
        if self._strategy.layout.replicate == 1:
            yield nothing_to_compress(choice.name)
        if choice.keeps_residual and not module.automatic_optimization:
            yield (
                f"compression={choice.name} with manual optimization (automatic_optimization=False): its residual "
                "belongs to one average per optimizer step, which only automatic optimization knows; type "
                "compression=bf16 (or fp16, int8), or compression=none"
            )
        if choice.needs_adam:
            yield from against_steps

    def _update_parts(self) -> None:
        self.replicas.take([part for part in self._parts if part.parameter.requires_grad])

    @property
    def sent_bytes(self) -> int:
        """See :attr:`~trainwright.strategies.averaging.replica_averaging.Averaging.sent_bytes`."""
        return self.replicas.sent_bytes

    def average(self) -> None:
        """Average gradients once backward has ended. A collective."""
        self._update_parts()
        if self._adam is None:
            self.replicas.average()
        elif not self._adam.is_warm:
            self.replicas.average(exactly=True)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def kept_back(self, complete: bool) -> KeptBack:
        """See :meth:`~trainwright.strategies.averaging.replica_averaging.Averaging.kept_back`."""
        average, placement = self.replicas, self._strategy.placement
        self._update_parts()
        replica = self._strategy.layout.coordinates(self._strategy._rank)["replicate"]
        tensors, kinds = {}, set()
        for part, kind, value in (kept for bucket in average.buckets for kept in bucket.kept_back()):
            kinds.add(kind)
            if complete or placement.writes(part.name, True):
                key = _key(replica, kind, part.name)
                tensors[key] = placement.boxes(part.name, spread_like(part.parameter, value))
        of_rank = {f"{OF_REPLICA}{key}": value for key, value in average.bucket_states().items()}
        steps = average.steps if self._adam is None else self._adam.steps
        of_run = {"name": average.choice.name, "steps": steps, "kinds": sorted(kinds), "units": self._units}
        return KeptBack(tensors, of_rank, of_run)

    @property
    def _units(self) -> str:
        """Units of the residual, which may not be mixed with others."""
        return GRADIENTS if self._adam is None else self._adam.exchange.units

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        """See :meth:`~trainwright.strategies.averaging.replica_averaging.Averaging.keep_back`. A collective."""
        average, saved = self.replicas, of_run.get(COMPRESSION)
        if saved is None:
            return
        self._update_parts()
        name = average.choice.name
        # Older checkpoints have no units: gradients, or momentum with onebit.
        units = saved.get("units", "momentum" if saved["name"] == "onebit" else GRADIENTS)
        if units != self._units:
            rank_zero_info(
                f"The residual of compression={saved['name']} ({units}) is dropped: compression={name} keeps "
                f"{self._units}, which are on another scale, so it starts from zero."
            )
            return
        average.steps = int(saved["steps"])
        if self._adam is not None:
            self._adam.steps = average.steps
        said = self._put_back(state, Layout(**of_run["layout"]), saved["kinds"])
        if saved["kinds"]:
            rank_zero_info(f"compression={name}: {said}")

    def _put_back(self, state: RunState | SnapshotReader, was: Layout, kinds: Sequence[str]) -> str:
        """Restore the residual from a state; returns a message for the log."""
        layout, rank = self._strategy.layout, self._strategy._rank
        if isinstance(state, SnapshotReader):
            if is_transferred(state):
                return "a replica that joins starts without a residual."
            rank = rank_of(state)
        if was == layout:
            for kind in kinds:
                self.replicas.keep_back(kind, self._read(state, was.coordinates(rank)["replicate"], kind))
            self.replicas.load_bucket_states(of_rank(state, rank, OF_REPLICA))
            return "each rank resumes with its residual."
        if isinstance(state, SnapshotReader):
            # It has no other replica's residual; each rank knows its own chunk's for all.
            own = was.coordinates(rank)["replicate"]
            self._restore_folded(state, [own], kinds, weights=(1.0, float(layout.replicate)))
            return f"replicas changed from {was.replicate} to {layout.replicate}; each resumes with its own residual."
        self._restore_folded(state, range(was.replicate), kinds, weights=(1 / was.replicate, 1.0))
        return (
            f"the residual of {was.replicate} replica(s) under another layout is folded: each of {layout.replicate} "
            "resumes with the mean, and per-bucket state starts anew."
        )

    def _restore_folded(
        self,
        state: RunState | SnapshotReader,
        replicas: Iterable[int],
        kinds: Sequence[str],
        weights: tuple[float, float],
    ) -> None:
        """Sum residuals of the old replicas so that their mean over replicas is preserved."""
        folded: dict[str, Tensor] = {}
        for replica in replicas:
            for kind in kinds:
                weight = weights[kind == CHUNK_RESIDUAL]
                for name, value in self._read(state, replica, kind).items():
                    folded[name] = folded[name].add_(value, alpha=weight) if name in folded else value * weight
        self.replicas.keep_back(RESIDUAL, folded)

    def _read(self, state: RunState | SnapshotReader, replica: int, kind: str) -> dict[str, Tensor]:
        """Return this rank's part of a replica's residual, by parameter name."""
        known = state.keys()
        boxes, stored, values = {}, {}, {}
        for part in (part for bucket in self.replicas.buckets for part in bucket.parts):
            key = _key(replica, kind, part.name)
            if key in known:
                value = torch.zeros(part.local.shape, device=self._strategy.root_device)
                values[part.name] = value
                boxes[key] = self._strategy.placement.boxes(part.name, spread_like(part.parameter, value))
                stored[key] = StoredTensor(state, key)
        read_into(boxes, stored)
        return values


def _key(replica: int, kind: str, name: str) -> str:
    return f"{OF_REPLICA}{replica}/{kind}/{name}"
