"""A run that was told to end."""

import signal


class Interrupted(BaseException):
    """This process was told to end by a signal, and everything it started has ended.

    Not an Exception: code that catches errors to go on must not go on after Ctrl-C.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(self.number.name)

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, as shells have it."""
        return 128 + int(self.number)
