"""Prometheus endpoint of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.message_server import MessageServer, Peer
from trainwright.core.config.options import number, require
from trainwright.core.text.bounded import ContentError

_OTHERS = re.compile(r"[^a-zA-Z0-9_]")
_REQUEST = re.compile(r"(GET|HEAD|OPTIONS) ([^ ?]+)\??([^ ]*) HTTP/1\.[01]")
_HTTP: Any = {"name": "trainwright-prometheus", "end": b"\r\n\r\n", "longest": 1 << 14}
_NOT_A_METRIC = ("time", "step", "kind", "timeline", "text", "what", "began")


class Prometheus(Callback):
    """Serve the monitored values of a run at ``http://<host>:<port>/metrics``.

    Each number in a record (see docs/monitoring.md) is a gauge ``trainwright_<kind>_<name>``, such as
    ``trainwright_step_seconds_forward`` or ``trainwright_rate_mfu``, with the label ``rank``; ``trainwright_step`` is
    the number of optimizer steps done, and ``trainwright_events_total`` counts events by ``what``. Needs the extra
    ``prometheus``.

    Args:
        port: of rank 0; 0 takes a free one, see :attr:`port`. With ``every_rank``, the other ranks of a machine use the
            following ports by local rank.
        host: address to listen on; by default only this machine can connect. There is no authentication.
        every_rank: serve the values of each rank; ``False``: of rank 0 only.

    Attributes:
        port: port in use; ``None`` while not serving.

    Raises:
        ValueError: if ``port`` is invalid.
    """

    def __init__(self, port: int = 9400, host: str = "127.0.0.1", every_rank: bool = False) -> None:
        require(self, int, number(9400, most=65535, unit="0 takes a free one"), port=port)
        self.wanted_port = port
        self.host = host
        self.every_rank = every_rank
        self.port: int | None = None
        self._server: MessageServer | None = None
        self._answers: Any = None
        self._registry: Any = None
        self._gauges: dict[str, Any] = {}
        self._events: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start serving.

        Raises:
            ValueError: if the library is missing, or the port is taken.
        """
        if stage != "fit" or self._server is not None or not (self.every_rank or trainer.is_global_zero):
            return
        try:
            import prometheus_client
        except ImportError as error:
            raise ValueError(
                "Prometheus needs prometheus_client; type pip install 'trainwright[prometheus]'"
            ) from error
        self._registry = prometheus_client.CollectorRegistry()
        port = self.wanted_port + (trainer.local_rank if self.wanted_port else 0)
        try:
            server = MessageServer(self._answer, **_HTTP, host=self.host, port=port)
        except OSError as error:
            raise ValueError(
                f"Prometheus: {self.host}:{port} cannot be served ({error.strerror}); choose another port, or 0"
            ) from error
        self._server, self.port = server, server.port
        self._answers = prometheus_client.make_wsgi_app(self._registry)
        self._gauges = {}
        self._events = prometheus_client.Counter(
            "trainwright_events", "Events of the run.", ["rank", "what"], registry=self._registry
        )
        server.start()

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Update the gauges from a record."""
        if self._server is None:
            return
        rank, kind = str(trainer.global_rank), str(record["kind"])
        self._set("trainwright_step", rank, float(record["step"]))
        if kind == "event":
            self._events.labels(rank, str(record["what"])).inc()
            return
        for name, value in _numbers(record):
            self._set(f"trainwright_{kind}_{name}", rank, value)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.stop()
            self._server = self.port = None

    def _answer(self, peer: Peer, head: bytes) -> None:
        """Answer an HTTP request in the server's thread, and close the connection."""
        first, *fields = head.decode("latin-1").split("\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None or self._server is None:
            raise ContentError("not an HTTP request")
        method, path, query = request.groups()
        environment = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        for name, _, value in (field.partition(":") for field in fields):
            environment[f"HTTP_{name.strip().upper().replace('-', '_')}"] = value.strip()
        lines: list[str] = []
        body = b"".join(self._answers(environment, lambda status, names: lines.extend(_head(status, names))))
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self._server.send(peer, "\r\n".join(lines).encode("latin-1") + (b"" if method == "HEAD" else body), last=True)

    def _set(self, name: str, rank: str, value: float) -> None:
        if name not in self._gauges:
            import prometheus_client

            self._gauges[name] = prometheus_client.Gauge(
                name, "See docs/monitoring.md.", ["rank"], registry=self._registry
            )
        self._gauges[name].labels(rank).set(value)


def _head(status: str, names: Iterable[tuple[str, str]]) -> list[str]:
    return [f"HTTP/1.0 {status}", *(f"{name}: {value}" for name, value in names)]


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{before}{_OTHERS.sub('_', str(key))}"
        if not before and key in _NOT_A_METRIC:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}_")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
