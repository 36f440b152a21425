"""The collectives that this rank takes part in, whoever starts them: Python, C++ (DDP) or FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainwright.strategies.contract.communication.calls import listen


@dataclass(frozen=True)
class Collective:
    """One call.

    Args:
        name: what people call it.
        elements: of the largest tensor: what is reduced, or what has been gathered.
    """

    name: str
    elements: int


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """Every collective that this rank takes part in inside, in order; of messages, those that it sends."""
    seen: list[Collective] = []
    end = listen(lambda call: seen.append(Collective(call.kind, call.elements)))
    try:
        yield seen
    finally:
        end()
