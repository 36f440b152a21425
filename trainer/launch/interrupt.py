"""A run that was told to end."""

import signal
from types import FrameType
from typing import NoReturn


class Interrupted(BaseException):
    """This process was told to end by a signal, and everything it started has ended.

    Not an Exception: code that catches errors to go on must not go on after Ctrl-C.

    Args:
        number: the signal.
        exit_code: of the command; None = 128 plus the number of the signal, as shells have it.
    """

    def __init__(self, number: int, exit_code: int | None = None) -> None:
        self.number = signal.Signals(number)
        self.exit_code = 128 + int(number) if exit_code is None else exit_code
        super().__init__(self.number.name)


def raise_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends what runs now; a Trainer that saves first puts its own in the place of this one."""
    raise Interrupted(number)
