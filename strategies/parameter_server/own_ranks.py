"""Servers on ranks of their own: how they hear when a fit of the others begins, and when and how it has ended.

The last ranks of a run only serve. The others have a process group without them and are the whole world to whatever
trains, validates and saves: rank 0 is a worker. Both find each other in the store of the run, fit by fit:

1. The first worker says that data is prepared; then servers build module and optimizer by the user's own code.
2. A server says that it is there; then workers link themselves to it.
3. The first worker says how the fit has ended; a server ends likewise.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.lightning_internals import _init_dist_connection
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import run_token, seal, unseal
from trainwright.strategies.contract.groups import destroy_groups, wait_for_key
from trainwright.strategies.parameter_server.worker.rejoining import meet_alone

_log = logging.getLogger(__name__)
_PREPARED, _READY, _END = "prepared", "ready/{}", "end"


class ToldFit:
    """What the first worker and the servers tell each other about one fit.

    Args:
        store: of the run, the same for all its ranks.
        rank: of this process among all ranks; each has to make one of these for every fit.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a store may live on when ranks are started anew
        of_attempt = dist.PrefixStore(f"parameter_server/own/{attempt}", store)
        self.prefix = f"parameter_server/own/{attempt}/{of_attempt.add(f'fits/{rank}', 1)}"
        """Of keys in the store of the run that this fit alone uses."""
        self._store = dist.PrefixStore(self.prefix, store)

    # ---- the first worker -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Say that servers may build module and optimizer."""
        self._store.set(_PREPARED, "")

    def end(self, problem: str = "", code: int | None = None) -> None:
        """Say that the fit has ended.

        Args:
            problem: what ended it, if it has not come to its end.
            code: exit code with which the workers end, if they do.
        """
        self._store.set(_END, seal(run_token(), {"fit": self.prefix, "problem": problem, "code": code}).decode())
        self.prepare()  # a server that still waits for that has to hear of the end

    def wait_for_servers(self, servers: int) -> None:
        """Wait until each of so many servers has said that it is there.

        Raises:
            RuntimeError: if one has said why it cannot be.
        """
        for server in range(servers):
            problem = self._wait(_READY.format(server))
            if problem:
                raise RuntimeError(f"Parameter server {server}, on a rank of its own, could not begin: {problem}")

    # ---- servers ----------------------------------------------------------------------------------------------------

    def wait_until_prepared(self) -> None:
        """Wait for the first worker.

        Raises:
            SystemExit, RuntimeError: as :meth:`wait_for_end`, if the fit has ended before it began.
        """
        self._wait(_PREPARED)
        if self._store.check([_END]):
            self.wait_for_end()

    def be_ready(self, server: int, problem: str = "") -> None:
        """Say that a server is there, or why it cannot be."""
        self._store.set(_READY.format(server), problem)

    def wait_for_end(self, is_deserted: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of the fit.

        Args:
            is_deserted: whether nobody is left who could tell of it.

        Raises:
            SystemExit: if the workers end with an exit code, as those that are told to end do.
            RuntimeError: if an error has ended them, or they are gone without a word.
        """

        def pause(seconds: float) -> bool:
            time.sleep(seconds)
            # The last to go may just have told.
            return is_deserted() and not self._store.check([_END])

        while True:
            value = wait_for_key(self._store, _END, pause)
            if value is None:
                raise RuntimeError("All workers of this parameter server are gone without a word.")
            try:
                told = self._told_end(value)
                break
            except ContentError as error:
                _log.warning("Not the first worker has told of the end of the fit: %s", error)
                self._store.delete_key(_END)
        if told["code"] is not None:
            raise SystemExit(told["code"])
        if told["problem"]:
            raise RuntimeError(f"The workers of this parameter server have ended: {told['problem']}")

    def _told_end(self, value: str) -> dict[str, Any]:
        told: dict[str, Any] = unseal(run_token(), value.encode())
        if told["fit"] != self.prefix:
            raise ContentError("it is of another fit")
        return told

    def _wait(self, key: str) -> str:
        value = wait_for_key(self._store, key)
        assert value is not None
        return value


class Worlds(NamedTuple):
    """The ranks of a run, of which the last ones only serve.

    Args:
        environment: of the cluster.
        rank: of this process among all.
        workers: ranks that train.
        servers: ranks that only serve.
    """

    environment: ClusterEnvironment
    rank: int
    workers: int
    servers: int

    def part(self, backend: str, timeout: timedelta | None, device: torch.device | None) -> dist.Store | None:
        """Make the process group of the ranks that train; one that serves stays alone.

        Args:
            backend: of the group.
            timeout: of its collectives.
            device: it is bound to; ``None``: to none.

        Returns:
            The store of a process group of all ranks that others had made; ``None``: there was none.
        """
        serves, store = self.rank >= self.workers, None
        if dist.is_initialized() and dist.get_world_size() == self.workers + self.servers:  # made by others
            store = default_store()
            own = dist.PrefixStore("parameter_server/workers", store)
            destroy_groups()
            if not serves:
                dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.workers, timeout=timeout)
        if not serves:
            _init_dist_connection(self.environment, backend, world_size=self.workers, timeout=timeout, device_id=device)
            return store
        os.environ["MASTER_ADDR"] = self.environment.main_address
        os.environ["MASTER_PORT"] = str(self.environment.main_port)
        if not dist.is_initialized():
            meet_alone()
        return store
