"""Conversion of errors of composing, checking and building a configuration into one paragraph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hydra.errors import InstantiationException

from trainwright.core.failures.error_text import is_refusal, message_of, own_place
from trainwright.core.problems import ConfigError


@contextlib.contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Convert every error into a :class:`ConfigError`, except running out of memory.

    Args:
        what: the action or key in question; the paragraph begins with it.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError([f"{what}: {_reason(error)}"]) from error


def _reason(error: BaseException) -> str:
    """Return the message of an error and where the user's code raised it."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # Hydra's message is the repr of the cause
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains or includes itself; remove the reference to itself"
    where = own_place(error)
    text = " ".join(line.strip() for line in message_of(error).splitlines() if line.strip())
    if is_refusal(error):
        return text
    return f"{type(error).__name__}: {text}" + (f" (raised at {where})" if where else "")
