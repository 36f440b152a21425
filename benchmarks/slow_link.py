"""Runs a benchmark again in a network namespace of its own, whose loopback device has the rate of a slow link."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import environment_of


def on_a_slow_link(link: str, module: str, arguments: Sequence[str]) -> Any:
    """What ``python -m module arguments`` prints as its last line, of JSON; the namespace is gone with it.

    Args:
        link: rate, like ``"100mbit"``.
        module: of a benchmark.
        arguments: with which it prints such a line.

    Raises:
        RuntimeError: if such a namespace cannot be made here, or the measurement failed.
    """
    slow = f"ip link set lo up && tc qdisc add dev lo root tbf rate {link} burst 256kb latency 2000ms"
    inner = [sys.executable, "-m", module, *arguments]
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", f'{slow} && exec "$@"', "sh", *inner]
    # The name of this machine leads nowhere in there.
    environment = {**environment_of(1), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; it needs unshare, ip and tc (Linux)")
    return json.loads(done.stdout.splitlines()[-1])
