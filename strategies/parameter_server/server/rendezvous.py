"""Rendezvous of servers and workers of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import proof_of, run_token, seal, unseal
from trainwright.strategies.parameter_server.messages.wire import reading


@dataclass(frozen=True)
class ServerRendezvous:
    """Rendezvous of servers and workers of one run.

    Args:
        store: of the run; each thread uses its own client.
        prefix: of the keys, never used before.
    """

    store: dist.Store
    prefix: str

    def client(self) -> dist.Store:
        """Return a new client: a wait on a shared one blocks other threads."""
        store: Any = self.store  # its stubs lack clone
        return store.clone()  # type: ignore[no-any-return]

    def announce(self, server: int, worker: int, wants_state: bool = False) -> str:
        """Announce a worker to a server; returns the name of the future link.

        Args:
            server: its index.
            worker: its index.
            wants_state: connects to the first server for the state of the run.
        """
        store = self.client()
        number = store.add(f"{self.prefix}/{server}/count", 1) - 1
        link = self.link(server, number)
        announcement = seal(run_token(), {"link": link, "worker": worker, "state": wants_state})
        store.set(f"{self.prefix}/{server}/come/{number}", announcement.decode())
        return link

    def parse_announcement(self, announcement: str, link: str) -> tuple[int, bool]:
        """Return the worker of an announced link, and whether it wants the state of the run.

        Raises:
            ContentError: if no worker of this run announced it.
        """
        with reading("the announcement of a worker"):
            message = unseal(run_token(), announcement.encode())
            if message["link"] != link:
                raise ContentError(f"it is of the link {message['link']!r}, where {link!r} is to come")
            return int(message["worker"]), bool(message["state"])

    @staticmethod
    def proof(link: str) -> int:
        """Return the value by which a server recognizes a worker of this run."""
        return proof_of(run_token(), link)

    def link(self, server: int, number: int) -> str:
        """Return the name of the link of the ``number``-th announcement."""
        return f"{self.prefix}/{server}/link/{number}"
