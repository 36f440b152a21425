"""Assumed routing of tokens to experts for passes without values: even, or as imbalanced as measured in a run.

Under expert parallelism a rank computes the tokens that arrive, which depend on values that a plan does not have. The
engine's own exchange runs, with counts instead of values. With N tokens on each of S ranks, K of E experts per token,
and all sets of K equally likely:

- a token is sent to a rank with probability p = 1 - C(E - E/S, K) / C(E, K), once for all its experts there,
- S N p rows leave a rank and as many arrive,
- N K pairs of a row and an expert are computed there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainwright.strategies.expert.engine import Dispatcher, TokenRoutes


@dataclass(frozen=True)
class Routing:
    """Load of a rank relative to even routing.

    Args:
        sent: rows sent.
        received: rows received.
        computed: pairs of a row and an expert.
    """

    sent: float = 1.0
    received: float = 1.0
    computed: float = 1.0


EVEN = Routing()


def probability_sent(experts: int, chosen: int, ranks: int) -> float:
    """Return the probability that a token has one of its experts on a given rank.

    Args:
        experts: of a layer.
        chosen: experts per token.
        ranks: sharing the experts.
    """
    return 1 - math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)


def assume_routing(dispatchers: Iterable[Dispatcher], routing: Routing) -> None:
    """Make dispatchers use assumed counts instead of values."""
    for dispatcher in dispatchers:
        dispatcher.answers = AssumedRouting(dispatcher, routing)


class AssumedRouting:
    """Routing answers of assumed sizes for an exchange.

    Args:
        dispatcher: the exchange.
        routing: load of this rank.
    """

    def __init__(self, dispatcher: Dispatcher, routing: Routing) -> None:
        self._experts, self._size, self._per_rank = dispatcher.layer.experts, dispatcher.size, dispatcher.per_rank
        self._routing = routing
        self._pairs = 0

    def agree(self, index_NK: Tensor) -> TokenRoutes:  # noqa: N803
        """Return the assumed number of rows, spread evenly over ranks."""
        tokens, chosen = index_NK.shape
        travel = tokens * self._size * probability_sent(self._experts, chosen, self._size)
        sent, received = (round(travel * part) for part in (self._routing.sent, self._routing.received))
        rows = torch.arange(sent, device=index_NK.device)
        # Both are views of one tensor, like the result of `nonzero`.
        destination, token = torch.stack((rows * self._size // max(sent, 1), rows % tokens), 1).unbind(1)
        self._pairs = round(tokens * chosen * self._routing.computed)
        return TokenRoutes(token, destination, self._evenly(sent), self._evenly(received))

    def _evenly(self, rows: int) -> list[int]:
        bounds = [rows * rank // self._size for rank in range(self._size + 1)]
        return [after - before for before, after in pairwise(bounds)]

    def places(self, local_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
        """Return pairs assigned to rows and experts round-robin."""
        rows, chosen = local_MK.shape
        pairs = rows if 1 in (chosen, self._per_rank) else max(self._pairs, rows)
        numbers = torch.arange(pairs, device=local_MK.device)
        row, choice = torch.stack((numbers * rows // max(pairs, 1), numbers % chosen), 1).unbind(1)
        return row, choice, numbers % self._per_rank
