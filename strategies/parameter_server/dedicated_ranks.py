"""Dedicated server ranks: signals between them and the workers, fit by fit.

The last ranks of a run only serve. The others have a process group without them and are the whole world for training,
validation and saving: rank 0 is a worker. Both use the store of the run:

1. The first worker signals that data is prepared; then servers build module and optimizer by the user's code.
2. A server signals that it is ready; then workers connect to it.
3. The first worker signals how the fit ended; servers end likewise.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.lightning_internals import _init_dist_connection
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import run_token, seal, unseal
from trainwright.strategies.contract.groups import destroy_groups, wait_for_key
from trainwright.strategies.parameter_server.worker.rejoining import init_single_process_group

_log = logging.getLogger(__name__)
_PREPARED, _READY, _END = "prepared", "ready/{}", "end"


class FitSignals:
    """Signals between the first worker and the servers about one fit.

    Args:
        store: of the run, the same for all its ranks.
        rank: of this process among all ranks; each must create one instance per fit.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a store may survive a restart of the ranks
        of_attempt = dist.PrefixStore(f"parameter_server/own/{attempt}", store)
        self.prefix = f"parameter_server/own/{attempt}/{of_attempt.add(f'fits/{rank}', 1)}"
        """Prefix of keys in the run's store that belong to this fit."""
        self._store = dist.PrefixStore(self.prefix, store)

    # ---- the first worker -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Signal that servers may build module and optimizer."""
        self._store.set(_PREPARED, "")

    def end(self, problem: str = "", code: int | None = None) -> None:
        """Signal that the fit has ended.

        Args:
            problem: error that ended it, if any.
            code: exit code of the workers, if they exit.
        """
        self._store.set(_END, seal(run_token(), {"fit": self.prefix, "problem": problem, "code": code}).decode())
        self.prepare()  # a server that still waits for that must see the end

    def wait_for_servers(self, servers: int) -> None:
        """Wait until all servers are ready.

        Raises:
            RuntimeError: if one failed to start.
        """
        for server in range(servers):
            problem = self._wait(_READY.format(server))
            if problem:
                raise RuntimeError(f"Parameter server {server}, on a rank of its own, failed to start: {problem}")

    # ---- servers ----------------------------------------------------------------------------------------------------

    def wait_until_prepared(self) -> None:
        """Wait for the first worker.

        Raises:
            SystemExit, RuntimeError: as :meth:`wait_for_end`, if the fit ended before it began.
        """
        self._wait(_PREPARED)
        if self._store.check([_END]):
            self.wait_for_end()

    def be_ready(self, server: int, problem: str = "") -> None:
        """Signal that a server is ready, or why it is not."""
        self._store.set(_READY.format(server), problem)

    def wait_for_end(self, is_deserted: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of the fit.

        Args:
            is_deserted: returns whether no worker is left to signal it.

        Raises:
            SystemExit: if the workers exit with a code.
            RuntimeError: if an error ended them, or they are gone without a signal.
        """

        def pause(seconds: float) -> bool:
            time.sleep(seconds)
            # The last worker may have signaled just before it left.
            return is_deserted() and not self._store.check([_END])

        while True:
            value = wait_for_key(self._store, _END, pause)
            if value is None:
                raise RuntimeError("All workers of this parameter server are gone without ending the fit.")
            try:
                message = self._parse_end(value)
                break
            except ContentError as error:
                _log.warning("Ignored an end of the fit that the first worker did not signal: %s", error)
                self._store.delete_key(_END)
        if message["code"] is not None:
            raise SystemExit(message["code"])
        if message["problem"]:
            raise RuntimeError(f"The workers of this parameter server failed: {message['problem']}")

    def _parse_end(self, value: str) -> dict[str, Any]:
        message: dict[str, Any] = unseal(run_token(), value.encode())
        if message["fit"] != self.prefix:
            raise ContentError("it is of another fit")
        return message

    def _wait(self, key: str) -> str:
        value = wait_for_key(self._store, key)
        assert value is not None
        return value


def split_world(
    environment: ClusterEnvironment,
    rank: int,
    workers: int,
    servers: int,
    backend: str,
    timeout: timedelta | None,
    device: torch.device | None,
) -> dist.Store | None:
    """Create the process group of the ranks that train; the last ones, which only serve, stay alone.

    Args:
        environment: of the cluster.
        rank: of this process among all.
        workers: number of ranks that train.
        servers: number of ranks that only serve.
        backend: of the group.
        timeout: of its collectives.
        device: bound to the group; ``None``: none.

    Returns:
        The store of an existing process group of all ranks; ``None``: there was none.
    """
    serves, store = rank >= workers, None
    if dist.is_initialized() and dist.get_world_size() == workers + servers:  # created by a launcher
        store = default_store()
        own = dist.PrefixStore("parameter_server/workers", store)
        destroy_groups()
        if not serves:
            dist.init_process_group(backend, store=own, rank=rank, world_size=workers, timeout=timeout)
    if not serves:
        _init_dist_connection(environment, backend, world_size=workers, timeout=timeout, device_id=device)
        return store
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if not dist.is_initialized():
        init_single_process_group()
    return store
