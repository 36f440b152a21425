"""Stop notices: the reason, the time, and sources other than signals."""

from __future__ import annotations

import http.client
import logging
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Not signals; signal numbers end at 64.
FILE, URL = 101, 102
# Metadata servers answer within milliseconds; a slow one must not delay the next poll.
_URL_SECONDS = 2.0
# Enough to decide; the rest is left unread.
_URL_BYTES = 256
# Answers of metadata servers when no preemption is planned.
_NOTHING_PLANNED = (b"", b"FALSE", b"NONE")

_log = logging.getLogger("trainwright")


@dataclass(frozen=True)
class StopNotice:
    """A notice to end this run.

    Args:
        number: of the signal, or :data:`FILE` or :data:`URL`.
        since: time of the notice (``time.monotonic``).
    """

    number: int
    since: float

    @property
    def reason(self) -> str:
        """The source: ``SIGTERM``, ``preemption.file`` or ``preemption.url``."""
        others = {FILE: "preemption.file", URL: "preemption.url"}
        return others.get(self.number) or signal.Signals(self.number).name

    @property
    def signal(self) -> signal.Signals:
        """The signal; SIGTERM for a file or an address."""
        return signal.Signals.SIGTERM if self.number in (FILE, URL) else signal.Signals(self.number)


class NoticeBox:
    """The first stop notice that a signal handler or a thread gave this process."""

    def __init__(self) -> None:
        self.notice: StopNotice | None = None

    def give(self, number: int) -> bool:
        """Record a notice and return whether it is the first one; safe within a signal handler.

        Args:
            number: of the signal, or :data:`FILE` or :data:`URL`.
        """
        if self.notice is not None:
            return False
        self.notice = StopNotice(number, time.monotonic())
        return True


class NoticePoll:
    """A thread that polls a file and an address for a stop notice. Errors are logged once per source.

    Args:
        file: the run ends once it exists; ``None``: off.
        url: http or https; a status 200 with content other than empty, ``FALSE`` or ``NONE`` (in any case) ends the
            run. No proxies or redirects, since a metadata address means this machine and its headers may be secret.
            ``None``: off.
        headers: sent to ``url``.
        seconds: poll interval.
        on_notice: called in the thread with :data:`FILE` or :data:`URL`, once.
    """

    def __init__(
        self,
        file: str | None,
        url: str | None,
        headers: Mapping[str, str] | None,
        seconds: float,
        on_notice: Callable[[int], object],
    ) -> None:
        self._file = None if file is None else Path(file).expanduser()
        self._request = None if url is None else urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310
        self._open = _opener().open
        self._seconds = seconds
        self._on_notice = on_notice
        self._stopped = threading.Event()
        self._complained: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="trainwright-preemption", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; a pending request is abandoned."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            found = self.look()
            if found is not None and not self._stopped.is_set():
                self._on_notice(found)
                return
            self._stopped.wait(self._seconds)

    def look(self) -> int | None:
        """Return :data:`FILE` or :data:`URL` if there is a notice now, else ``None``."""
        if self._file is not None and self._is_there(self._file):
            return FILE
        return URL if self._request is not None and self._answers(self._request) else None

    def _is_there(self, file: Path) -> bool:
        try:
            file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            self._complain(FILE, f"preemption.file={file} cannot be read ({error}); retrying")
            return False
        return True

    def _answers(self, request: urllib.request.Request) -> bool:
        try:
            with self._open(request, timeout=_URL_SECONDS) as answer:
                return answer.status == 200 and answer.read(_URL_BYTES).strip().upper() not in _NOTHING_PLANNED
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return False
            problem: Exception = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = error
        self._complain(URL, f"preemption.url={request.full_url} gives no answer ({problem}); retrying")
        return False

    def _complain(self, what: int, text: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            _log.warning(text)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only: no proxy, no file, no redirect."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener
