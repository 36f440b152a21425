"""Where servers and workers of one run find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import proof_of, run_token, seal, unseal
from trainwright.strategies.parameter_server.messages.wire import reading


@dataclass(frozen=True)
class ServerMeeting:
    """Where servers and workers of one run find each other.

    Args:
        store: of the run; each thread takes a client of its own.
        prefix: of the keys, never used before.
    """

    store: dist.Store
    prefix: str

    def client(self) -> dist.Store:
        """A connection of its own: a wait on a shared one holds up all others."""
        store: Any = self.store  # its stubs lack clone
        return store.clone()  # type: ignore[no-any-return]

    def come(self, server: int, worker: int, wants_state: bool = False) -> str:
        """Tell a server that a worker comes; the name of the link to be.

        Args:
            server: number of the server.
            worker: number of the worker.
            wants_state: it comes to the first server, for the state of the run.
        """
        store = self.client()
        number = store.add(f"{self.prefix}/{server}/count", 1) - 1
        link = self.link(server, number)
        told = seal(run_token(), {"link": link, "worker": worker, "state": wants_state})
        store.set(f"{self.prefix}/{server}/come/{number}", told.decode())
        return link

    def who_comes(self, told: str, link: str) -> tuple[int, bool]:
        """The worker of a link that is to be, and whether it comes for the state of the run.

        Raises:
            ContentError: if no worker of this run has said so.
        """
        with reading("the announcement of a worker"):
            message = unseal(run_token(), told.encode())
            if message["link"] != link:
                raise ContentError(f"it is of the link {message['link']!r}, where {link!r} is to come")
            return int(message["worker"]), bool(message["state"])

    @staticmethod
    def proof(link: str) -> int:
        """What a worker says first over a link, by which the server knows that it is one of this run."""
        return proof_of(run_token(), link)

    def link(self, server: int, number: int) -> str:
        """Name of the link of the ``number``-th worker to come."""
        return f"{self.prefix}/{server}/link/{number}"
