"""A notice that this run is to end soon: who gave it, when, and where it may come from besides a signal."""

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

# Numbers for what is no signal; signals end at 64.
FILE, URL = 101, 102
# A server of metadata answers within milliseconds; one that does not must not hold up the next look.
_URL_SECONDS = 2.0
# Enough to tell what is meant; whatever else a server sends is left unread.
_URL_BYTES = 256
# What servers of metadata answer while nothing is planned.
_NOTHING_PLANNED = (b"", b"FALSE", b"NONE")

_log = logging.getLogger("trainwright")


@dataclass(frozen=True)
class Told:
    """This run is to end.

    Args:
        number: of the signal, or :data:`FILE` or :data:`URL`.
        since: when that was said, on the clock of ``time.monotonic``.
    """

    number: int
    since: float

    @property
    def reason(self) -> str:
        """Who said so: ``SIGTERM``, ``the file to watch`` or ``the address to ask``."""
        others = {FILE: "the file of preemption.file", URL: "the answer of preemption.url"}
        return others.get(self.number) or signal.Signals(self.number).name

    @property
    def signal(self) -> signal.Signals:
        """The signal; SIGTERM stands for what is none."""
        return signal.Signals.SIGTERM if self.number in (FILE, URL) else signal.Signals(self.number)


class Notice:
    """What this process was told, by a signal handler or a thread; the first notice counts."""

    def __init__(self) -> None:
        self.told: Told | None = None

    def give(self, number: int) -> bool:
        """Tell this process to end; safe within a signal handler.

        Args:
            number: of the signal, or :data:`FILE` or :data:`URL`.

        Returns:
            Whether this was the first notice.
        """
        if self.told is not None:
            return False
        self.told = Told(number, time.monotonic())
        return True


class NoticePoll:
    """A thread that looks for a notice where no signal comes from.

    Args:
        file: as soon as it exists, the run is to end; ``None``: off.
        url: asked by http or https; any answer of status 200 other than an empty one, ``FALSE`` and ``NONE`` (in any
            case) says that the run is to end, while status 404 says that nothing is planned; ``None``: off. Proxies
            are not asked, since an address of metadata means this machine. What cannot be reached says nothing, and is
            told once in the log.
        headers: sent to ``url``.
        seconds: between two looks.
        on_notice: called in the thread with :data:`FILE` or :data:`URL`, once.
    """

    def __init__(
        self,
        file: str | None,
        url: str | None,
        headers: Mapping[str, str],
        seconds: float,
        on_notice: Callable[[int], object],
    ) -> None:
        self._file = None if file is None else Path(file).expanduser()
        self._request = None if url is None else urllib.request.Request(url, headers=dict(headers))  # noqa: S310
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._seconds = seconds
        self._on_notice = on_notice
        self._stopped = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="trainwright-preemption", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a question that is on its way is given up."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            found = self.look()
            if found is not None and not self._stopped.is_set():
                self._on_notice(found)
                return
            self._stopped.wait(self._seconds)

    def look(self) -> int | None:
        """Where there is a notice now: :data:`FILE`, :data:`URL`, or ``None``."""
        if self._file is not None and self._file.exists():
            return FILE
        return URL if self._request is not None and self._answers() else None

    def _answers(self) -> bool:
        assert self._request is not None
        try:
            with self._open(self._request, timeout=_URL_SECONDS) as answer:
                return answer.status == 200 and answer.read(_URL_BYTES).strip().upper() not in _NOTHING_PLANNED
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                self._complain(error)
        except (OSError, http.client.HTTPException) as error:
            self._complain(error)
        return False

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("preemption.url=%s gives no answer (%s); it is asked again", self._request.full_url, error)  # type: ignore[union-attr]
