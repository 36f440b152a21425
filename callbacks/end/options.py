"""Validation of the options of :class:`~trainwright.callbacks.end.preemption.Preemption`.

Imports neither torch nor Lightning: the launching process validates too, before it starts anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trainwright.core.config.options import checked, number, value_problems, word

# A token of RFC 9110.
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _is_address(value: object) -> bool:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
        return False
    try:
        parts = urlsplit(value)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host != b"" and port != 0 and parts.username is None


def _is_header(name: Any, value: Any) -> bool:
    are_texts = isinstance(name, str) and isinstance(value, str)
    return are_texts and _HEADER.fullmatch(name) is not None and value.isascii() and value.isprintable()


@dataclass(eq=False, repr=False)
class PreemptionOptions:
    """Options of :class:`~trainwright.callbacks.end.preemption.Preemption`: how a run ends when it is interrupted."""

    # Save the run state before ending, with the callback of the group checkpoint; false = off.
    save: bool = True
    # Signals that end the run: SIGTERM, SIGUSR1, SIGUSR2; [] = none.
    signals: list[str] = word(lambda: ["SIGTERM", "SIGUSR1"], "SIGTERM", "SIGUSR1", "SIGUSR2")
    # Path of a file whose existence ends the run; null = off.
    file: str | None = None
    # URL to poll, such as a cloud's metadata service: a response of status 200 that is neither empty nor FALSE nor NONE
    # ends the run; null = off.
    url: str | None = checked(None, _is_address, "an address http://... or https://... in ASCII, without a user")
    # HTTP headers for url, like {Metadata-Flavor: Google}; {} = none.
    url_headers: dict[str, str] = checked(
        dict, lambda value: isinstance(value, Mapping | None), "texts by name, {} for none"
    )
    # Seconds between polls of file and url.
    poll_seconds: float = number(5.0, above=0)
    # Seconds from the notice until the process exits, saved or not; null = no limit.
    deadline_seconds: float | None = number(120.0, above=0, null="for off")
    # Exit code; null = 128 plus the number of the signal (143 for SIGTERM, file and url).
    exit_code: int | None = number(None, most=255, null="for 128 + the signal")
    # Under SLURM, run scontrol requeue for this job after saving; false = off.
    requeue: bool = False
    # Approximate seconds between checks whether any rank was notified.
    check_seconds: float = number(1.0, above=0)

    def option_problems(self, prefix: str = "") -> Iterator[str]:
        """Yield what is wrong with the options, one message each; ``prefix`` precedes names on the command line."""
        yield from value_problems(PreemptionOptions, vars(self), prefix)
        headers = self.url_headers if isinstance(self.url_headers, Mapping) else {}
        for name, value in headers.items():
            if not _is_header(name, value):  # without the value, which may be a secret
                allowed = "a name without spaces, and a text of one line in ASCII"
                yield f"{prefix}url_headers.{name} is no header (allowed: {allowed})"
        if self.url_headers and self.url is None:
            yield f"{prefix}url_headers without url (give the url that they are for)"
        if self.requeue and not self.save:
            yield f"{prefix}requeue=True with save=False (the job would start from scratch; set save=True)"
