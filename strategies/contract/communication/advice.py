"""Predicted exposed communication time of a step for each way to average gradients, and a recommendation.

Pure arithmetic on measured values. Collectives follow the alpha-beta model (Hockney, "The communication challenge for
MPP", 1994): sequential messages times latency, plus bytes sent per rank over bandwidth. Rounds and bytes are those of
rings (Patarasuk and Yuan, JPDC 2009;
:mod:`~trainwright.strategies.contract.communication.costs`).

Not modelled: compute time of compressors, contention between axes, and effects on convergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwright.strategies.contract.communication.costs import least_bytes

ENOUGH = 0.05
"""Fraction of a step spent waiting below which no change is recommended."""
FASTER = 0.9
"""Fraction of the default method's time that another must not exceed to be chosen."""
BACKWARD_SHARE = 2 / 3
"""Backward's share of compute: it does twice the arithmetic of forward."""
# The least lossy first. Without fp16 (like bf16, but overflows) and onebit (Adam only, after a warm-up).
_MILDEST = ("bf16", "int8", "powersgd", "topk")
LOCAL_STEPS = (10, 50)
"""Synchronization intervals of local updates that are considered: the defaults of local_sgd and diloco."""
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_DENSE, _HIERARCHICAL = "dense", "hierarchical"


@dataclass(frozen=True)
class MeasuredLink:
    """Measured latency and bandwidth of a mesh axis.

    Args:
        axis: of the mesh; ``"within"``: ranks of one node; ``"across"``: one rank of each node.
        ranks: number of ranks along it.
        latency: seconds of one empty message of a ring.
        bandwidth: bytes per second sent by a rank.
        call: fixed seconds per collective; 0: included in ``latency``.
    """

    axis: str
    ranks: int
    latency: float
    bandwidth: float
    call: float = 0.0

    def seconds(self, kind: str, size: float) -> float:
        """Return the seconds of one collective.

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
            size: S of :mod:`~trainwright.strategies.contract.communication.costs`, in bytes.
        """
        return self.seconds_of(least_bytes(kind, size, self.ranks), rounds=_ROUNDS[kind], calls=1)

    def seconds_of(self, sent: float, rounds: float, calls: float = 0) -> float:
        """Return the seconds of ``calls`` collectives that send ``sent`` bytes in ``rounds`` rings of messages."""
        return rounds * (self.ranks - 1) * self.latency + sent / self.bandwidth + calls * self.call


def fit_link(axis: str, ranks: int, sizes: tuple[float, float], seconds: tuple[float, float]) -> MeasuredLink:
    """Fit latency and bandwidth to two all-reduces.

    Args:
        axis: name of the link.
        ranks: of the group, at least 2.
        sizes: bytes of a small tensor and of a large one.
        seconds: of their all-reduces. If the large one was not slower, all of its time counts as latency and gives a
            lower bound of the bandwidth.
    """
    small, large = (least_bytes("all_reduce", size, ranks) for size in sizes)
    way = fit_way(axis, (small, large), seconds)
    return MeasuredLink(axis, ranks, way.latency / (2 * (ranks - 1)), 1 / way.per_byte)


@dataclass(frozen=True)
class Way:
    """Measured time of a method to average gradients.

    Args:
        name: of :data:`~trainwright.strategies.contract.communication.options.AVERAGES`.
        latency: fixed seconds of one average.
        per_byte: seconds per byte of gradients.
    """

    name: str
    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        """Return the seconds of averaging ``size`` bytes."""
        return self.latency + size * self.per_byte


def fit_way(name: str, sizes: tuple[float, float], seconds: tuple[float, float]) -> Way:
    """Fit a line to the times of two averages; if the large one was not slower, as in :func:`fit_link`.

    Args:
        name: of the method.
        sizes: bytes of a small tensor and of a large one.
        seconds: of their averages.
    """
    if seconds[1] <= seconds[0]:
        return Way(name, seconds[1], seconds[1] / sizes[1])
    per_byte = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return Way(name, max(seconds[0] - sizes[0] * per_byte, 0.0), per_byte)


def fastest_way(ways: Sequence[Way], size: float) -> Way:
    """Return the fastest method for ``size`` bytes; the first, unless another takes at most :data:`FASTER` of its time.

    Args:
        ways: at least one, the default first.
        size: bytes.
    """
    best = min(ways, key=lambda way: way.seconds(size))
    return best if best.seconds(size) <= FASTER * ways[0].seconds(size) else ways[0]


@dataclass(frozen=True)
class MeasuredStep:
    """Measured optimizer step, averaged over the ranks.

    Args:
        compute: seconds of forward, backward and optimizer, of all micro-batches, without waits.
        waits: seconds of waiting for other ranks.
        accumulation: number of micro-batches.
        sent: (axis, kind of collective) -> calls and bytes sent per rank.
        gradient_bytes: float32 bytes averaged over replicas; 0: no replicas.
        compressed_bytes: compressor -> bytes sent per rank for the same average.
        compression: the current compressor; ``None``: none.
        average_by: the current method for uncompressed gradients.
    """

    compute: float
    waits: float
    accumulation: int = 1
    sent: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    gradient_bytes: float = 0.0
    compressed_bytes: Mapping[str, float] = field(default_factory=dict)
    compression: str | None = None
    average_by: str = "all_reduce"

    @property
    def window(self) -> float:
        """Seconds of backward of the last micro-batch, which can overlap with sending gradients."""
        return BACKWARD_SHARE * self.compute / self.accumulation


@dataclass(frozen=True)
class Option:
    """Predicted cost of a way to average gradients.

    Args:
        name: ``"dense"``, a compressor, ``"hierarchical"`` or ``"local updates, H=..."``.
        exposed: seconds of waiting per step.
        sent: bytes sent between replicas, per rank and step.
        to_type: overrides that select it; ``""``: the default.
        changes_numbers: whether results change by more than rounding.
    """

    name: str
    exposed: float
    sent: float
    to_type: str = ""
    changes_numbers: bool = False


@dataclass(frozen=True)
class Advice:
    """Predictions and the recommendation.

    Args:
        step: as measured.
        links: as measured.
        options: compared options, the mildest first.
        chosen: the recommended option.
        changed: sentence on what was changed automatically; ``""``: nothing.
    """

    step: MeasuredStep
    links: Sequence[MeasuredLink]
    options: Sequence[Option]
    chosen: Option
    changed: str = ""

    def lines(self) -> list[str]:
        """Return three lines: the measurement, the recommendation and the reason."""
        return [self._measured(), self._recommended(), self._reason()]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; seconds and bytes."""
        step = {**asdict(self.step), "sent": [[*key, *value] for key, value in sorted(self.step.sent.items())]}
        return {
            "step": step,
            "links": [asdict(link) for link in self.links],
            "options": [asdict(option) for option in self.options],
            "recommended": self.chosen.name,
            "type": self.chosen.to_type,
            "changed": self.changed,
            "lines": self.lines(),
        }

    def share(self, option: Option) -> float:
        """Return the fraction of a step spent waiting."""
        whole = self.step.compute + option.exposed
        return option.exposed / whole if whole else 0.0

    def _measured(self) -> str:
        links = "; ".join(
            f"{link.axis} ({link.ranks} ranks) sends {link.bandwidth / 1e6:.4g} MB/s, "
            f"{link.latency * 1e6:.3g} us a message"
            for link in self.links
        )
        step = f"a step computes for {_ms(self.step.compute)} and waits for {_ms(self.step.waits)}"
        return f"Communication: {step}; {links or 'no axis that averages gradients has more than one rank'}."

    def _recommended(self) -> str:
        option = self.chosen
        predicted = f"predicted to wait {_ms(option.exposed)} of a step, {100 * self.share(option):.0f} %"
        if self._is_current(option):
            return f"Recommended: what runs now ({option.name}; {predicted})."
        what = "is recommended only, for it changes the numbers" if option.changes_numbers else "equal to rounding"
        return f"Recommended: {option.name} ({predicted}); type {option.to_type or 'compression=none'} ({what})."

    def _reason(self) -> str:
        dense = self.options[0]
        against = f"{_ms(dense.exposed)} ({100 * self.share(dense):.0f} %)"
        done = self._unexplained() + (f" {self.changed}" if self.changed else "")
        if self.chosen is dense:
            only = " and nothing else serves this layout" if len(self.options) == 1 else ""
            enough = f"at most {100 * ENOUGH:.0f} % of a step" if self.share(dense) <= ENOUGH else "as little as others"
            return f"Because gradients as they are leave {against} of waiting, {enough}{only}.{done}"
        least = "the mildest that leaves" if self.share(self.chosen) <= ENOUGH else "none leaves less than this; all"
        limit = f"at most {100 * ENOUGH:.0f} %" if self.share(self.chosen) <= ENOUGH else f"exceed {100 * ENOUGH:.0f} %"
        return f"Because gradients as they are leave {against} of waiting; {least} {limit}.{done}"

    def _unexplained(self) -> str:
        """Report waits that links do not explain, if they dominate and matter."""
        now = next((option for option in self.options if self._is_current(option)), self.options[0])
        more = self.step.waits - now.exposed
        if more <= max(now.exposed, ENOUGH * (self.step.compute + self.step.waits)):
            return ""
        return f" {_ms(more)} of the waits are not explained by links: look for slow ranks with monitor=stragglers."

    def _is_current(self, option: Option) -> bool:
        dense = _HIERARCHICAL if self.step.average_by == _HIERARCHICAL else _DENSE
        return option.name == (self.step.compression or dense)


def advise(step: MeasuredStep, links: Sequence[MeasuredLink], changed: str = "") -> Advice:
    """Recommend the mildest option that waits at most :data:`ENOUGH` of a step, else the fastest.

    Args:
        step: as measured.
        links: of the axes that average gradients, such as ``"replicate"`` and ``"shard"``, and ``"within"`` and
            ``"across"`` for DDP on several nodes.
        changed: see :class:`Advice`.
    """
    options = options_of(step, links)
    advice = Advice(step, links, options, options[0], changed)
    usable = [option for option in options if option.to_type or option.name == _DENSE]
    enough = next((option for option in usable if advice.share(option) <= ENOUGH), None)
    return Advice(step, links, options, enough or min(usable, key=lambda option: option.exposed), changed)


def options_of(step: MeasuredStep, links: Sequence[MeasuredLink]) -> list[Option]:
    """Return the predicted cost of each option, dense averaging first, then the mildest first."""
    by_axis = {link.axis: link for link in links}
    others = _others(step, by_axis)
    replicate = by_axis.get("replicate")
    if replicate is None or not step.gradient_bytes:
        return [Option(_DENSE, max(others - step.window, 0.0), 0.0)]
    options = [_dense(step, replicate, others), *_hierarchical(step, by_axis)]
    names = [*_MILDEST, *sorted(step.compressed_bytes.keys() - set(_MILDEST))]
    options += [_compressed(step, replicate, others, name) for name in names if name in step.compressed_bytes]
    whole = replicate.seconds("all_reduce", step.gradient_bytes)
    sent = least_bytes("all_reduce", step.gradient_bytes, replicate.ranks)
    for every in LOCAL_STEPS:
        name = "local_sgd" if every == min(LOCAL_STEPS) else "diloco"
        exposed = max(others - step.window, 0.0) + whole / every
        typed = f"strategy={name} strategy.sync_every={every}"
        options.append(Option(f"local updates, H={every}", exposed, sent / every, typed, changes_numbers=True))
    return options


def overlapped(seconds: float, pieces: int, window: float) -> float:
    """Return the exposed part of ``seconds`` of collectives, in equal pieces that overlap with backward.

    The first piece starts when its share of backward is done, the last when all of it is.
    """
    return max(seconds - window * (1 - 1 / pieces), seconds / pieces)


def best_bucket_bytes(link: MeasuredLink, gradient_bytes: float) -> float:
    """Return the bucket size in bytes that minimizes exposed time, if communication fits behind backward.

    k buckets cost ``k A + B / k``, with A the latency of an all-reduce and B the time of all bytes; the minimum is at
    ``k = sqrt(B / A)``. (Shi, Chu and Li, "MG-WFBP", INFOCOM 2019, also schedules by each layer's time.)
    """
    latency = link.seconds("all_reduce", 0.0)
    return best_piece_bytes(latency, link.seconds("all_reduce", gradient_bytes) - latency, gradient_bytes)


def best_piece_bytes(latency: float, sending: float, gradient_bytes: float) -> float:
    """Return the bucket size of :func:`best_bucket_bytes` for known times.

    Args:
        latency: A, seconds.
        sending: B, seconds.
        gradient_bytes: of all gradients.
    """
    pieces = math.sqrt(sending / latency) if latency else math.inf
    return gradient_bytes / max(pieces, 1.0)


def _dense(step: MeasuredStep, link: MeasuredLink, others: float) -> Option:
    sent = least_bytes("all_reduce", step.gradient_bytes, link.ranks)
    calls = 1.0 if step.compression else step.sent.get(("replicate", "all_reduce"), (1.0, 0.0))[0]
    pieces = max(round(calls), 1)
    exposed = overlapped(others + link.seconds_of(sent, rounds=2 * pieces), pieces, step.window)
    return Option(_DENSE, exposed, sent)


def _compressed(step: MeasuredStep, link: MeasuredLink, others: float, name: str) -> Option:
    # Compressed gradients are sent after backward, see docs/compression.md.
    sent = step.compressed_bytes[name]
    exposed = max(others - step.window, 0.0) + link.seconds_of(sent, rounds=2)
    return Option(name, exposed, sent, f"compression={name}" if name in _MILDEST else "", changes_numbers=True)


def _hierarchical(step: MeasuredStep, links: Mapping[str, MeasuredLink]) -> list[Option]:
    """Predict reduce-scatter within a node, all-reduce of a part across nodes, all-gather within."""
    if "within" not in links or "across" not in links:
        return []
    within, across, size = links["within"], links["across"], step.gradient_bytes
    part = size / within.ranks
    seconds = within.seconds("reduce_scatter", size) + across.seconds("all_reduce", part)
    seconds += within.seconds("all_gather", size)
    typed = "strategy.average_by=hierarchical"
    sent = least_bytes("all_reduce", part, across.ranks)
    return [Option(_HIERARCHICAL, max(seconds - step.window, 0.0), sent, typed)]


def _others(step: MeasuredStep, links: Mapping[str, MeasuredLink]) -> float:
    """Return the seconds of collectives along axes that no option changes."""
    return sum(
        links[axis].seconds_of(sent, rounds=_ROUNDS.get(kind, 1) * calls)
        for (axis, kind), (calls, sent) in step.sent.items()
        if axis in links and axis != "replicate"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
