"""The actor of one rank: a process of Ray that starts the rank as its own child, waits for it and ends it.

The rank is no thread of Ray's worker: it is forked from a process that holds no threads, as with `launch=local`, its
signals and its exit code are its own, and it ends at once when its actor does.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.core.processes.scratch import scratch
from trainwright.launch.engines.ray.places import Place
from trainwright.launch.ranks.forkserver import start_forkserver, stop_forkserver
from trainwright.launch.ranks.output import Output
from trainwright.launch.ranks.supervisor import Ended, Supervisor


class RankHolder:
    """Holds one rank.

    Args:
        rank: global rank.
        directory: to work in, where it is there: that of the command.
        path: where modules are looked for besides.
        log: file that the rank prints into.
    """

    def __init__(self, rank: int, directory: str, path: list[str], log: str) -> None:
        self._rank = rank
        if Path(directory).is_dir():
            os.chdir(directory)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Output().to(Path(log))
        start_forkserver()  # its imports go on while the others are placed
        self._supervisor: Supervisor | None = None
        self._code: int | None = None
        self._store: object = None

    def place(self) -> Place:
        """Where it is."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpus)))

    def open_store(self, address: str) -> tuple[str, int]:
        """Open the store in which the ranks meet, for as long as this actor lives; returns address and port.

        Args:
            address: of this machine.
        """
        from trainwright.launch.ranks.rendezvous import LocalStore

        store = LocalStore(address=address)
        self._store = store
        return store.address, store.port

    def start(self, verb: str, records: str, environment: Mapping[str, str]) -> int:
        """Start the rank; returns its process id.

        Args:
            verb: fit, validate, test or predict.
            records: folder with the configuration of this attempt, and for what the rank writes down; all machines see
                it.
            environment: its variables besides those of this process.
        """
        from trainwright.launch.rank import rank_main

        self._supervisor = Supervisor(rank_main, (verb, Path(records), Path(records)))
        self._supervisor.start_rank(self._rank, {**os.environ, **environment})
        return self._supervisor.pid(self._rank)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the rank; its exit code, None while it lives.

        Args:
            seconds: to wait at most.
        """
        if self._supervisor is not None and self._code is None:
            self._keep(self._supervisor.wait(seconds))
        return self._code

    def end(self, number: int, grace: float | None) -> int | None:
        """End the rank; its exit code, None where it has none.

        Args:
            number: of the signal.
            grace: seconds that it has after the signal, then it is killed; None = as long as it takes.
        """
        if self._supervisor is not None and self._code is None:
            seconds = 7 * 86400.0 if grace is None else grace
            self._keep(self._supervisor.end((self._rank,), seconds, signal.Signals(number)))
        return self._code

    def _keep(self, ended: list[Ended]) -> None:
        for each in ended:
            self._code = each.exit_code
            # Ray kills this process, which then cannot do so at its exit.
            stop_forkserver()
            shutil.rmtree(scratch(), ignore_errors=True)
