"""Process that monitors the ranks of one machine, started by another launcher: torchrun, SLURM, or a script.

Its program imports neither torch nor Lightning, sleeps between two checks, and lives as long as its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.processes.process import kill_with_workers
from trainwright.core.processes.scratch import scratch
from trainwright.launch.watchdog.boxes import HangLimits
from trainwright.launch.watchdog.monitor import VARIABLE, HangMonitor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_INTERVAL = 0.5
_SECONDS_TO_END = 5.0


def main() -> None:
    """Monitor until asked to stop, or until the parent is gone."""
    # Signals to the whole job are for the ranks, which may save first; they are monitored until then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    task = json.loads(sys.argv[1])
    folder = Path(tempfile.mkdtemp(prefix="watch-", dir=scratch()))
    monitor = HangMonitor(task["count"], folder, Path(task["run_dir"]), HangLimits(**task["limits"]), node=task["node"])
    print(json.dumps([json.loads(monitor.environment(rank)[VARIABLE]) for rank in range(task["count"])]), flush=True)
    # Input, or its end, is the parent's request to stop.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _INTERVAL)[0]:
        hang = monitor.check()
        if hang is not None:
            print(f"\n{hang.report}\n\nEnding rank {hang.rank} (SIGKILL).", file=sys.stderr, flush=True)
            kill_with_workers(monitor.process_of(hang.rank))
    explanation = monitor.explain()
    if explanation is not None:
        print(f"trainwright: {explanation}", file=sys.stderr, flush=True)
    monitor.close()


class Guardian:
    """The monitoring process, as seen by local rank 0 that starts it. It ends with :meth:`stop` or with this process.

    Args:
        trainer: of this rank.
        limits: time limits of phases.

    Attributes:
        places: box and folder of each rank of this machine.

    Raises:
        RuntimeError: if the process could not be started.
    """

    def __init__(self, trainer: Trainer, limits: HangLimits) -> None:
        task = {
            "count": max(1, trainer.world_size // max(1, trainer.num_nodes)),
            "run_dir": str(Path(trainer.default_root_dir).absolute()),
            "node": trainer.node_rank if trainer.num_nodes > 1 else None,
            "limits": asdict(limits),
        }
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", __name__, json.dumps(task)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process that watches this machine's ranks ended with exit code {self._process.wait()} before it "
                "began; standard error says why. Without it: Watchdog(hang_timeout=None), or launch.hang_timeout=null."
            )
        self.places: list[dict[str, Any]] = json.loads(line)

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.communicate("stop\n", timeout=_SECONDS_TO_END)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def agree(trainer: Trainer, places: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Distribute the boxes to the ranks. A collective of all ranks, once per run.

    Args:
        trainer: of this rank.
        places: of the ranks of this machine on local rank 0; ``None`` on the others.
    """
    from trainwright.checkpoint.exchange.distinct import all_gather_values

    own = None if places is None else (trainer.node_rank, places)  # one rank per machine contributes
    gathered = [own] if trainer.world_size == 1 else all_gather_values(own, device=trainer.strategy.root_device)
    of_nodes = dict(found for found in gathered if found is not None)
    place: dict[str, Any] = of_nodes[trainer.node_rank][trainer.local_rank]
    return place


if __name__ == "__main__":
    main()
