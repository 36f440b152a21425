"""What a rank has to do with ranks that step by themselves, or that only serve; nothing, under most strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class EndNotice(NamedTuple):
    """What a worker was told.

    Args:
        number: of a signal, or another one above 0 that says who gave the notice.
        age: seconds since.
    """

    number: int
    age: float


class HeardNotice(NamedTuple):
    """What a worker hears of a notice.

    Args:
        number: see :class:`EndNotice`.
        age: see :class:`EndNotice`.
        steps_left: that this worker still makes; 0: it ends now.
    """

    number: int
    age: float
    steps_left: int


class Peers:
    """The ranks that train beside this one; here all make each step together."""

    is_apart: bool = False
    """Whether this rank makes a state of the run while the others do not, to give it to one that joins.

    Nothing may be gathered then: what is kept of every data rank is this one's for all.
    """

    @property
    def fit_store(self) -> Any:
        """The store of the present ``fit`` alone; ``None``: the process group's.

        Of a strategy whose ranks may be started anew while the others train: theirs has no process group in common.
        """
        return None

    def meet(self) -> None:
        """Bring ranks that step by themselves to the same parameters, waiting for the slowest; a collective.

        The Trainer calls it where all ranks pass in the same order: before a validation, at the end of an epoch, and
        before a state is saved.
        """

    def tell_of_end(self, notice: Callable[[], EndNotice | None]) -> None:
        """Let ranks that step by themselves hear with this rank's steps of a notice to end.

        Args:
            notice: what this rank was told, ``None``: nothing; asked at every step.
        """

    @property
    def heard_of_end(self) -> HeardNotice | None:
        """That one of the ranks was told to end, and after which step all do.

        ``None``: nothing was heard, or ranks have no way to tell each other between two meetings.
        """
        return None


class Service:
    """Ranks that only serve the others; here there are none."""

    @property
    def serves(self) -> bool:
        """Whether this rank only serves the others, which are all of ``world_size``, and is no data rank.

        Then the Trainer calls :meth:`serve` in ``fit``, in place of training, and does nothing else here.
        """
        return False

    def serve(self) -> None:
        """On a rank that only serves, once it is set up: do so until the other ranks have ended their ``fit``.

        Raises:
            SystemExit, RuntimeError: as they have ended, if not well.
        """
        raise NotImplementedError

    def server_bytes(self) -> dict[int, int]:
        """Return the bytes of parameters that servers hold while training goes on, by rank."""
        return {}

    def server_traffic(self) -> dict[int, tuple[int, int]]:
        """Return messages and bytes sent so far by ranks that only serve, by rank, while training goes on.

        No collective. What servers beside data ranks send is in what these measure, see ``measure_communication``.
        """
        return {}


def peers_of(strategy: Any) -> Peers:
    """Return the peers of a rank; of Lightning's own strategies, those that make each step together."""
    found: Peers = getattr(strategy, "peers", _TOGETHER)
    return found


def service_of(strategy: Any) -> Service:
    """Return the service of a strategy; none of Lightning's own has servers."""
    found: Service = getattr(strategy, "service", _UNSERVED)
    return found


_TOGETHER, _UNSERVED = Peers(), Service()
