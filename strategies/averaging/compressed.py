"""Gradients averaged over replicas with fewer bytes: what DDP, ZeRO and hybrid layouts share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.memory.held import HeldSource
from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.averaged import AveragedReplicas
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
    choose_compression,
    nothing_to_compress,
    scaled_steps_problem,
)
from trainwright.strategies.averaging.compression.replicas import ReplicaAverage
from trainwright.strategies.averaging.means import PartMeans
from trainwright.strategies.contract.communication.options import ALL_REDUCE
from trainwright.strategies.contract.precision import before_update, takes_before_update
from trainwright.strategies.state.checkpointing import (
    COMPRESSION,
    OF_REPLICA,
    KeptBack,
    is_handed_over,
    of_rank,
    rank_of,
)
from trainwright.strategies.state.run_state import read_into, spread_like


class CompressedReplicas(AveragedReplicas):
    """Mixin: the average of gradients over replicas may be compressed.

    Gradients are averaged once an optimizer step, when the last backward pass has ended: not while it runs, since what
    is sent is little. Within a replica nothing is compressed.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.averaging.options.AveragedOptions`.

    Raises:
        ValueError: if there is no such compressor or option, or a value is out of its range.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        options = self.options
        self._compression = choose_compression(options.compression) if options.averages_gradients else None
        self._replicas: ReplicaAverage | None = None
        self._adam: CompressedAdam | None = None
        self._part_means: PartMeans | None = None  # of gradients that are averaged as they are, after backward
        self._parts: list[ReplicaPart] = []
        self._is_between = False  # micro-batches of an optimizer step, more of which follow

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def compression(self) -> CompressionChoice | None:
        """How gradients are compressed between replicas; ``None``: not at all."""
        return self._compression

    @property
    def _averages_after_backward(self) -> bool:
        """Whether replicas are averaged once backward has ended, not by what averages within them."""
        return self.compression is not None or self.average_by != ALL_REDUCE

    @property
    def compressed_bytes(self) -> int:
        """Bytes that this rank sends for a compressed average of all gradients, once an optimizer step; 0 without.

        Of a step after the warm-up, where the compressor has one.
        """
        return 0 if self._replicas is None else self._replicas.sent_bytes

    # ---- what a strategy tells ------------------------------------------------------------------------------------

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        """What this rank optimizes, in the order of the module."""
        raise NotImplementedError

    def _complete_gradients(self) -> None:
        """Let gradients of this replica be where the optimizer sees them, after backward and before their average."""

    # ---- the step -------------------------------------------------------------------------------------------------

    def _set_up_compression(self) -> None:
        """Begin to compress; to be called when optimizers and precision are set up.

        Raises:
            ValueError: if the module or its optimizers speak against it.
        """
        self._replicas, self._adam, self._parts = None, None, []
        before_update(self.precision_plugin, None)
        choice = self._compression
        if choice is None or not self.optimizers:
            return
        refuse(self._compression_problems(choice))
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = None if scaler is None else scaler.get_scale
        self._replicas = ReplicaAverage(choice, self.root_device, scale)
        against = list(self._against_steps(choice))
        if choice.sends != "gradients" and not against:
            self._average_in_adam(choice)
        elif choice.sends == "auto":
            rank_zero_info(
                f"compression={choice.name} compresses gradients, not steps of Adam (compression.sends=auto): "
                f"{against[0]}."
            )
        self._parts = list(self._replica_parts())
        self._know_parts()

    def _set_up_means(self) -> None:
        """Begin to average gradients as they are once backward has ended, where that is the way; a collective."""
        self._part_means = None
        if self.compression is None and self._of_copies is not None and self.average_by != ALL_REDUCE:
            self._part_means = PartMeans(self._of_copies.by(self.average_by), self.root_device)

    def _average_in_adam(self, choice: CompressionChoice) -> None:
        assert self._replicas is not None
        self._replicas.warmup_steps = 0  # of which the optimizer's steps have one of their own
        self._adam = CompressedAdam(self._replicas, EXCHANGES[choice.name], choice.warmup_steps)
        before_update(self.precision_plugin, self._adam.before_step)
        if choice.warmup_steps < LEAST_WARMUP and self._adam.exchange.keeps_variance:
            rank_zero_warn(
                f"compression={choice.name} with compression.warmup_steps={choice.warmup_steps}: Adam's variance stays "
                "what it is after so few steps, and where that is too little by chance, steps become huge (gpt "
                f"diverged with 1). Type compression.warmup_steps=100, better 15 to 25 % of the run; {LEAST_WARMUP} or "
                "more are not warned about."
            )

    def _against_steps(self, choice: CompressionChoice) -> Iterator[str]:
        """Why replicas cannot be averaged within Adam's steps; may be extended by a strategy."""
        yield from adam_problems(self.optimizers, choice.asked, choice.instead)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            yield scaled_steps_problem(choice)
        if choice.warmup_steps == 0:
            yield "without a warm-up Adam has no variance (compression.warmup_steps=0)"
        if not takes_before_update(self.precision_plugin):
            plugin = type(self.precision_plugin).__name__
            yield f"the precision plugin {plugin} does not tell when gradients are clipped"

    def _compression_problems(self, choice: CompressionChoice) -> Iterator[str]:
        assert self.lightning_module is not None
        if self.layout.replicate == 1:
            yield nothing_to_compress(choice.name)
        if choice.keeps_residual and not self.lightning_module.automatic_optimization:
            yield (
                f"compression={choice.name} with manual optimization (automatic_optimization=False): what is kept back "
                "belongs to one average per optimizer step, which only automatic optimization knows of; type "
                "compression=bf16 (or fp16, int8), or compression=none"
            )
        if choice.needs_adam:
            yield from self._against_steps(choice)

    def _know_parts(self) -> None:
        assert self._replicas is not None
        self._replicas.take([part for part in self._parts if part.parameter.requires_grad])

    def _average_replicas(self) -> None:
        """Average gradients over replicas, unless more micro-batches follow. A collective."""
        if self._is_between:
            return
        if self._part_means is not None:
            self._part_means.average([part for part in self._replica_parts() if part.parameter.requires_grad])
        if self._replicas is None:
            return
        self._know_parts()
        if self._adam is None:
            self._replicas.average()
        elif not self._adam.is_warm:
            self._replicas.average(exactly=True)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch; gradients are averaged before ``on_after_backward`` sees them."""
        if (self._replicas is None and self._part_means is None) or self.backward_in_step:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        if self.loss_factor != 1:
            closure_loss = closure_loss * self.loss_factor
        # As Lightning's, with the average in between.
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        self._complete_gradients()
        self._average_replicas()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches inside do not finish the averaging of gradients."""
        self._is_between = True
        try:
            with super().block_backward_sync():  # type: ignore[misc]
                yield
        finally:
            self._is_between = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; replicas may be averaged within it."""
        if self._adam is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._adam.abandon()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._adam.after_step()
        return output

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _kept_back(self, complete: bool) -> KeptBack | None:
        average = self._replicas
        if average is None:
            return super()._kept_back(complete)
        self._know_parts()
        replica = self.layout.coordinates(self._rank)["replicate"]
        tensors, kinds = {}, set()
        for part, kind, value in average.kept_back():
            kinds.add(kind)
            if complete or self.placement.writes(part.name, True):
                key = _key(replica, kind, part.name)
                tensors[key] = self.placement.boxes(part.name, spread_like(part.parameter, value))
        of_rank = {f"{OF_REPLICA}{key}": value for key, value in average.of_buckets().items()}
        steps = average.steps if self._adam is None else self._adam.steps
        of_run = {"name": average.choice.name, "steps": steps, "kinds": sorted(kinds), "units": self._units}
        return KeptBack(tensors, of_rank, of_run)

    @property
    def _units(self) -> str:
        """Of what is kept back: what else it may not be mixed with."""
        return GRADIENTS if self._adam is None else self._adam.exchange.units

    def _keep_back(self, state: RunState | HeldSource, of_run: Mapping[str, Any]) -> None:
        average, saved = self._replicas, of_run.get(COMPRESSION)
        if average is None or saved is None:
            super()._keep_back(state, of_run)
            return
        self._know_parts()
        name = average.choice.name
        # States of before had gradients, or momentum with onebit.
        units = saved.get("units", "momentum" if saved["name"] == "onebit" else GRADIENTS)
        if units != self._units:
            rank_zero_info(
                f"What compression={saved['name']} had kept back ({units}) is dropped: compression={name} keeps back "
                f"{self._units}, which are of another scale, and goes on without it."
            )
            return
        average.steps = int(saved["steps"])
        if self._adam is not None:
            self._adam.steps = average.steps
        said = self._put_back(state, Layout(**of_run["layout"]), saved["kinds"])
        if saved["kinds"]:
            rank_zero_info(f"compression={name}: {said}")

    def _put_back(self, state: RunState | HeldSource, was: Layout, kinds: Sequence[str]) -> str:
        """Take over what a state holds of what was kept back; returns what to say of it."""
        assert self._replicas is not None
        as_it_was = "each rank goes on with what it had kept back."
        if isinstance(state, HeldSource):
            if is_handed_over(state):
                return "a replica that joins has kept back nothing yet."
            rank = rank_of(state)
            own = was.coordinates(rank)["replicate"]
            if was == self.layout:
                self._put_back_as_it_was(state, own, rank, kinds)
                return as_it_was
            # Of the other replicas' there is nothing here; of its own chunk's a rank speaks for all.
            self._put_back_folded(state, [own], kinds, weights=(1.0, float(self.layout.replicate)))
            return f"{was.replicate} replicas are {self.layout.replicate} now; each goes on with what it had kept back."
        if was == self.layout:
            own = was.coordinates(self._rank)["replicate"]
            self._put_back_as_it_was(state, own, self._rank, kinds)
            return as_it_was
        self._put_back_folded(state, range(was.replicate), kinds, weights=(1 / was.replicate, 1.0))
        return (
            f"what {was.replicate} replica(s) had kept back under another layout is folded: each of "
            f"{self.layout.replicate} goes on with its mean, and what is remembered of buckets begins anew."
        )

    def _put_back_as_it_was(self, state: RunState | HeldSource, replica: int, rank: int, kinds: Sequence[str]) -> None:
        assert self._replicas is not None
        for kind in kinds:
            self._replicas.keep_back(kind, self._read(state, replica, kind))
        self._replicas.put_back_of_buckets(of_rank(state, rank, OF_REPLICA))

    def _put_back_folded(
        self, state: RunState | HeldSource, replicas: Iterable[int], kinds: Sequence[str], weights: tuple[float, float]
    ) -> None:
        """Sum up what replicas had kept back, so that the mean over the new ones is what it was over the old ones."""
        assert self._replicas is not None
        folded: dict[str, Tensor] = {}
        for replica in replicas:
            for kind in kinds:
                weight = weights[kind == CHUNK_RESIDUAL]
                for name, value in self._read(state, replica, kind).items():
                    folded[name] = folded[name].add_(value, alpha=weight) if name in folded else value * weight
        self._replicas.keep_back(RESIDUAL, folded)

    def _read(self, state: RunState | HeldSource, replica: int, kind: str) -> dict[str, Tensor]:
        """This rank's part of what a replica had kept back, by name."""
        assert self._replicas is not None
        known = state.keys()
        boxes, stored, values = {}, {}, {}
        for part in self._replicas.parts():
            key = _key(replica, kind, part.name)
            if key in known:
                value = torch.zeros(part.local.shape, device=self.root_device)
                values[part.name] = value
                boxes[key] = self.placement.boxes(part.name, spread_like(part.parameter, value))
                stored[key] = StoredTensor(state, key)
        read_into(boxes, stored)
        return values


def _key(replica: int, kind: str, name: str) -> str:
    return f"{OF_REPLICA}{replica}/{kind}/{name}"
