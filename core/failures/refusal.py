"""Turn errors of composing, checking and building a configuration into one paragraph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hydra.errors import InstantiationException

from trainwright.core.failures.error_text import is_refusal, message_of, own_place
from trainwright.core.problems import ConfigError


@contextlib.contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Raise every error within as a :class:`ConfigError`; only running out of memory stays what it is.

    Args:
        what: what was being done, or the key in question; the paragraph begins with it.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError([f"{what}: {_reason(error)}"]) from error


def _reason(error: BaseException) -> str:
    """What an error says, and where in the user's code it was raised."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # Hydra repeats all of it as the repr of the cause
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains or includes itself; remove the reference to itself"
    where = own_place(error)
    text = " ".join(line.strip() for line in message_of(error).splitlines() if line.strip())
    if is_refusal(error):
        return text
    return f"{type(error).__name__}: {text}" + (f" (raised at {where})" if where else "")
