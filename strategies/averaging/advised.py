"""Strategies that average gradients at every step and can say what other ways to do so would cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.compression.names import compressor_names, make_compressor
from trainwright.strategies.averaging.options import AveragedOptions
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.communication.advice import Advice, Link, MeasuredStep, advise
from trainwright.strategies.contract.communication.options import ALL_REDUCE, copies_of_a_node
from trainwright.strategies.contract.communication.probe import probe_links


class AdvisedCommunication(LayoutStrategy):
    """Mixin: measures the links between ranks and compares ways to average gradients over them.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.averaging.options.AveragedOptions`.
    """

    options: AveragedOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._links: list[Link] | None = None
        self._changed = ""

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def ranks_per_node(self) -> int:
        """Neighbouring ranks that share a node."""
        return self.options.ranks_per_node or len(getattr(self, "parallel_devices", None) or [0])

    @property
    def communication(self) -> str:
        """See :attr:`trainwright.strategies.base.strategy.LayoutStrategy.communication`."""
        return self.options.communication

    def advise_communication(
        self, compute: float, waits: float, accumulation: int, sent: dict[tuple[str, str], tuple[float, float]]
    ) -> Advice:
        """Compare ways to average gradients; once set up. A collective: links are measured the first time.

        Args:
            compute: seconds of an optimizer step without waits, the same on all ranks.
            waits: seconds of it that were waits, the same on all ranks.
            accumulation: micro-batches of a step.
            sent: (axis, kind of collective) -> calls and bytes of this rank in a step.
        """
        if self._links is None:
            self._links = self._measure_links()
        if self.communication == "auto":
            self._choose_from(compute, accumulation)
        shapes = [tuple(part.local.shape) for part in self._replica_parts() if part.local.numel()]
        ranks = self.layout.replicate
        numel = sum(part.local.numel() for part in self._replica_parts())
        compressed = {name: make_compressor(name).sent_bytes(shapes, ranks) for name in compressor_names()}
        choice = getattr(self, "compression", None)
        step = MeasuredStep(
            compute=compute,
            waits=waits,
            accumulation=accumulation,
            sent=sent,
            gradient_bytes=4.0 * numel if ranks > 1 else 0.0,
            compressed_bytes=compressed if shapes and ranks > 1 else {},
            compression=None if choice is None else choice.name,
            average_by=getattr(self, "average_by", ALL_REDUCE),
        )
        nothing = "communication=auto has changed nothing: nothing here can be changed without changing the numbers."
        return advise(step, self._links, self._changed or (nothing if self.communication == "auto" else ""))

    def _choose_from(self, compute: float, accumulation: int) -> None:
        """Choose by what was measured of steps, on all ranks the same; nothing by itself. Links are measured by now.

        Args:
            compute: seconds of an optimizer step without waits.
            accumulation: micro-batches of it.
        """

    # ---- what a strategy tells ------------------------------------------------------------------------------------

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        """What this rank optimizes, in the order of the module."""
        raise NotImplementedError

    def _measure_links(self) -> list[Link]:
        """Of the axes along which gradients are averaged; a collective of all ranks."""
        layout = self.layout
        axes = [(axis, layout, axis) for axis in ("replicate", "shard")]
        return probe_links([*axes, *self._nodes()], self.root_device)

    def _nodes(self) -> list[tuple[str, Layout, str]]:
        """Ranks within a node and across nodes, where replicas alone span several nodes of several ranks."""
        ranks = self.layout.replicate
        local = copies_of_a_node(self.layout, self.ranks_per_node)
        if ranks != self.layout.world_size or not 1 < local < ranks:
            return []
        nodes = Layout(replicate=ranks // local, shard=local)
        return [("within", nodes, "shard"), ("across", nodes, "replicate")]
