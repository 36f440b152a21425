"""Links between ranks, measured, and ways to average gradients over them, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.compression.names import compressor_names, make_compressor
from trainwright.strategies.contract.communication.advice import Advice, MeasuredLink, MeasuredStep, advise
from trainwright.strategies.contract.communication.options import copies_of_a_node
from trainwright.strategies.contract.communication.probe import probe_links
from trainwright.strategies.contract.part import Host
from trainwright.strategies.state.placement import Placement


class Averaged(Host, Protocol):
    """What the parts of a strategy that average gradients read of it."""

    @property
    def placement(self) -> Placement: ...

    @property
    def _rank(self) -> int: ...

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        """What this rank optimizes, in the order of the module."""


class Links:
    """The links between the ranks of a strategy, measured once.

    Args:
        strategy: whose.
        ranks_per_node: neighbouring ranks that share a node.
    """

    def __init__(self, strategy: Averaged, ranks_per_node: Callable[[], int]) -> None:
        self._strategy, self._ranks_per_node = strategy, ranks_per_node
        self._found: list[MeasuredLink] = []

    def measured(self) -> list[MeasuredLink]:
        """The links of the axes along which gradients are averaged. The first call is a collective of all ranks."""
        if not self._found:
            layout = self._strategy.layout
            axes = [(axis, layout, axis) for axis in ("replicate", "shard")]
            self._found = probe_links([*axes, *self._nodes()], self._strategy.root_device)
        return self._found

    def _nodes(self) -> list[tuple[str, Layout, str]]:
        """Ranks within a node and across nodes, where replicas alone span several nodes of several ranks."""
        layout = self._strategy.layout
        ranks = layout.replicate
        local = copies_of_a_node(layout, self._ranks_per_node())
        if ranks != layout.world_size or not 1 < local < ranks:
            return []
        nodes = Layout(replicate=ranks // local, shard=local)
        return [("within", nodes, "shard"), ("across", nodes, "replicate")]

    def advice(self, changed: str, **step: Any) -> Advice:
        """Compare ways to average gradients by these links.

        Args:
            changed: what was chosen already, to be said.
            **step: of :class:`~trainwright.strategies.contract.communication.advice.MeasuredStep`, but for the bytes.
        """
        parts = [part.local for part in self._strategy._replica_parts()]
        shapes = [tuple(part.shape) for part in parts if part.numel()]
        ranks, numel = self._strategy.layout.replicate, sum(part.numel() for part in parts)
        compressed = {name: make_compressor(name).sent_bytes(shapes, ranks) for name in compressor_names()}
        measured = MeasuredStep(
            gradient_bytes=4.0 * numel if ranks > 1 else 0.0,
            compressed_bytes=compressed if shapes and ranks > 1 else {},
            **step,
        )
        return advise(measured, self.measured(), changed)
