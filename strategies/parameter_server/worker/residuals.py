"""What workers have not pushed yet, as compression had left it out: in a run state, and taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.averaged import Averaging
from trainwright.strategies.averaging.compression.options import CompressionChoice
from trainwright.strategies.parameter_server.worker.client import Client
from trainwright.strategies.state.rank_state import COMPRESSION, NOTHING_KEPT, KeptBack, of_rank, rank_of

# What a run state says of it.
PUSHES = "pushes"


class PushResiduals:
    """What the pushes of one worker have left out.

    Args:
        compression: of pushes; ``None``: nothing is left out.
    """

    def __init__(self, compression: CompressionChoice | None) -> None:
        self._compression = compression
        self._loaded: tuple[dict[str, Tensor], int] | None = None  # by server, and of which plan

    @property
    def left_behind(self) -> dict[str, str] | None:
        """What a run state says to those who cannot read this; ``None``: there is nothing to say."""
        return None if self._compression is None else {"of": PUSHES, "text": _unpushed(self._compression.name)}

    def kept_back(self, client: Client) -> KeptBack:
        """For a run state."""
        if self._compression is None or client.residuals is None:
            return NOTHING_KEPT
        of_rank = {f"{PUSHES}/{server}": residual for server, residual in enumerate(client.residuals)}
        about = {"name": self._compression.name, "steps": 0, "kinds": [], PUSHES: client.plan.served}
        return KeptBack({}, of_rank, about)

    def load(self, state: RunState | SnapshotReader, saved: Mapping[str, Any], rank: int | None) -> None:
        """Read what a worker had left out, to be taken up when there is a client.

        Args:
            state: that was saved.
            saved: what it says of compression.
            rank: of the worker; ``None``: its run had other workers, so that nothing is read.
        """
        if self._compression is None or PUSHES not in saved or rank is None:
            self._say_what_is_dropped(saved)
        else:
            self._loaded = of_rank(state, rank, f"{PUSHES}/"), saved[PUSHES]

    def take_up(self, client: Client) -> None:
        """Go on with what was loaded, if the same servers have the same."""
        if self._loaded is None:
            return
        (residuals, served), self._loaded = self._loaded, None
        assert self._compression is not None
        assert client.residuals is not None
        if served != client.plan.served:
            self._say_what_is_dropped({"name": self._compression.name, PUSHES: served})
            return
        for server, residual in enumerate(client.residuals):
            residual.copy_(residuals[str(server)])

    @staticmethod
    def _say_what_is_dropped(saved: Mapping[str, Any]) -> None:
        if PUSHES in saved:
            rank_zero_warn(f"Going on with other workers, servers or compression: {_unpushed(saved['name'])}.")
        elif saved["kinds"]:
            rank_zero_info(f"What compression={saved['name']} had kept back of averaged gradients is dropped.")


class PushedAverages(Averaging):
    """Servers average; what is left out of a push is kept back.

    Args:
        strategy: of parameter servers.
        residuals: what its worker has left out.
    """

    def __init__(self, strategy: Any, residuals: PushResiduals) -> None:
        self._strategy, self._residuals = strategy, residuals

    def kept_back(self, complete: bool) -> KeptBack:
        client, is_apart = self._strategy.client, self._strategy.peers.is_apart
        return NOTHING_KEPT if client is None or is_apart else self._residuals.kept_back(client)

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None:
        strategy, saved = self._strategy, of_run.get(COMPRESSION)
        if saved is None or strategy.traits.joins:
            return
        rank: int | None = None
        if Layout(**of_run["layout"]) == strategy.layout:
            rank = rank_of(state) if isinstance(state, SnapshotReader) else strategy._rank
        self._residuals.load(state, saved, rank)
        if strategy.client is not None:  # training goes back
            self._residuals.take_up(strategy.client)


def _unpushed(name: str) -> str:
    return f"what workers had not pushed yet, as compression={name} had left it out, is dropped"
