"""Runs a benchmark again in network namespaces of its own: over a slow loopback device, or a slow cable between two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import environment_of


def on_a_slow_link(link: str, module: str, arguments: Sequence[str]) -> Any:
    """Return the last line of ``python -m module arguments``, parsed as JSON, from a temporary network namespace.

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
    return _last_line(command, environment)


# Two network namespaces, the ranks of a node in each, and a slow cable in between: within a node loopback stays fast.
_TWO_NODES = """
set -e
ip link set lo up
unshare --net sleep infinity & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
there="nsenter --net --target $other"
ip link add node0 type veth peer name node1 netns $other
ip addr add 10.77.0.1/24 dev node0 && ip link set node0 up
$there ip link set lo up && $there ip addr add 10.77.0.2/24 dev node1 && $there ip link set node1 up
tc qdisc add dev node0 root tbf rate $LINK burst 256kb latency 2000ms
$there tc qdisc add dev node1 root tbf rate $LINK burst 256kb latency 2000ms
export WORLD_SIZE=$((2 * RANKS_PER_NODE)) LOCAL_WORLD_SIZE=$RANKS_PER_NODE
processes=
rank=1
while [ $rank -lt $WORLD_SIZE ]; do
    node=$((rank / RANKS_PER_NODE)); in_it=$there; [ $node = 1 ] || in_it=
    RANK=$rank LOCAL_RANK=$((rank % RANKS_PER_NODE)) GLOO_SOCKET_IFNAME=node$node $in_it "$@" > /dev/null &
    processes="$processes $!"; rank=$((rank + 1))
done
RANK=0 LOCAL_RANK=0 GLOO_SOCKET_IFNAME=node0 "$@"
for process in $processes; do wait $process; done
"""


def on_two_nodes(link: str, ranks_per_node: int, module: str, arguments: Sequence[str]) -> Any:
    """Return the last line of rank 0 of ``python -m module arguments``, parsed as JSON, on two nodes and a cable.

    A rank finds its place in ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; ranks meet by a file.
    All ranks of a node share its end of the cable.

    Args:
        link: rate of the cable in each direction, like ``"100mbit"``.
        ranks_per_node: of each of the two.
        module: of a benchmark.
        arguments: with which it prints such a line.

    Raises:
        RuntimeError: if such namespaces cannot be made here, or the measurement failed.
    """
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", _TWO_NODES, "sh", sys.executable, "-m", module]
    environment = {**environment_of(1), "LINK": link, "RANKS_PER_NODE": str(ranks_per_node)}
    return _last_line([*command, *arguments], environment)


def _last_line(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; it needs unshare, ip and tc (Linux)")
    return json.loads(done.stdout.splitlines()[-1])
