"""Counted bytes compared with those sent by the kernel."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.strategies.contract.communication.kernel import written_bytes
from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.calls import listen, unknown_operators
from trainwright.strategies.contract.communication.meter import CommunicationMeter, Sent, count_sent
from trainwright.strategies.parameter_server.messages.wire import PAYLOAD, Device, Link

ELEMENTS = 60_000  # large, so that headers are not seen; divides by every number of ranks here


def collectives() -> dict[str, Callable[[], Any]]:
    """Every way to send something, by name; the name's first word is the kind."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, part = torch.ones(ELEMENTS), ELEMENTS // ranks
    last, after, before = ranks - 1, (rank + 1) % ranks, (rank - 1) % ranks
    # Each rank keeps as much as all others together get from it, and they get unequal parts.
    gives = [[(ranks - 1) * 3000 if a == b else 3000 + 500 * (b - a) for b in range(ranks)] for a in range(ranks)]
    send, receive = gives[rank], [row[rank] for row in gives]

    def everyone(tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(ranks)]

    def neighbours() -> None:
        received = torch.empty(ELEMENTS)
        pair = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def inferred() -> None:
        with torch.inference_mode():
            dist.all_reduce(torch.ones(ELEMENTS))

    half = x.to(torch.bfloat16)
    wide = torch.ones(ELEMENTS * ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce of 16 bits": lambda: dist.all_reduce(half),
        "all_reduce in inference": inferred,
        "all_reduce coalesced": lambda: dist.all_reduce_coalesced([x, x.clone()]),
        "all_reduce, functional": lambda: functional.all_reduce(x, "sum", dist.group.WORLD).sum(),
        "all_gather": lambda: dist.all_gather(everyone(x), x),
        "all_gather into a tensor": lambda: dist.all_gather_into_tensor(wide, x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(part), list(x.chunk(ranks))),
        "reduce_scatter of a tensor": lambda: dist.reduce_scatter_tensor(torch.empty(part), x),
        "all_to_all": lambda: dist.all_to_all(everyone(x[:part]), list(x.chunk(ranks))),
        "all_to_all of a tensor": lambda: dist.all_to_all_single(torch.empty(ELEMENTS), x),
        "all_to_all, unequal": lambda: dist.all_to_all_single(
            torch.empty(sum(receive)), torch.ones(sum(send)), receive, send
        ),
        "broadcast": lambda: dist.broadcast(x, last),
        "reduce": lambda: dist.reduce(x, last),
        "gather": lambda: dist.gather(x, everyone(x) if rank == last else None, last),
        "scatter": lambda: dist.scatter(torch.empty(ELEMENTS), [x] * ranks if rank == last else None, last),
        "send to the last": lambda: dist.send(x, last) if rank == 0 else rank == last and dist.recv(x, 0),
        "send in a circle": neighbours,
        "all_gather of an object": lambda: dist.all_gather_object([None] * ranks, "x" * ELEMENTS),
        "all_gather, sparse": lambda: dist.all_reduce(x[: ELEMENTS // 2].view(-1, 2).to_sparse()),
    }


def counted_and_written(layout: Layout) -> dict[str, tuple[str, float, float, int]]:
    """By name: axis, bytes counted, the least, and what the kernel wrote meanwhile."""
    found = {}
    for name, collective in collectives().items():
        collective()  # connections and buffers
        dist.barrier()
        with CommunicationMeter(layout) as meter:
            before = written_bytes()
            collective()
            written = written_bytes() - before
        ((axis, kind), sent), *others = meter.take().items() or [(("", name.split()[0].strip(",")), Sent())]
        assert not others
        assert kind == name.split()[0].strip(","), name
        found[name] = axis, sent.bytes, sent.least, written
        dist.barrier()
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_counted_bytes_match_the_kernel(ranks, count):
    results = ranks(counted_and_written, count, Layout(replicate=count))
    size = 4 * ELEMENTS
    for rank, result in enumerate(results):
        for name, (axis, counted, _, written) in result.items():
            assert counted == pytest.approx(written, rel=0.02, abs=1500), (name, rank)
            assert axis == ("replicate" if counted else axis), name
    for name in results[0]:
        sent, least = (sum(result[name][index] for result in results) for index in (1, 2))
        factor = 2 if name.startswith("reduce_scatter") else 1
        if not name.startswith("reduce") or factor == 2:
            assert sent == pytest.approx(factor * least), name
    assert sum(result["all_reduce"][1] for result in results) == 2 * (count - 1) * size
    assert results[0]["send to the last"][1] == size
    assert results[-1]["send to the last"][1] == 0


def engines() -> dict[str, tuple[dict[str, float], int]]:
    """Return bytes by kind of torch's own engines in a step, and bytes written by the kernel."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    split = distribute_tensor(torch.ones(ELEMENTS), mesh, [Shard(0)])
    replica = DistributedDataParallel(nn.Linear(300, 200, bias=False))
    sharded = nn.Linear(300, 200, bias=False)
    fully_shard(sharded)

    def trained(module: nn.Module) -> Callable[[], Any]:
        return lambda: module(torch.ones(2, 300)).sum().backward()

    found = {}
    cases = {
        "ddp": trained(replica),
        "fsdp2": trained(sharded),
        "dtensor": lambda: split.redistribute(mesh, [Replicate()]).to_local().sum(),
    }
    for name, step in cases.items():
        for _ in range(3):  # DDP settles its buckets
            step()
        dist.barrier()
        with CommunicationMeter(Layout(shard=ranks)) as meter:
            before = written_bytes()
            step()
            written = written_bytes() - before
        found[name] = {kind: sent.bytes for (_, kind), sent in meter.take().items()}, written
        dist.barrier()
    return found


def test_collectives_started_in_cpp_are_counted(ranks):
    size = 4.0 * ELEMENTS
    for result in ranks(engines, 2):
        assert {name: kinds for name, (kinds, _) in result.items()} == {
            "ddp": {"all_reduce": size},
            "fsdp2": {"all_gather": size / 2, "reduce_scatter": size},
            "dtensor": {"all_gather": size / 2},
        }
        for kinds, written in result.values():
            assert sum(kinds.values()) == pytest.approx(written, rel=0.02)


def life() -> tuple[list[int], int, dict[Any, Any]]:
    """Return calls counted by nested meters, and whether kernels are left afterwards."""
    outer = CommunicationMeter()
    x = torch.ones(8)
    dist.all_reduce(x)
    with CommunicationMeter(Layout(replicate=2)) as inner:
        other = threading.Thread(target=dist.all_reduce, args=(x,))
        other.start()
        other.join()
        count_sent("server", "push", 100)
        count_sent("server", "push", 50)
    dist.all_reduce(x)
    outer.stop()
    outer.stop()
    dist.all_reduce(x)
    count_sent("server", "push", 100)
    hooked = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    sums = outer.take()
    assert outer.take() == {}
    return [sums["other", "all_reduce"].calls, sums["server", "push"].calls], hooked, inner.take()


def test_meters_count_between_start_and_stop(ranks):
    calls, hooked, inner = ranks(life, 2)[0]
    assert calls == [3, 2]
    assert not hooked, "nothing may be left before torch's operators"
    assert inner == {("replicate", "all_reduce"): Sent(1, 32, 32), ("server", "push"): Sent(2, 150, 150)}


def test_meter_without_process_groups():
    with CommunicationMeter() as meter:
        count_sent("server", "push", 7)
    assert meter.take() == {("server", "push"): Sent(1, 7, 7)}


def push_and_pull() -> tuple[dict[Any, Any], int]:
    """Push from a worker and answer from a server; return what this rank's meter and its kernel counted."""
    rank, x = dist.get_rank(), torch.ones(ELEMENTS)
    link = Link(dist.distributed_c10d._get_default_store(), "link", serves=rank == 1, device=Device())
    dist.barrier()
    with CommunicationMeter(Layout(replicate=2)) as meter:
        before = written_bytes()
        if rank == 0:
            link.send(x, PAYLOAD).wait()
            link.receive(x[: ELEMENTS // 2], PAYLOAD).wait()
        else:
            link.receive(x, PAYLOAD).wait()
            link.send(x[: ELEMENTS // 2].contiguous(), PAYLOAD).wait()
        written = written_bytes() - before
    dist.barrier()
    return meter.take(), written


def test_links_of_parameter_servers(ranks):
    size = 4 * ELEMENTS
    (worker, sent_by_worker), (server, sent_by_server) = ranks(push_and_pull, 2)
    assert worker == {("server", "push"): Sent(1, size, size)}
    assert server == {("server", "pull"): Sent(1, size / 2, size / 2)}
    assert size == pytest.approx(sent_by_worker, rel=0.02)
    assert size / 2 == pytest.approx(sent_by_server, rel=0.02)


def failing_listener() -> bool:
    """Check that a raising listener prevents the collective, and that torch works afterwards."""

    def fail(call: Any) -> None:
        raise RuntimeError("no more")

    end, x = listen(fail), torch.ones(2)
    with pytest.raises(RuntimeError, match="no more"):
        dist.all_reduce(x)
    end()
    dist.all_reduce(x)
    return bool((x == 2).all())


def test_listener_errors_propagate(ranks):
    assert ranks(failing_listener, 2) == [True, True]


def test_no_unknown_operators():
    assert unknown_operators() == []
