"""Compression residuals of workers in run states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.options import CompressionChoice
from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.contract.gradients import sum_gradients
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.state.rank_state import COMPRESSION, NOTHING_KEPT, KeptBack, of_rank, rank_of

# Key in run states.
PUSHES = "pushes"


class PushedAverages(Averaging):
    """Averages made by servers, with residuals of pushes; made by workers before where hooks read gradients.

    Args:
        strategy: of parameter servers.
        pushed: compression of pushes; ``None``: no residuals.
    """

    def __init__(self, strategy: Any, pushed: CompressionChoice | None) -> None:
        self._strategy, self._pushed = strategy, pushed
        self._loaded: tuple[dict[str, Tensor], int] | None = None  # residuals by server, and digest of their plan

    @property
    def runs(self) -> bool:  # type: ignore[override]
        """See the base class."""
        served = self._strategy._served
        return served is not None and served.shows_averages and served.ends_step

    def average(self) -> None:
        """See the base class; servers then average equal gradients."""
        trained = [parameter for parameter in self._strategy._served.parameters if parameter.requires_grad]
        assert dist.group.WORLD is not None
        sum_gradients(trained, dist.group.WORLD)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= self._strategy.world_size

    # ---- residuals --------------------------------------------------------------------------------------------------

    @property
    def left_behind(self) -> dict[str, str] | None:
        """Entry of a run state for strategies that cannot read residuals; ``None``: none."""
        return None if self._pushed is None else {"of": PUSHES, "text": _unpushed(self._pushed.name)}

    def kept_back(self, complete: bool) -> KeptBack:
        client = self._strategy.client
        if client is None or self._strategy.peers.is_apart or self._pushed is None:
            return NOTHING_KEPT
        of_rank = {f"{PUSHES}/{server}": residual for server, residual in enumerate(client.residuals)}
        about = {"name": self._pushed.name, "steps": 0, "kinds": [], PUSHES: client.plan.served}
        return KeptBack({}, of_rank, about)

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        """See the base class; residuals of other workers are dropped."""
        strategy, saved = self._strategy, of_run.get(COMPRESSION)
        if saved is None or strategy.traits.joins:
            return
        if self._pushed is None or PUSHES not in saved or Layout(**of_run["layout"]) != strategy.layout:
            self._log_dropped(saved)
            return
        rank = rank_of(state) if isinstance(state, SnapshotReader) else strategy._rank
        self._loaded = of_rank(state, rank, f"{PUSHES}/"), saved[PUSHES]
        if strategy.client is not None:  # rolled back within a run
            self.take_up(strategy.client)

    def take_up(self, client: Client) -> None:
        """Restore loaded residuals, if servers hold the same slices."""
        if self._loaded is None:
            return
        (residuals, served), self._loaded = self._loaded, None
        assert self._pushed is not None
        assert client.residuals is not None
        if served != client.plan.served:
            self._log_dropped({"name": self._pushed.name, PUSHES: served})
            return
        for server, residual in enumerate(client.residuals):
            residual.copy_(residuals[str(server)])

    @staticmethod
    def _log_dropped(saved: Mapping[str, Any]) -> None:
        if PUSHES in saved:
            rank_zero_warn(f"Resumed with other workers, servers or compression: {_unpushed(saved['name'])}.")
        elif saved["kinds"]:
            rank_zero_info(f"The residual of compression={saved['name']} on averaged gradients is dropped.")


def _unpushed(name: str) -> str:
    return f"the residual of compression={name} in workers (not pushed yet) is dropped"
