"""Averaging of gradients over replicas, as a part of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.config.options import refuse
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compressed_averaging import Averaged, CompressedAverage
from trainwright.strategies.averaging.compression.buckets import BUCKET_BYTES
from trainwright.strategies.averaging.compression.names import make_compressor
from trainwright.strategies.averaging.compression.options import CompressionChoice, choose_compression, compressor_names
from trainwright.strategies.averaging.means import Mean, OverlappedMean, ReplicaMeans
from trainwright.strategies.averaging.options import AveragedOptions
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.bucketing import bucketed
from trainwright.strategies.contract.communication.advice import (
    Advice,
    MeasuredLink,
    MeasuredStep,
    Way,
    advise,
    fastest_way,
)
from trainwright.strategies.contract.communication.options import ALL_REDUCE, OFF, average_misfits, copies_of_a_node
from trainwright.strategies.contract.communication.probe import probe_links, probe_ways
from trainwright.strategies.contract.precision import before_update
from trainwright.strategies.state.rank_state import NOTHING_KEPT, KeptBack, drop_kept_back


class Averaging:
    """Interface of gradient averaging; this base class leaves averaging to the strategy."""

    compression: CompressionChoice | None = None
    """Gradient compression between replicas; ``None``: off."""
    communication: str = OFF
    """Comparison of ways to average in the first steps: ``"none"``, ``"advise"`` or ``"auto"``."""
    average_by: str = ALL_REDUCE
    """How gradients are averaged; with ``communication="auto"`` known after setup."""
    after_backward = False
    """True if replicas are averaged separately from the reduction within a replica."""
    runs = False
    """True if :meth:`average` does anything."""

    advises = False
    """True if :meth:`advise` is available."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this rank per optimizer step for compressed averages, after the warm-up; 0 without
        compression.
        """
        return 0

    @property
    def names(self) -> Mapping[tuple[int, ...], str]:
        """Names of process groups that average replicas and are not mesh axes, by ranks."""
        return {}

    def accumulating(self) -> AbstractContextManager[None]:
        """Skip averaging inside: more micro-batches of the optimizer step follow."""
        return nullcontext()

    def average(self) -> None:
        """Average gradients after backward, except inside :meth:`accumulating`. A collective."""

    def advise(
        self, compute: float, waits: float, accumulation: int, sent: dict[tuple[str, str], tuple[float, float]]
    ) -> Advice:
        """Compare ways to average gradients. A collective: the first call measures the links.

        Args:
            compute: seconds of an optimizer step without waits, equal on all ranks.
            waits: seconds of it spent waiting, equal on all ranks.
            accumulation: micro-batches per step.
            sent: (axis, kind of collective) -> calls and bytes of this rank per step.
        """
        raise NotImplementedError

    def kept_back(self, complete: bool) -> KeptBack:
        """Return the error-feedback state of compression, for a run state.

        Args:
            complete: see :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`.
        """
        return NOTHING_KEPT

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        """Restore the error-feedback state of the run that saved ``state``. A collective."""
        drop_kept_back(of_run)


Choose = Callable[[list[MeasuredLink], float, int], str]
"""Chooses by links, compute seconds of an optimizer step and its micro-batches, equally on all ranks.

Returns a description of the choice; empty: nothing was chosen.
"""


class ReplicaAveraging(Averaging):
    """Averages gradients over replicas by the configured or the fastest way.

    Compressed averages, and those not made by one all-reduce, run once per optimizer step after the last backward.
    Within a replica nothing is compressed.

    Args:
        strategy: that owns the gradients.
        options: see :class:`~trainwright.strategies.averaging.options.AveragedOptions`; validated.
        choose: called with the measured links under ``communication="auto"``.
        against_steps: returns reasons why the strategy cannot average within Adam's steps.

    Raises:
        ValueError: if options contradict each other, or a compressor or option does not exist.
    """

    def __init__(
        self,
        strategy: Averaged,
        options: AveragedOptions,
        *,
        choose: Choose = lambda *_: "",
        against_steps: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.compression = choose_compression(options.compression) if options.averages_gradients else None
        self.communication, self.advises, self.asked = options.communication, True, options.average_by
        self._take(self.asked or ALL_REDUCE)
        self.changed = ""
        """Description of what ``communication="auto"`` chose."""
        self.ways: list[Way] = []
        """Measured ways to average."""
        self._strategy, self._choose, self._against_steps = strategy, choose, against_steps
        self._ranks_per_node = options.ranks_per_node
        self._links: list[MeasuredLink] = []
        self._copies: ReplicaMeans | None = None
        self._after: Averaging | CompressedAverage = Averaging()
        self._is_between = False  # True while more micro-batches of the optimizer step follow

    # ---- read by others -------------------------------------------------------------------------------------------

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks that share a node."""
        return self._ranks_per_node or len(getattr(self._strategy, "parallel_devices", None) or [0])

    @property
    def has_replicas(self) -> bool:
        """True if there are several replicas."""
        return self._copies is not None

    @property
    def sent_bytes(self) -> int:
        """See :attr:`Averaging.sent_bytes`."""
        return self._after.sent_bytes

    @property
    def names(self) -> Mapping[tuple[int, ...], str]:
        """Names of the hierarchical groups, ``replicate-within`` and ``replicate-across``."""
        return {} if self._copies is None else self._copies.names

    def advise(
        self, compute: float, waits: float, accumulation: int, sent: dict[tuple[str, str], tuple[float, float]]
    ) -> Advice:
        """See :meth:`Averaging.advise`."""
        said = ""
        if self.communication == "auto":
            self.changed = self._choose(self._measured_links(), compute, accumulation) or self.changed
            said = "communication=auto changed nothing: every available change would also change the numbers."
        parts = [part.local for part in self._strategy._replica_parts()]
        shapes = [tuple(part.shape) for part in parts if part.numel()]
        ranks, numel = self._strategy.layout.replicate, sum(part.numel() for part in parts)
        choices = map(CompressionChoice, compressor_names())
        compressed = {choice.name: make_compressor(choice).sent_bytes(shapes, ranks) for choice in choices}
        step = MeasuredStep(
            gradient_bytes=4.0 * numel if ranks > 1 else 0.0,
            compressed_bytes=compressed if shapes and ranks > 1 else {},
            compute=compute,
            waits=waits,
            accumulation=accumulation,
            sent=sent,
            compression=None if self.compression is None else self.compression.name,
            average_by=self.average_by,
        )
        return advise(step, self._measured_links(), self.changed or said)

    def _measured_links(self) -> list[MeasuredLink]:
        """Return the links of the axes that average gradients. The first call is a collective of all ranks."""
        if not self._links:
            layout = self._strategy.layout
            axes = [(axis, layout, axis) for axis in ("replicate", "shard")]
            local = copies_of_a_node(layout, self.ranks_per_node)
            if layout.replicate == layout.world_size and 1 < local < layout.replicate:  # on several nodes
                nodes = Layout(replicate=layout.replicate // local, shard=local)
                axes += [("within", nodes, "shard"), ("across", nodes, "replicate")]
            self._links = probe_links(axes, self._strategy.root_device)
        return self._links

    # ---- setup ----------------------------------------------------------------------------------------------------

    def check_nodes(self) -> None:
        """Check the requested way against the layout, once process groups exist.

        Raises:
            ValueError: if nodes do not fit the layout.
        """
        layout = self._strategy.layout
        refuse(average_misfits(self.asked, self.ranks_per_node, layout))
        self._copies = None
        if layout.replicate > 1 and dist.is_initialized() and layout.world_size == dist.get_world_size():
            copies = copies_of_a_node(layout, self.ranks_per_node)
            self._copies = ReplicaMeans(layout.groups("replicate"), copies)

    def choose_fastest(self, num_bytes: float) -> None:
        """Choose the fastest way for ``num_bytes`` of gradients and log it. A collective of all ranks."""
        assert self._copies is not None
        self.measure_ways(self._copies.ways)
        chosen = fastest_way(self.ways, num_bytes)
        self._take(chosen.name)
        times = ", ".join(f"{way.name} {way.seconds(num_bytes) * 1e3:.3g} ms" for way in self.ways)
        self.changed = (
            f"communication=auto averages by {chosen.name}: predicted for {num_bytes / 2**20:.3g} MiB are {times}."
        )
        rank_zero_info(self.changed)

    def _take(self, way: str) -> None:
        self.average_by, self.after_backward = way, self.compression is not None or way != ALL_REDUCE

    def measure_ways(self, names: Iterable[str]) -> None:
        """Measure ways to average. A collective of all ranks."""
        assert self._copies is not None
        self.ways = probe_ways({way: self._copies.by(way) for way in names}, self._strategy.root_device)

    def overlapped_mean(self) -> OverlappedMean | None:
        """Return the mean for DDP buckets during backward; ``None`` if one all-reduce suffices."""
        if self._copies is None or self.average_by == ALL_REDUCE:
            return None
        return OverlappedMean(self._copies.by(self.average_by), self._strategy.root_device)

    def set_up(self, *, plain_after_backward: bool) -> None:
        """Start averaging, after optimizers and precision are set up. A collective.

        Args:
            plain_after_backward: average uncompressed gradients here, unless by one all-reduce, rather than in the
                strategy's backward.

        Raises:
            ValueError: if the module or its optimizers do not support the compression.
        """
        self._after = Averaging()
        before_update(self._strategy.precision_plugin, None)
        if self.compression is not None and self._strategy.optimizers:
            self._after = CompressedAverage(self._strategy, self.compression, self._against_steps())
        elif self.after_backward and plain_after_backward and self._copies is not None:
            self._after = BucketedMean(self._copies.by(self.average_by), self._strategy)
        self.runs = type(self._after) is not Averaging

    # ---- the step -------------------------------------------------------------------------------------------------

    def accumulating(self) -> AbstractContextManager[None]:
        """See :meth:`Averaging.accumulating`."""
        return with_attributes(self, _is_between=True)

    def average(self) -> None:
        """See :meth:`Averaging.average`."""
        if not self._is_between:
            self._after.average()

    def kept_back(self, complete: bool) -> KeptBack:
        """See :meth:`Averaging.kept_back`."""
        return self._after.kept_back(complete)

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        """See :meth:`Averaging.keep_back`."""
        self._after.keep_back(state, of_run)


class BucketedMean(Averaging):
    """Uncompressed averages after backward of the locally optimized parts of parameters, bucket by bucket.

    Args:
        mean: over the replicas.
        strategy: that owns the gradients; its device communicates, and parts may be offloaded to another.
    """

    def __init__(self, mean: Mean, strategy: Averaged) -> None:
        self._mean, self._strategy = mean, strategy

    @torch.no_grad()
    def average(self) -> None:
        """Average gradients in place, leaving out parts that have none on any rank. A collective."""
        trained = [part for part in self._strategy._replica_parts() if part.parameter.requires_grad]
        found = [(part.bucket_tag, part.gradient) for part in trained if part.gradient is not None]
        buckets = bucketed(
            ((tag, gradient) for tag, gradient in found if gradient.numel()),
            lambda each: (each[0], each[1].dtype),
            lambda each: each[1].nbytes,
            BUCKET_BYTES,
        )
        for bucket in buckets:
            gradients = [gradient for _, gradient in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._strategy.root_device)
            self._mean(flat)
            for gradient, piece in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(piece.view(gradient.shape))
