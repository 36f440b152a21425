"""Interface to ranks that step independently, or that only serve; no-ops for most strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class EndNotice(NamedTuple):
    """Notice to a worker to end.

    Args:
        number: of a signal, or another positive number that identifies the source.
        age: seconds since.
    """

    number: int
    age: float


class ReceivedNotice(NamedTuple):
    """Notice to end, as received from a rank.

    Args:
        number: see :class:`EndNotice`.
        age: see :class:`EndNotice`.
        steps_left: steps this worker still makes; 0: it ends now.
    """

    number: int
    age: float
    steps_left: int


class Peers:
    """The other ranks that train; by default all make each step together."""

    is_apart: bool = False
    """True while this rank alone saves a state for a rank that joins.

    No collective may run then; this rank provides what is kept of every data rank.
    """

    @property
    def fit_store(self) -> Any:
        """Store of the current ``fit`` only; ``None``: the process group's.

        For strategies whose ranks may be restarted while others train, so that they share no process group.
        """
        return None

    def meet(self) -> None:
        """Synchronize the parameters of ranks that step independently, waiting for the slowest; a collective.

        The Trainer calls it where all ranks pass in the same order: before validation, at the end of an epoch and
        before saving.
        """

    def share(self) -> None:
        """Make equal what ranks share and derive from their own samples, such as running statistics. A collective.

        The Trainer calls it before the first batch of an evaluation, since callbacks may exchange the weights.
        """

    def tell_of_end(self, notice: Callable[[], EndNotice | None]) -> None:
        """Send notices to end along with this rank's steps, for ranks that step independently.

        Args:
            notice: returns this rank's notice, ``None`` for none; called at every step.
        """

    @property
    def heard_of_end(self) -> ReceivedNotice | None:
        """Notice to end from any rank, and after which step all end.

        ``None``: no notice, or ranks cannot communicate between two synchronizations.
        """
        return None


class Service:
    """Ranks that only serve the others; none by default."""

    @property
    def serves(self) -> bool:
        """True if this rank only serves the others, which are all of ``world_size``, and is no data-parallel rank.

        The Trainer then calls :meth:`serve` in ``fit`` instead of training.
        """
        return False

    def serve(self) -> None:
        """Serve until the other ranks have ended their ``fit``; only on ranks that serve, after setup.

        Raises:
            SystemExit, RuntimeError: if the other ranks failed, as they did.
        """
        raise NotImplementedError

    def server_bytes(self) -> dict[int, int]:
        """Return the bytes of parameters on each server rank during training."""
        return {}

    def server_traffic(self) -> dict[int, tuple[int, int]]:
        """Return messages and bytes sent so far by each server rank during training.

        No collective. Traffic of servers beside data-parallel ranks is in those ranks' ``measure_communication``.
        """
        return {}


def peers_of(strategy: Any) -> Peers:
    """Return the peers of a strategy; for Lightning's own, those that make each step together."""
    found: Peers = getattr(strategy, "peers", _TOGETHER)
    return found


def service_of(strategy: Any) -> Service:
    """Return the service of a strategy; Lightning's own have no servers."""
    found: Service = getattr(strategy, "service", _UNSERVED)
    return found


_TOGETHER, _UNSERVED = Peers(), Service()
