"""Whether the server of an address accepts connections, known after a few seconds."""

from __future__ import annotations

import queue
import socket
import threading
from urllib.parse import urlsplit

_SECONDS = 4.0
_PORTS = {"http": 80, "https": 443}


def connection_problem(url: str, seconds: float = _SECONDS) -> str | None:
    """Return why no connection to the server of `url` can be made; None if one was.

    Args:
        url: beginning with http:// or https://.
        seconds: to wait for the answer, the look-up of the name included.
    """
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # A look-up of a name cannot be given a deadline; the thread that waits for it ends with the process.
    threading.Thread(target=lambda: answers.put(_try(url, seconds)), daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return f"{urlsplit(url).netloc} has not answered within {seconds:g} s"


def _try(url: str, seconds: float) -> str | None:
    try:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        with socket.create_connection(address, seconds):
            return None
    except (OSError, ValueError) as error:  # UnicodeError of a name is a ValueError
        return f"cannot connect to {urlsplit(url).netloc} ({error})"
