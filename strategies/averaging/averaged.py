"""How gradients are averaged over replicas: as they are, in parts, in two levels, or with fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.config.options import refuse
from trainwright.strategies.averaging.advised import Averaged, Links
from trainwright.strategies.averaging.compressed import CompressedAverage
from trainwright.strategies.averaging.compression.options import CompressionChoice, choose_compression
from trainwright.strategies.averaging.means import MeanBesideBackward, MeansOfCopies, PartMeans
from trainwright.strategies.averaging.options import AveragedOptions
from trainwright.strategies.contract.communication.advice import Advice, MeasuredLink, Way, fastest_way
from trainwright.strategies.contract.communication.options import (
    ALL_REDUCE,
    OFF,
    average_misfits,
    copies_of_a_node,
)
from trainwright.strategies.contract.communication.probe import probe_ways
from trainwright.strategies.contract.precision import before_update
from trainwright.strategies.state.rank_state import NOTHING_KEPT, KeptBack, drop_kept_back


class Averaging:
    """The part of a strategy that averages gradients over replicas; this one leaves it to the strategy itself."""

    compression: CompressionChoice | None = None
    """How gradients are compressed between replicas; ``None``: not at all."""
    communication: str = OFF
    """Whether ways to average are compared in the first steps: ``"none"``, ``"advise"`` or ``"auto"``."""
    average_by: str = ALL_REDUCE
    """How gradients are averaged over replicas; with ``communication="auto"`` known once set up."""
    after_backward = False
    """Whether replicas are averaged apart from what averages within them."""
    runs = False
    """Whether :meth:`average` does anything."""

    advises = False
    """Whether :meth:`advise` is there to be asked."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for a compressed average of all gradients, once an optimizer step; 0 without.

        Of a step after the warm-up, where the compressor has one.
        """
        return 0

    @property
    def names(self) -> Mapping[tuple[int, ...], str]:
        """Of the groups of ranks in which replicas are averaged and which are no axis."""
        return {}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it more micro-batches of an optimizer step follow, so that nothing is averaged yet."""
        yield

    def average(self) -> None:
        """Average gradients once backward has ended, unless more micro-batches follow. A collective."""

    def advise(
        self, compute: float, waits: float, accumulation: int, sent: dict[tuple[str, str], tuple[float, float]]
    ) -> Advice:
        """Compare ways to average gradients; once set up. A collective: links are measured the first time.

        Args:
            compute: seconds of an optimizer step without waits, the same on all ranks.
            waits: seconds of it that were waits, the same on all ranks.
            accumulation: micro-batches of a step.
            sent: (axis, kind of collective) -> calls and bytes of this rank in a step.
        """
        raise NotImplementedError

    def kept_back(self, complete: bool) -> KeptBack:
        """What compression keeps back, for a run state.

        Args:
            complete: see :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`.
        """
        return NOTHING_KEPT

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        """Take over what was kept back by the run that saved ``state``. A collective."""
        drop_kept_back(of_run)


class Choose(Protocol):
    """Chooses by what was measured, on all ranks the same; returns what to say of it, empty: nothing was chosen."""

    def __call__(self, links: list[MeasuredLink], compute: float, accumulation: int) -> str:
        """Args: the links, seconds of an optimizer step without waits, and its micro-batches."""


def _choose_nothing(links: list[MeasuredLink], compute: float, accumulation: int) -> str:
    return ""


class ReplicaAveraging(Averaging):
    """Averages gradients over replicas in the way that was asked for, or found to be fastest.

    Gradients that are compressed, or averaged in another way than by one all-reduce, are averaged once an optimizer
    step, when the last backward pass has ended: not while it runs, since what is sent is little. Within a replica
    nothing is compressed.

    Args:
        strategy: whose gradients.
        options: how, see :class:`~trainwright.strategies.averaging.options.AveragedOptions`; checked already.
        choose: what the strategy chooses by measured links with ``communication="auto"``.
        against_steps: why the strategy cannot have replicas averaged within Adam's steps, in words.

    Raises:
        ValueError: if the options contradict each other, or there is no such compressor or option.
    """

    def __init__(
        self,
        strategy: Averaged,
        options: AveragedOptions,
        *,
        choose: Choose = _choose_nothing,
        against_steps: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.compression = choose_compression(options.compression) if options.averages_gradients else None
        self.communication, self.advises, self.asked = options.communication, True, options.average_by
        self._take(self.asked or ALL_REDUCE)
        self.changed = ""
        """What ``communication="auto"`` has chosen, as it is said."""
        self.ways: list[Way] = []
        """Ways to average that were measured."""
        self._strategy, self._choose, self._against_steps = strategy, choose, against_steps
        self._ranks_per_node = options.ranks_per_node
        self._links = Links(strategy, lambda: self.ranks_per_node)
        self._copies: MeansOfCopies | None = None
        self._after: Averaging | CompressedAverage | _Means = Averaging()
        self._is_between = False  # micro-batches of an optimizer step, more of which follow

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def ranks_per_node(self) -> int:
        """Neighbouring ranks that share a node."""
        return self._ranks_per_node or len(getattr(self._strategy, "parallel_devices", None) or [0])

    @property
    def has_copies(self) -> bool:
        """Whether there are several replicas, between which ways to average can be measured."""
        return self._copies is not None

    @property
    def sent_bytes(self) -> int:
        """See :attr:`Averaging.sent_bytes`."""
        return self._after.sent_bytes

    @property
    def names(self) -> Mapping[tuple[int, ...], str]:
        """What averages in two levels send counts under ``replicate-within`` and ``replicate-across``."""
        return {} if self._copies is None else self._copies.names

    def advise(
        self, compute: float, waits: float, accumulation: int, sent: dict[tuple[str, str], tuple[float, float]]
    ) -> Advice:
        """See :meth:`Averaging.advise`."""
        links, said = self._links.measured(), ""
        if self.communication == "auto":
            self.changed = self._choose(links, compute, accumulation) or self.changed
            said = "communication=auto has changed nothing: nothing here can be changed without changing the numbers."
        return self._links.advice(
            self.changed or said,
            compute=compute,
            waits=waits,
            accumulation=accumulation,
            sent=sent,
            compression=None if self.compression is None else self.compression.name,
            average_by=self.average_by,
        )

    # ---- setup ----------------------------------------------------------------------------------------------------

    def know_nodes(self) -> None:
        """Hold what was asked for against the layout; to be called when the ranks have met.

        Raises:
            ValueError: if nodes do not fit the layout.
        """
        layout = self._strategy.layout
        refuse(average_misfits(self.asked, self.ranks_per_node, layout))
        self._copies = None
        if layout.replicate > 1 and dist.is_initialized() and layout.world_size == dist.get_world_size():
            copies = copies_of_a_node(layout, self.ranks_per_node)
            self._copies = MeansOfCopies(layout.groups("replicate"), copies)

    def choose_fastest(self, num_bytes: float) -> None:
        """Take the fastest way for so many bytes of gradients, and say so; a collective of all ranks."""
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
        """Measure ways to average; a collective of all ranks."""
        assert self._copies is not None
        self.ways = probe_ways({way: self._copies.by(way) for way in names}, self._strategy.root_device)

    def beside_backward(self) -> MeanBesideBackward | None:
        """What averages bucket by bucket while backward runs; ``None`` where one all-reduce does, or is not needed."""
        if self._copies is None or self.average_by == ALL_REDUCE:
            return None
        return MeanBesideBackward(self._copies.by(self.average_by), self._strategy.root_device)

    def set_up(self, *, plain_after_backward: bool) -> None:
        """Begin to average; to be called when optimizers and precision are set up. A collective.

        Args:
            plain_after_backward: whether gradients that are not compressed are averaged here where one all-reduce is
                not the way, and not by the strategy while backward runs.

        Raises:
            ValueError: if the module or its optimizers speak against compression.
        """
        self._after = Averaging()
        before_update(self._strategy.precision_plugin, None)
        if self.compression is not None and self._strategy.optimizers:
            self._after = CompressedAverage(self._strategy, self.compression, self._against_steps())
        elif self.after_backward and plain_after_backward and self._copies is not None:
            means = PartMeans(self._copies.by(self.average_by), self._strategy.root_device)
            self._after = _Means(means, self._strategy)
        self.runs = type(self._after) is not Averaging

    # ---- the step -------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """See :meth:`Averaging.accumulating`."""
        self._is_between = True
        try:
            yield
        finally:
            self._is_between = False

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


class _Means(Averaging):
    """Gradients averaged as they are, once backward has ended."""

    def __init__(self, means: PartMeans, strategy: Averaged) -> None:
        self._means, self._strategy = means, strategy

    def average(self) -> None:
        self._means.average([part for part in self._strategy._replica_parts() if part.parameter.requires_grad])
