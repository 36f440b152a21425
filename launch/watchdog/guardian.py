"""Program that monitors the ranks of one machine; see :mod:`trainwright.launch.watchdog.guardian_client`.

It imports neither torch nor Lightning, sleeps between two checks, and lives as long as its parent.
"""

import json
import os
import select
import signal
import sys
import tempfile
from pathlib import Path

from trainwright.core.processes.process import kill_with_workers
from trainwright.core.processes.scratch import scratch
from trainwright.launch.watchdog.limits import HangLimits
from trainwright.launch.watchdog.monitor import VARIABLE, DiagnosedHang, HangMonitor

_INTERVAL = 0.5


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
            _end(hang, monitor)
    explanation = monitor.explain()
    if explanation is not None:
        print(f"trainwright: {explanation}", file=sys.stderr, flush=True)
    monitor.close()


def _end(hang: DiagnosedHang, monitor: HangMonitor) -> None:
    print(f"\n{hang.report}\n\nEnding rank {hang.rank} (SIGKILL).", file=sys.stderr, flush=True)
    kill_with_workers(monitor.process_of(hang.rank))


if __name__ == "__main__":
    main()
