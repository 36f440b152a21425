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
            are not asked, since an address of metadata means this machine, nor is another address to which this one
            sends: it would see the headers, and what it answers was not asked for. What cannot be reached says nothing.
        headers: sent to ``url``.
        seconds: between two looks.
        on_notice: called in the thread with :data:`FILE` or :data:`URL`, once.

    Looking goes on where it fails; why is told in the log, once for the file and once for the address.
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
        if self._file is not None and self._is_there(self._file):
            return FILE
        return URL if self._request is not None and self._answers(self._request) else None

    def _is_there(self, file: Path) -> bool:
        try:
            file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            self._complain(FILE, f"preemption.file={file} cannot be looked at ({error}); it is looked at again")
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
        self._complain(URL, f"preemption.url={request.full_url} gives no answer ({problem}); it is asked again")
        return False

    def _complain(self, what: int, text: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            _log.warning(text)


def _opener() -> urllib.request.OpenerDirector:
    """Opens addresses of http and https, and nothing else: no proxy, no file, no address that an answer names."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener
