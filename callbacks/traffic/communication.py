"""Report of communication: logged during training, and a table at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table

from trainwright.callbacks.monitor.records import publish
from trainwright.callbacks.steps import are_synchronous, require_strategy
from trainwright.callbacks.windows import StopsWithTraining, Windowed
from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.run.peers import service_of
from trainwright.core.text.sizes import size_text

# Calls, bytes and minimum bytes, by axis and kind of collective.
Sums = dict[tuple[str, str], list[float]]


def add_counts(sums: Sums, counts: Mapping[tuple[str, str], Any]) -> None:
    """Add the counts of a meter."""
    for key, sent in counts.items():
        row = sums.setdefault(key, [0.0, 0.0, 0.0])
        for index, value in enumerate((sent.calls, sent.bytes, sent.least)):
            row[index] += value


class Metered(StopsWithTraining):
    """A callback that meters what ranks send until training ends."""

    _meter: Any = None

    def _stop(self) -> None:
        super()._stop()
        if self._meter is not None:
            self._meter.stop()
            self._meter = None


class CommunicationReport(Metered, Windowed):
    """Log the bytes that a rank sends per step, by mesh axis and kind of collective, and print a table at the end.

    Logged per window are ``communication/<axis>/<kind>_bytes`` and their sum ``communication/bytes``: bytes sent by
    rank 0 per optimizer step, on average. The table covers all ranks, which exchange their counts once at the end (rank
    0 only, if steps are asynchronous). What is sent outside of steps (validation, checkpoints, logging) is reported
    apart.

    Counting costs some microseconds per collective, see
    :mod:`trainwright.strategies.contract.communication.calls`.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 logs nothing,
            and only prints the table).
        console: prints; ``None``: standard output.

    Attributes:
        latest: values logged last; empty before the end of the first window.
        of_ranks: of every rank at the end: ``steps`` (optimizer steps), ``within`` and ``besides`` (totals within and
            outside of steps: rows of axis, kind, calls, bytes, minimum bytes).
        of_servers: messages and bytes of each server rank at the end; on rank 0.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None, console: Console | None = None) -> None:
        super().__init__(every_n_steps)
        self.console = console or Console()
        self.latest: dict[str, float] = {}
        self.of_ranks: list[dict[str, Any]] = []
        self.of_servers: dict[int, tuple[int, int]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` for a strategy of Lightning."""
        if stage == "fit":
            require_strategy(self, trainer, "measures")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        super().on_train_start(trainer, pl_module)
        self._total = 0  # optimizer steps of this fit
        self._within: Sums = {}
        self._besides: Sums = {}
        self.latest, self.of_ranks, self.of_servers = {}, [], {}
        self._meter = trainer.strategy.measures.measure_communication()  # type: ignore[attr-defined]
        if self._meter.unknown:
            rank_zero_warn(
                f"Calls of {', '.join(self._meter.unknown)} are not counted: unknown to this version of torch."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count what was sent since the last micro-batch as outside of steps."""
        add_counts(self._besides, self._meter.take())

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Count the micro-batch; at the end of a window, log."""
        counts = self._meter.take()
        add_counts(self._recent, counts)
        add_counts(self._within, counts)
        super().on_train_batch_end(trainer, *args)

    def _end_step(self, trainer: Trainer, step: int) -> None:
        self._total += 1
        super()._end_step(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new window; bytes sent for undone steps stay in the totals."""
        super().on_gone_back(trainer, pl_module)
        self._recent: Sums = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the totals. A collective if steps are synchronous."""
        if self._meter is None:
            return
        add_counts(self._besides, self._meter.take())
        self._stop()
        if trainer.is_global_zero:
            self.of_servers = service_of(trainer.strategy).server_traffic()
        own = {"steps": self._total, "within": _listed(self._within), "besides": _listed(self._besides)}
        several = are_synchronous(trainer) and dist.is_available() and dist.is_initialized()
        self.of_ranks = all_gather_values(own, device=trainer.strategy.root_device) if several else [own]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table on rank 0, unless nothing was sent."""
        if not trainer.is_global_zero or not any(rank["within"] or rank["besides"] for rank in self.of_ranks):
            return
        for part in report_of(self.of_ranks, self.of_servers):
            self.console.print(part, soft_wrap=isinstance(part, str), highlight=False)

    def _report(self, trainer: Trainer, step: int) -> None:
        sent: dict[str, dict[str, float]] = {}
        self.latest = {}
        for (axis, kind), row in sorted(self._recent.items()):
            self.latest[f"communication/{axis}/{kind}_bytes"] = row[1] / self._done
            sent.setdefault(axis, {})[kind] = row[1] / self._done
        self.latest["communication/bytes"] = sum(self.latest.values())
        publish(trainer, step, "bytes", {"bytes": sent}, self.latest)
        self._recent = {}


def report_of(
    ranks: Sequence[Mapping[str, Any]], servers: Mapping[int, tuple[int, int]] | None = None
) -> list[Table | str]:
    """Return the final report: a table, a line on traffic outside of steps, and one per server rank.

    Args:
        ranks: see :attr:`CommunicationReport.of_ranks`.
        servers: see :attr:`CommunicationReport.of_servers`.
    """
    senders = "rank 0" if len(ranks) == 1 else f"each of {len(ranks)} ranks"
    table = Table(title=f"Sent by {senders} in a step", title_justify="left", box=None, pad_edge=False)
    table.add_column("axis")
    table.add_column("collective")
    for name in ("calls", "bytes", "at most", "least needed"):
        table.add_column(name, justify="right")
    keys = {(row[0], row[1]) for rank in ranks for row in rank["within"]}
    shares = {key: [_share(rank, key) for rank in ranks] for key in keys}
    for key, rows in sorted(shares.items(), key=lambda item: (-sum(row[1] for row in item[1]), item[0])):
        table.add_row(*key, *_cells(rows))
    if len(keys) > 1:
        of_each = zip(*shares.values(), strict=True)
        table.add_row("all", "", *_cells([[sum(values) for values in zip(*rows, strict=True)] for rows in of_each]))
    besides = sum(row[3] for rank in ranks for row in rank["besides"]) / len(ranks)
    parts: list[Table | str] = [table] if keys else []
    if besides:
        parts.append(f"Besides steps (validation, checkpoints, logging): {size_text(besides, digits=2)} a rank in all.")
    for rank, (messages, sent) in (servers or {}).items():
        parts.append(f"Rank {rank}, which only serves: {size_text(sent, digits=2)} in all, in {messages:,} messages.")
    return parts


def _share(rank: Mapping[str, Any], key: tuple[str, str]) -> list[float]:
    """Return calls, bytes and minimum bytes of a rank per step."""
    steps = max(rank["steps"], 1)
    return next(([value / steps for value in row[2:]] for row in rank["within"] if tuple(row[:2]) == key), [0.0] * 3)


def _cells(rows: Sequence[Sequence[float]]) -> list[str]:
    """Format mean calls and bytes over ranks, the maximum bytes of a rank, and the mean minimum bytes."""
    calls, sent, least = (sum(row[index] for row in rows) / len(rows) for index in range(3))
    sizes = (sent, max(row[1] for row in rows), least)
    return [f"{calls:.4g}", *(size_text(size, digits=2) for size in sizes)]


def _listed(sums: Sums) -> list[list[Any]]:
    return [[*key, *row] for key, row in sorted(sums.items())]
