"""Summary of a run printed at its start, and its run directory printed at its end."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from trainwright.core.run.peers import service_of

MIB = 2**20


class StartSummary(Callback):
    """Print a table when training starts, and the run directory when it has ended, on rank 0.

    The table shows the strategy, its layout, parameter bytes per rank and how the global batch is made. TensorBoard
    loggers get it as the text ``run/layout``. Ranks exchange their parameter bytes once.

    Args:
        console: prints; ``None``: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        held = least_and_most_bytes(trainer, pl_module)  # a collective of all ranks
        if not trainer.is_global_zero:
            return
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        rows = [
            ("strategy", _strategy(trainer)),
            ("precision", str(trainer.precision)),
            ("parameters", _parameters(trainer, pl_module, held)),
            ("global batch", _global_batch(trainer)),
            *_servers(trainer),
        ]
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("run/layout", _markdown(rows), trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the run directory, if a logger wrote anything."""
        if not trainer.is_global_zero or not trainer.loggers:
            return
        directory = os.path.relpath(trainer.default_root_dir)
        if directory.startswith(".."):
            directory = os.path.abspath(directory)
        lines = [f"Run directory: {directory}"]
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            lines.append(f"TensorBoard:   tensorboard --logdir {directory}")
        for line in lines:
            # Plain and unwrapped, so that it can be copied.
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)


def _markdown(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| run | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def least_and_most_bytes(trainer: Trainer, pl_module: LightningModule) -> tuple[int, int]:
    """Return the minimum and maximum over ranks of the bytes of parameters held. A collective."""
    measures = getattr(trainer.strategy, "measures", None)
    own = measures.held_bytes().parameters if measures is not None else _local_bytes(pl_module)
    extremes = torch.tensor([-own, own], dtype=torch.int64, device=trainer.strategy.root_device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    least, most = extremes.tolist()
    return -least, most


def _local_bytes(pl_module: LightningModule) -> int:
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in pl_module.parameters()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _strategy(trainer: Trainer) -> str:
    name = type(trainer.strategy).__name__
    layout = getattr(trainer.strategy, "layout", None)
    shape = f", {layout}" if layout is not None and trainer.world_size > 1 else ""
    nodes = f" of {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{name} on {_count(trainer.world_size, 'rank')}{nodes} ({trainer.strategy.root_device.type}){shape}"


def _parameters(trainer: Trainer, pl_module: LightningModule, held: tuple[int, int]) -> str:
    known = getattr(trainer.strategy, "num_parameters", None)  # of the whole module, where ranks hold parts
    whole = sum(parameter.numel() for parameter in pl_module.parameters()) if known is None else known
    return f"{whole:,}; each rank holds {_span(*held)}"


def _global_batch(trainer: Trainer) -> str:
    batch = getattr(trainer, "global_batch", None)
    if batch is None:  # Lightning's own Trainer
        ours = getattr(trainer.strategy, "ranks", None)
        ranks = _count(trainer.world_size if ours is None else ours.num_data_ranks, "data rank")
        return f"micro-batch x accumulation {trainer.accumulate_grad_batches} x {ranks}"
    return (
        f"{_count(batch.size, 'sample')} a step = micro-batch {batch.micro_batch_size} "
        f"x accumulation {batch.accumulation} x {_count(batch.data_ranks, 'data rank')}"
    )


def _servers(trainer: Trainer) -> list[tuple[str, str]]:
    """Return a row that names the ranks with a parameter server, if there are any."""
    bytes_of: dict[int, int] = service_of(trainer.strategy).server_bytes()
    if not bytes_of:
        return []
    size = _span(min(bytes_of.values()), max(bytes_of.values()))
    what = "doing nothing else" if min(bytes_of) >= trainer.world_size else "colocated with workers"
    ranks = ", ".join(map(str, sorted(bytes_of)))
    one = len(bytes_of) == 1
    return [("servers", f"on rank{'' if one else 's'} {ranks}, {what}; {'it' if one else 'each'} holds {size} of them")]


def _span(least: int, most: int) -> str:
    """Format bytes: one number if both read the same."""
    first, last = (f"{size / MIB:,.2f}" for size in (least, most))
    return f"{last} MiB" if first == last else f"{first} to {last} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
