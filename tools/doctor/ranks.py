"""Measurements that ranks make of each other, and the store through which results reach the judging process.

Ranks write their current activity and finally their result as JSON to a store, so a rank that hangs or dies is named
with what it was doing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainwright.callbacks.monitor.trace.clocks import clock_offset
from trainwright.core.failures.error_text import named_line
from trainwright.core.layout import Layout
from trainwright.core.text.plain import rebuilt
from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.strategies.contract.communication.probe import now_on, probe_links
from trainwright.tools.doctor.clocks import Offset
from trainwright.tools.doctor.measure import measure_device, small_blocks, small_step
from trainwright.tools.doctor.network import Pair

# Longest wait for one collective.
GROUP_SECONDS = 60.0
# For all pairs; the remaining ones are left out.
PAIR_SECONDS = 20.0
_MOST_ROUNDS = 64
_SMALL, _LARGE = 1, 2**20  # elements of four bytes
_PINGS, _TRANSFERS = 8, 3
_STEPS = 12


@dataclass(frozen=True)
class RankResult:
    """Measurements of one rank.

    Args:
        rank: global rank.
        host: name of its machine.
        failure: why it failed; ``None``: it did not.
        offset: of its clock; ``None`` on rank 0.
        pairs: links from this rank.
        rounds: rounds of pairs measured, and in total.
        links: measured all-reduces; the same on all ranks.
        figures: of its device, see :mod:`~trainwright.tools.doctor.measure`; empty unless requested.
    """

    rank: int
    host: str = ""
    failure: str | None = None
    offset: Offset | None = None
    pairs: Sequence[Pair] = ()
    rounds: tuple[int, int] = (0, 0)
    links: Sequence[MeasuredLink] = ()
    figures: dict[str, Any] = field(default_factory=dict)


class StoreBoard:
    """Activities and results of ranks in a store: JSON of plain values, so nothing that is read can execute.

    Args:
        store: reachable by all ranks.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def at(self, rank: int, what: str) -> None:
        """Record the current activity of a rank."""
        self.put(f"{rank}/at", what)

    def put(self, name: str, value: Any) -> None:
        """Publish a plain value."""
        self._store.set(f"doctor/{name}", json.dumps(value))

    def get(self, name: str, seconds: float) -> Any:
        """Return a published value, or ``None`` if it does not appear within so many seconds."""
        key = f"doctor/{name}"
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.01)))
        except (dist.DistStoreError, dist.DistNetworkError):
            return None
        return json.loads(self._store.get(key))

    def results(self, world_size: int, seconds: float) -> list[RankResult]:
        """Return the results of all ranks; one that does not answer in time fails with its last activity."""
        end = time.monotonic() + seconds
        found = []
        for rank in range(world_size):
            result = rebuilt(RankResult, self.get(f"{rank}/result", end - time.monotonic()))
            if result is None:
                last = self.get(f"{rank}/at", 0.01) or "not started"
                result = RankResult(rank, failure=f"did not answer; it was {last}")
            found.append(result)
        return found


@contextmanager
def group_of_ranks(store: dist.Store, rank: int, world_size: int, on_gpu: bool) -> Iterator[None]:
    """Provide a default process group: gloo, and NCCL for tensors on GPUs."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("doctor/group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def examine(
    store: dist.Store, rank: int, world_size: int, local_size: int, device: torch.device, figures: bool = False
) -> RankResult:
    """Run the measurements of this rank and publish the result.

    Args:
        store: reachable by all ranks.
        rank: global rank.
        world_size: number of all ranks.
        local_size: ranks per machine.
        device: of this rank.
        figures: measure the device too; all ranks do so simultaneously, since they share memory and cores.
    """
    board, host = StoreBoard(store), socket.gethostname()
    result = RankResult(rank, host)
    try:
        board.at(rank, f"computing on {device}")
        _compute(device)
        if world_size == 1:
            result = RankResult(rank, host, figures=measure_device(device, 1) if figures else {})
        else:
            board.at(rank, "connecting to the others")
            with group_of_ranks(store, rank, world_size, device.type == "cuda"):
                # All connections are made before any rank measures.
                dist.all_reduce(torch.zeros(1))
                board.at(rank, "comparing clocks")
                offset = compare_clocks(store, rank, world_size)
                board.at(rank, "measuring pairs")
                pairs, rounds = measure_pairs(rank, world_size, device)
                board.at(rank, "measuring all-reduces")
                links = measure_links(world_size, local_size, device)
                measured = {}
                if figures:
                    board.at(rank, "measuring its device")
                    measured = measure_device(device, local_size)
                    board.at(rank, "measuring sharded blocks")
                    measured["gather_seconds"] = measure_gathering(device, links[0])
                    dist.barrier()  # NCCL's communicator must not be destroyed while another rank measures
            result = RankResult(rank, host, None, offset, pairs, rounds, links, measured)
    except Exception as failure:  # a backend or a driver can raise anything
        result = RankResult(rank, host, named_line(failure))
    board.put(f"{rank}/result", asdict(result))
    return result


def _compute(device: torch.device) -> None:
    """Multiply two small matrices whose product is known.

    Raises:
        RuntimeError: if the result is wrong.
    """
    numbers = torch.arange(1024, device=device, dtype=torch.float64).view(32, 32)
    total = float((numbers @ torch.ones(32, 1, device=device, dtype=torch.float64)).sum())
    if total != 1023 * 1024 / 2:
        raise RuntimeError(f"{device} computes {total} instead of {1023 * 1024 // 2}")


def compare_clocks(store: dist.Store, rank: int, world_size: int) -> Offset | None:
    """Return the clock offset to rank 0, ``None`` on rank 0. A collective of all ranks."""
    offset, wrong_by = clock_offset(store, "doctor/clocks", rank, range(1, world_size))
    return None if rank == 0 else Offset(rank, -offset / 1e9, wrong_by / 1e9)


def rounds_of_pairs(world_size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of ranks in rounds where each rank has at most one partner (circle method).

    Of more than 64 rounds, 64 evenly spaced ones.
    """
    ranks = list(range(world_size + world_size % 2))
    rounds = []
    for _ in range(len(ranks) - 1):
        pairs = zip(ranks[: len(ranks) // 2], reversed(ranks[len(ranks) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < world_size])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    if len(rounds) > _MOST_ROUNDS:
        rounds = [rounds[index * len(rounds) // _MOST_ROUNDS] for index in range(_MOST_ROUNDS)]
    return rounds


def measure_pairs(rank: int, world_size: int, device: torch.device) -> tuple[list[Pair], tuple[int, int]]:
    """Measure the links of this rank. A collective of all ranks; pairs of a round are measured simultaneously.

    Returns:
        The links, and the number of rounds measured and in total.
    """
    found: list[Pair] = []
    end = time.monotonic() + PAIR_SECONDS
    done = 0
    for pairs in rounds_of_pairs(world_size):
        expired = torch.tensor([float(time.monotonic() > end)])
        dist.all_reduce(expired, op=dist.ReduceOp.MAX)  # starts a round on all ranks at once, and stops all together
        if expired.item():
            break
        for source, target in pairs:
            if rank in (source, target):
                first = rank == source
                partner = target if first else source
                latency = _latency(partner, first, device)
                # One direction at a time.
                for sends in (first, not first):
                    seconds = _transfer(partner, sends, device)
                    if sends:
                        moved = max(seconds - latency, 1e-9)
                        found.append(Pair(rank, partner, latency, 4 * _LARGE / moved))
        done += 1
    return found, (done, world_size + world_size % 2 - 1)


def _latency(partner: int, first: bool, device: torch.device) -> float:
    """Return half of the fastest round trip, seconds."""
    message, taken = torch.zeros(_SMALL, device=device), []
    for _ in range(2 + _PINGS):
        begin = now_on(device)
        _exchange(message, message, partner, first)
        taken.append(now_on(device) - begin)
    return min(taken[2:]) / 2  # the first two open connections


def _transfer(partner: int, sends: bool, device: torch.device) -> float:
    """Return the fastest seconds of a large message with a small reply."""
    large, small, taken = torch.zeros(_LARGE, device=device), torch.zeros(_SMALL, device=device), []
    sent, received = (large, small) if sends else (small, large)
    for _ in range(_TRANSFERS):
        begin = now_on(device)
        _exchange(sent, received, partner, sends)
        taken.append(now_on(device) - begin)
    return min(taken)


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int, first: bool) -> None:
    if first:
        dist.send(sent, partner)
        dist.recv(received, partner)
    else:
        dist.recv(received, partner)
        dist.send(sent, partner)


def measure_gathering(device: torch.device, link: MeasuredLink) -> float:
    """Return the seconds that gathering a block's parameters or reducing its gradients adds to the collective itself.

    Compares tiny blocks under FSDP2 with plain ones. A collective of all ranks.

    Args:
        device: of this rank.
        link: over all ranks.
    """
    mesh = init_device_mesh(device.type, (link.ranks,))
    plain, sharded = small_blocks(device), small_blocks(device)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    usual, longer = (_step_seconds(blocks, device) for blocks in (plain, sharded))
    # A block is gathered for forward and for backward, and its gradients are reduced.
    each = (longer - usual) / (3 * len(sharded))
    return max(each - link.seconds("all_gather", 0.0), 0.0)


def _step_seconds(blocks: torch.nn.Sequential, device: torch.device) -> float:
    """Return the seconds of the fastest step; all ranks make the same number of steps."""
    taken = []
    with torch.enable_grad():
        for _ in range(2 + _STEPS):
            dist.barrier()
            begin = now_on(device)
            small_step(blocks, device)
            taken.append(now_on(device) - begin)
    return min(taken[2:])


def measure_links(world_size: int, local_size: int, device: torch.device) -> list[MeasuredLink]:
    """Measure all-reduces over all ranks, within and across machines.

    Pairs within larger machines separate the fixed cost of a collective from that of its messages.
    """
    axes: list[tuple[str, Layout, str]] = [("all", Layout(replicate=world_size), "replicate")]
    if 1 <= local_size < world_size and world_size % local_size == 0:
        nodes = Layout(replicate=world_size // local_size, shard=local_size)
        axes += [("within", nodes, "shard"), ("across", nodes, "replicate")]
    if local_size > 2 and local_size % 2 == 0 and world_size % local_size == 0:
        axes.append(("pair", Layout(replicate=world_size // 2, shard=2), "shard"))
    return probe_links(axes, device)
