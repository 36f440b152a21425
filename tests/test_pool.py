"""The rank pool returns results or reports what failed, never hangs, and leaks nothing."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import tests.pool
from tests.pool import RankCrash, RankError, RankPool, RankTimeout


@pytest.fixture(scope="module")
def own_pool():
    """Return a pool whose ranks these tests may kill."""
    pool = RankPool()
    yield pool
    pool.close()


def sum_over_ranks(scale):
    tensor = torch.ones(2) * scale * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def describe_world():
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def pid():
    return os.getpid()


def make_own_group():
    dist.init_process_group("gloo")
    return sum_over_ranks(1.0)[1].tolist()


def fail_to_meet():
    """Fail to make a group, since the other rank is missing; torch has counted it by then."""
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.1))
    return dist.distributed_c10d._world.group_count


def groups_counted():
    return dist.distributed_c10d._world.group_count


def draw():
    return torch.rand(1).item()


def leave_a_mess():
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    dist.new_group([0])


def report_mess():
    return (
        "LEFT_BEHIND" in os.environ,
        os.getcwd(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def raise_on_rank(rank):
    if dist.get_rank() == rank:
        print("about to fail")
        raise ArithmeticError(f"rank {rank} has had enough")
    dist.barrier()


def unpicklable():
    return lambda: None


def hang_on_rank(rank):
    if dist.get_rank() == rank:
        sleep_for_long()


def sleep_for_long():
    time.sleep(600)


def kill_rank(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_rank(rank):
    if dist.get_rank() == rank:
        sys.exit(7)


def leave_a_child():
    tests.pool.GRACE_SECONDS = 1.0  # this rank is ended afterwards
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def load_with_workers():
    batches = list(DataLoader(list(range(6)), batch_size=2, num_workers=1))
    return torch.cat(batches).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(ranks, world_size):
    results = ranks(sum_over_ranks, world_size, 2.0)
    assert [rank for rank, _ in results] == list(range(world_size))
    expected = 2.0 * sum(range(1, world_size + 1))
    assert all(torch.equal(tensor, torch.full((2,), expected)) for _, tensor in results)


def test_ranks_have_the_environment_of_torch_elastic(ranks):
    worlds = ranks(describe_world, 2)
    assert [w["RANK"] for w in worlds] == ["0", "1"]
    assert {w["WORLD_SIZE"] for w in worlds} == {"2"}
    assert {w["MASTER_ADDR"] for w in worlds} == {"127.0.0.1"}


def test_ranks_are_reused(ranks):
    assert ranks(pid, 2) == ranks(pid, 2)


def test_case_can_make_its_own_group(ranks):
    assert ranks(make_own_group, 2, init_group=False) == [[3.0, 3.0]] * 2


def test_a_group_that_was_never_made_is_not_counted(ranks):
    assert ranks(fail_to_meet, 1, init_group=False) == [1]
    assert ranks(groups_counted, 1, init_group=False) == [0]


def test_case_begins_with_the_same_seed(ranks):
    assert ranks(draw, 2) == ranks(draw, 2)


def test_nothing_carries_over(ranks, tmp_path):
    ranks(leave_a_mess, 2)
    assert ranks(report_mess, 2) == [(False, str(tmp_path), torch.float32, False, True)] * 2


def test_ranks_see_the_parents_environment(ranks, monkeypatch):
    monkeypatch.setenv("RANK_POOL_TEST", "seen")
    assert ranks(os.getenv, 2, "RANK_POOL_TEST") == ["seen", "seen"]


def test_loader_workers_run_in_a_rank(ranks):
    assert ranks(load_with_workers, 1) == [[0, 1, 2, 3, 4, 5]]


def test_a_failure_shows_every_traceback(own_pool):
    with pytest.raises(RankError) as failure:
        own_pool.run(raise_on_rank, 2, 1)
    message = str(failure.value)
    assert "ArithmeticError: rank 1 has had enough" in message
    assert "in raise_on_rank" in message
    assert "about to fail" in message
    assert message.index("--- rank 1") < message.index("--- rank 0"), "the first to fail stands on top"
    assert 1 in failure.value.tracebacks
    assert own_pool.run(draw, 2), "the pool is usable again"


def test_a_hang_shows_where(own_pool):
    with pytest.raises(RankTimeout, match="1 of 2 rank") as failure:
        own_pool.run(hang_on_rank, 2, 1, timeout=2)
    assert "sleep_for_long" in str(failure.value)
    assert own_pool.run(draw, 2), "the pool is usable again"


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        (kill_rank, (2, 0), "rank 0\nwas ended by SIGKILL"),
        (exit_rank, (2, 1), "SystemExit: 7"),
        (unpicklable, (1,), "[Pp]ickle"),
        (leave_a_child, (1,), "left .* process"),
    ],
)
def test_a_case_without_a_result_is_an_error(own_pool, case, arguments, message):
    with pytest.raises(RankError, match=message):
        own_pool.run(case, *arguments)


def test_a_local_function_is_refused(own_pool):
    with pytest.raises(ValueError, match="top level of a module"):
        own_pool.run(lambda: None, 1)


def test_close_leaves_no_process():
    pool = RankPool()
    pool.run(draw, 2)
    processes = pool.processes
    pool.close()
    assert len(processes) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def crash_once(marker: str) -> str:
    """Abort on the first call, as native code does; return on the next."""
    if dist.get_rank() == 0 and not Path(marker).exists():
        Path(marker).touch()
        os.abort()
    dist.barrier()
    return "done"


def crash_always() -> None:
    os.abort()


def test_a_native_crash_is_retried_once_with_a_warning(own_pool, tmp_path):
    with pytest.warns(RankCrash, match=r"crash_once is run once more[\s\S]*rank 0\nwas ended by SIGABRT"):
        assert own_pool.run(crash_once, 2, str(tmp_path / "marker")) == ["done", "done"]
    with pytest.warns(RankCrash), pytest.raises(RankError, match="was ended by SIGABRT"):
        own_pool.run(crash_always, 2)
