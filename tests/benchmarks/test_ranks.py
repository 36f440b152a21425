from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.pool import ROOT


def rank_sum(offset: int) -> float:
    value = torch.tensor(float(int(os.environ["RANK"]) + offset))
    dist.all_reduce(value)
    return value.item()


def fail_on_the_second(_: int) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this rank has had enough")
    dist.barrier()


@pytest.mark.thorough
def test_every_rank_answers_and_the_error_of_one_is_raised():
    """In a process of its own: the server that ranks are forked from belongs to the process that started it."""
    script = (
        "from benchmarks.ranks import run_ranks\n"
        "from tests.benchmarks import test_ranks as t\n"
        "print(run_ranks(t.rank_sum, 2, 10), flush=True)\n"
        "run_ranks(t.fail_on_the_second, 2, 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "[21.0, 21.0]", ended.stderr
    assert ended.returncode == 1
    assert "Rank 1 of 2 failed" in ended.stderr
    assert "this rank has had enough" in ended.stderr
