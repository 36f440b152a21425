"""Seconds of a step with parameter servers on a slow link: pushes and pulls overlapped with computing, or after it.

A network of ``--layers`` square layers of ``--width``, synchronous, two ranks by default and one server. What a device
takes for a layer is a sleep, forward ``--milliseconds`` and backward twice as much, so that ranks do not compete for
the cores of this machine. Reports seconds of a step on a loopback device of rate ``--link``, shared by all ranks (in
a network namespace of its own: ``unshare``, ``ip`` and ``tc`` of Linux), sides in turns, and how many times longer a
step takes than with the overlap. DDP, which overlaps too, is shown for comparison.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, table_of
from benchmarks.slow_link import on_a_slow_link
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

OVERLAPPED, AFTER = "overlap", "after"
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OVERLAPPED: ("parameter_server", {}),
    AFTER: ("parameter_server", {"overlap": False}),
    "ddp": ("ddp", {"bucket_cap_mb": 1}),
}
# A step without the overlap over one with it.
LEAST = 1.1
_WARM_UP_STEPS = 2


class _Pause(torch.autograd.Function):
    """A layer's time on a device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Sleep twice as long."""
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layers(pl.LightningModule):
    """Layers that take their time.

    Args:
        layers: how many.
        width: of each.
        seconds: of a layer in the forward pass.
    """

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.seconds = seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean square."""
        (x,) = batch
        for layer in self.layers:
            x = _Pause.apply(layer(x), self.seconds)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """When steps began, in seconds."""

    looks_at_parameters = False

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Look at the clock."""
        self.begins.append(time.perf_counter())


def train(side: str, layers: int, width: int, seconds: float, steps: int) -> float:
    """Median seconds of a step; on every rank."""
    silence_lightning()
    name, options = SIDES[side]
    torch.manual_seed(0)
    module, clock = Layers(layers, width, seconds), Clock()
    trainer = Trainer(
        **PLAIN_TRAINER,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=make_strategy(name, **options),
        max_steps=_WARM_UP_STEPS + steps + 1,
        max_epochs=-1,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, width)), batch_size=4))
    begins = clock.begins[_WARM_UP_STEPS:]
    return median(after - before for before, after in zip(begins, begins[1:], strict=False))


def rows_of(taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per side; ratios are of the same round."""
    return [
        {
            "side": side,
            "step_seconds": round(median(seconds), 3),
            "least": round(min(seconds), 3),
            "most": round(max(seconds), 3),
            "times overlap": round(median(a / b for a, b in zip(seconds, taken[OVERLAPPED], strict=True)), 2),
        }
        for side, seconds in taken.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="how many (default: %(default)s)")
    add("--layers", type=int, default=8, help="of the network (default: %(default)s)")
    add("--width", type=int, default=512, help="of a layer; 4 x its square are its bytes (default: %(default)s)")
    add("--milliseconds", type=float, default=20.0, help="of a layer, forward (default: %(default)s)")
    add("--steps", type=int, default=6, help="that are timed (default: %(default)s)")
    add("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    add("--link", default="500mbit", help="rate of the link (default: %(default)s); none: as it is")
    add("--timed-here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ranks < 2 or min(given.layers, given.width, given.steps, given.repeats) < 1:
        parser.error("--ranks must be at least 2; --layers, --width, --steps and --repeats at least 1")
    if not given.timed_here and given.link != "none":
        options = ("ranks", "layers", "width", "milliseconds", "steps", "repeats")
        more = [word for name in options for word in (f"--{name}", str(getattr(given, name)))]
        taken = on_a_slow_link(given.link, "benchmarks.overlap", ["--timed-here", *more])
    else:
        sizes = given.layers, given.width, given.milliseconds / 1e3, given.steps
        runs = {side: lambda side=side: run_ranks(train, given.ranks, side, *sizes)[0] for side in SIDES}
        taken = alternate(runs, given.repeats, lambda seconds: f"{seconds:.3f} s")
        if given.timed_here:
            print(json.dumps(taken))
            return
    rows = rows_of(taken)
    ratio = next(row["times overlap"] for row in rows if row["side"] == AFTER)
    goals = [Goal("seconds of a step without overlap over those with it", ratio, LEAST, at_least=True)]
    finish("overlap", [table_of(f"{given.ranks} ranks, link {given.link}", rows)], goals, {"rows": rows})


if __name__ == "__main__":
    main()
