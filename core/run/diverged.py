"""The error with which a guard ends training; light, so that the launching process can know it."""


class DivergedError(RuntimeError):
    """The loss guard ended training; weights and checkpoints are those of before the bad step."""
