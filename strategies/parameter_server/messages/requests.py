"""What workers ask of a server and what it answers: operations, and what a request's header says of each slice."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from trainwright.strategies.parameter_server.messages.wire import FIXED
from trainwright.strategies.parameter_server.server.shard import ShardPlan

# A payload of a size that the header says.
BYTES = 2
# What a request says of each slice.
HAS_GRADIENT, IS_LATE = 1, 2


class Operation(IntEnum):
    """What a worker asks for."""

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


class Status(IntEnum):
    """What a server answers."""

    OK = 0
    ENDED = 1


class StepRequest(NamedTuple):
    """What a push says of the step to be made.

    Args:
        hyper: options of the optimizer's groups.
        present: for each slice, whether it has a gradient.
        late: numbers of the slices that are sent with the request, where parts have been sent before.
    """

    hyper: Tensor
    present: Sequence[bool]
    late: Sequence[int]


def request_size(plan: ShardPlan, server: int) -> int:
    """Numbers of a request's header: fixed fields, hyper-parameters, and for each slice whether it has a gradient.

    Where parts have been sent before, also whether the slice is sent with the request.
    """
    return FIXED + plan.hyper.size + len(plan.held[server])


def parse(plan: ShardPlan, request: Tensor) -> StepRequest:
    """Read what a push says of its step."""
    end = FIXED + plan.hyper.size
    slices = [int(each) for each in request[end:].tolist()]
    late = [number for number, each in enumerate(slices) if each & IS_LATE]
    return StepRequest(request[FIXED:end], [bool(each & HAS_GRADIENT) for each in slices], late)
