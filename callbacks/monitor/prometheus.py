"""The figures of a run for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.message_server import MessageServer, Peer
from trainwright.core.text.bounded import ContentError

_OTHERS = re.compile(r"[^a-zA-Z0-9_]")
_REQUEST = re.compile(r"(GET|HEAD|OPTIONS) ([^ ?]+)\??([^ ]*) HTTP/1\.[01]")
_LONGEST_HEAD = 1 << 14  # bytes of a request
_NOT_A_FIGURE = ("time", "step", "kind", "timeline", "text", "what", "began")


class Prometheus(Callback):
    """Serve what is found out about a run at ``http://<host>:<port>/metrics``, as Prometheus asks for it.

    Each figure of a record (see docs/monitoring.md) is a gauge ``trainwright_<kind>_<name>``, such as
    ``trainwright_step_seconds_forward`` or ``trainwright_rate_mfu``, with the label ``rank``; ``trainwright_step`` is
    the number of optimizer steps done, and ``trainwright_events_total`` counts events by ``what``. What has not been
    found out yet is not there. It needs the extra ``prometheus``.

    Args:
        port: of rank 0; 0 takes a free one, see :attr:`port`. With ``every_rank``, those of the other ranks of a
            machine follow it by their local rank.
        host: address at which it is served; the default can be reached from this machine alone. Whoever can reach it
            can read it.
        every_rank: whether each rank serves its own figures; else rank 0 alone.

    Raises:
        ValueError: if ``port`` is impossible.
    """

    looks_at_parameters = False

    def __init__(self, port: int = 9400, host: str = "127.0.0.1", every_rank: bool = False) -> None:
        if not 0 <= port < 65536:
            raise ValueError(f"Prometheus(port={port}) (allowed: 0 to 65535; 0 takes a free one)")
        self.wanted_port = port
        self.host = host
        self.every_rank = every_rank
        self.port: int | None = None
        """At which it is served; ``None``: it is not."""
        self._server: MessageServer | None = None
        self._answers: Any = None
        self._registry: Any = None
        self._gauges: dict[str, Any] = {}
        self._events: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to serve.

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
            server = MessageServer(
                self._answer,
                name="trainwright-prometheus",
                host=self.host,
                port=port,
                end=b"\r\n\r\n",
                longest=_LONGEST_HEAD,
            )
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
        """Remember the figures of a record."""
        if self._server is None:
            return
        rank, kind = str(trainer.global_rank), str(record["kind"])
        self._set("trainwright_step", rank, float(record["step"]))
        if kind == "event":
            self._events.labels(rank, str(record["what"])).inc()
            return
        for name, value in _figures(record):
            self._set(f"trainwright_{kind}_{name}", rank, value)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.stop()
            self._server = self.port = None

    def _answer(self, peer: Peer, head: bytes) -> None:
        """Answer a request of HTTP in the thread of the server, and hang up."""
        first, *fields = head.decode("latin-1").split("\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None or self._server is None:
            raise ContentError("this is no request of HTTP")
        method, path, query = request.groups()
        environment = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        for name, _, value in (field.partition(":") for field in fields):
            environment[f"HTTP_{name.strip().upper().replace('-', '_')}"] = value.strip()
        begun: list[str] = []
        body = b"".join(self._answers(environment, lambda status, names: begun.extend(_head(status, names))))
        begun += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self._server.send(peer, "\r\n".join(begun).encode("latin-1") + (b"" if method == "HEAD" else body), last=True)

    def _set(self, name: str, rank: str, value: float) -> None:
        if name not in self._gauges:
            import prometheus_client

            self._gauges[name] = prometheus_client.Gauge(
                name, "See docs/monitoring.md.", ["rank"], registry=self._registry
            )
        self._gauges[name].labels(rank).set(value)


def _head(status: str, names: Iterable[tuple[str, str]]) -> list[str]:
    return [f"HTTP/1.0 {status}", *(f"{name}: {value}" for name, value in names)]


def _figures(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{before}{_OTHERS.sub('_', str(key))}"
        if not before and key in _NOT_A_FIGURE:
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{name}_")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
