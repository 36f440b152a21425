"""Operations of workers on a server, and the header of a push."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from trainwright.strategies.parameter_server.messages.wire import FIXED
from trainwright.strategies.parameter_server.server.shard import ShardPlan

# Tag of a payload whose size is in the header.
BYTES = 2
# Flags of each slice in a push.
HAS_GRADIENT, IS_LATE = 1, 2


class Operation(IntEnum):
    """Request of a worker."""

    HELLO = 0
    PUSH = 1
    COMMIT = 2
    PULL = 3
    MEET = 4
    STATE = 5
    LOAD = 6
    VOTE = 7
    LEAVE = 8
    ROWS = 9
    PARTS = 10
    OFFER = 11
    TRAFFIC = 12
    PUT = 13


class Status(IntEnum):
    """Reply of a server."""

    OK = 0
    ENDED = 1


class StepRequest(NamedTuple):
    """Step of a push.

    Args:
        hyper: options of the optimizer's groups.
        present: whether each slice has a gradient.
        late: indices of slices sent with the request, after parts were sent during backward.
    """

    hyper: Tensor
    present: Sequence[bool]
    late: Sequence[int]


def request_size(plan: ShardPlan, server: int) -> int:
    """Return the length of a request's header: fixed fields, hyper-parameters and flags of each slice."""
    return FIXED + plan.hyper.size + len(plan.held[server])


def parse(plan: ShardPlan, request: Tensor) -> StepRequest:
    """Parse the step of a push."""
    end = FIXED + plan.hyper.size
    slices = [int(each) for each in request[end:].tolist()]
    late = [number for number, each in enumerate(slices) if each & IS_LATE]
    return StepRequest(request[FIXED:end], [bool(each & HAS_GRADIENT) for each in slices], late)
