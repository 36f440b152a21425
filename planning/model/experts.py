"""Where tokens go in a pass that nobody else takes part in: to all experts alike, or as evenly as was seen in a run.

Under expert parallelism a rank computes what arrives, and what arrives depends on values that a plan does not have. The
engine's own exchange runs nevertheless, its two questions about values answered by counts. With N tokens of each of S
ranks, K of E experts chosen by each token, and all sets of K equally likely:

- a token goes to a rank with probability p = 1 - C(E - E/S, K) / C(E, K), once however many of its experts are there,
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
    """How much a rank has to do with other ranks' tokens, as parts of what an even routing gives it.

    Args:
        sent: rows that leave it.
        received: rows that arrive.
        computed: pairs of a row and an expert.
    """

    sent: float = 1.0
    received: float = 1.0
    computed: float = 1.0


EVEN = Routing()


def part_that_travels(experts: int, chosen: int, ranks: int) -> float:
    """Probability that a token has one of its experts on a given rank.

    Args:
        experts: of a layer.
        chosen: experts of a token.
        ranks: that share the experts.
    """
    return 1 - math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)


def assume_routing(dispatchers: Iterable[Dispatcher], routing: Routing) -> None:
    """Let exchanges of tokens take counts for answers; nothing is asked of values."""
    for dispatcher in dispatchers:
        dispatcher.answers = Assumed(dispatcher, routing)


class Assumed:
    """Tells an exchange where tokens go, with tensors of the sizes that are assumed.

    Args:
        dispatcher: the exchange.
        routing: how evenly tokens are spread.
    """

    def __init__(self, dispatcher: Dispatcher, routing: Routing) -> None:
        self._experts, self._size, self._per_rank = dispatcher.layer.experts, dispatcher.size, dispatcher.per_rank
        self._routing = routing
        self._pairs = 0

    def agree(self, index_NK: Tensor) -> TokenRoutes:  # noqa: N803
        """As many rows to each rank, and as many from each."""
        tokens, chosen = index_NK.shape
        travel = tokens * self._size * part_that_travels(self._experts, chosen, self._size)
        sent, received = (round(travel * part) for part in (self._routing.sent, self._routing.received))
        rows = torch.arange(sent, device=index_NK.device)
        # Both are views of one tensor, as `nonzero` gives them.
        destination, token = torch.stack((rows * self._size // max(sent, 1), rows % tokens), 1).unbind(1)
        self._pairs = round(tokens * chosen * self._routing.computed)
        return TokenRoutes(token, destination, self._dealt(sent), self._dealt(received), unused=[])

    def _dealt(self, rows: int) -> list[int]:
        bounds = [rows * rank // self._size for rank in range(self._size + 1)]
        return [after - before for before, after in pairwise(bounds)]

    def places(self, local_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
        """The pairs dealt out to rows and experts in turn."""
        rows, chosen = local_MK.shape
        pairs = rows if 1 in (chosen, self._per_rank) else max(self._pairs, rows)
        numbers = torch.arange(pairs, device=local_MK.device)
        row, choice = torch.stack((numbers * rows // max(pairs, 1), numbers % chosen), 1).unbind(1)
        return row, choice, numbers % self._per_rank
