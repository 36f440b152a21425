"""Ends of runs: no rank hangs, nothing is left behind, and the first cause is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command.project import environment
from tests.faults.commands import WORDS, Command, ends, training
from tests.faults.failing_hooks import OF_CALLBACK, OF_MODULE, end_of_fit, hooks_of_a_fit
from tests.warm import warm_run

CASES = [("module", hook) for hook in OF_MODULE] + [("callback", hook) for hook in OF_CALLBACK]


def test_the_hooks_are_all_that_a_fit_calls(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    called = ranks(hooks_of_a_fit, 2, str(tmp_path))[0]
    assert called["module"] == set(OF_MODULE)
    assert called["callback"] == set(OF_CALLBACK)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("of", "hook"), CASES, ids=[f"{of}-{hook}" for of, hook in CASES])
def test_a_failure_in_a_hook_blocks_no_rank(
    ranks: Callable[..., list[Any]], tmp_path: Path, of: str, hook: str
) -> None:
    ends = ranks(end_of_fit, 2, "ddp", {}, of, hook, str(tmp_path), timeout=30)
    [failing, other] = sorted(ends, key=lambda end: "Boom" not in end)
    assert failing == f"Boom: in {hook}", ends
    assert "Boom" not in other


PLAN = {"last": ["decoder.temperature"]}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("zero3", 2, {}),
    ("pipeline", 2, {"pipeline": 2, "plan": PLAN}),
    ("hybrid", 4, {"pipeline": 2, "shard": 2, "plan": PLAN}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "state_dict"]
)
@pytest.mark.parametrize(("strategy", "count", "options"), LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_a_failure_in_a_hook_blocks_no_rank_of_other_layouts(
    ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str, count: int, options: dict[str, Any], hook: str
) -> None:
    *others, failing = ends = ranks(end_of_fit, count, strategy, options, "callback", hook, str(tmp_path), timeout=30)
    assert failing == f"Boom: in {hook}", ends
    assert not any("Boom" in other for other in others)


# ---- whole commands --------------------------------------------------------------------------------------------------

# How rank 1 ends -> exit code of the command, message.
ENDS: dict[str, tuple[str, int, str]] = {
    "an exception": ('raise ValueError("boom")', 1, "rank 1 of 2 failed with ValueError: boom; the others were ended"),
    "no memory": ('raise MemoryError("16 GiB")', 1, "rank 1 of 2 failed with MemoryError: 16 GiB; the others"),
    "no text": (
        'raise type("Odd", (ValueError,), dict(__str__=lambda self: 1 / 0))()',
        1,
        "rank 1 of 2 failed with Odd: (no text: __str__ of Odd raises ZeroDivisionError); the others",
    ),
    "sys.exit(3)": ("raise SystemExit(3)", 3, "rank 1 of 2 called sys.exit(3); the others were ended"),
    "os._exit(5)": ("os._exit(5)", 5, "rank 1 of 2 ended with exit code 5; the others were ended"),
    "os._exit(0)": ("os._exit(0)", 1, "rank 1 of 2 ended with exit code 0 before the others"),
    "the kernel": ("os.kill(os.getpid(), 9)", 1, "rank 1 of 2 was ended by SIGKILL (from outside, or by the kernel"),
    "a crash": ("os.abort()", 1, "rank 1 of 2 was ended by SIGABRT (a crash in compiled code)"),
}

SCRIPT = """
import os, re, sys
from pathlib import Path
from trainwright.command.verbs import run_command
from trainwright.launch.ranks.forkserver import stop_forkserver

def listening():
    inodes = {line.split()[9] for line in open("/proc/net/tcp").readlines()[1:] if line.split()[3] == "0A"}
    open_files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    links = [os.readlink(path) for path in open_files]
    return [link for link in links if link.startswith("socket:") and link[8:-1] in inodes]

ends, words = eval(sys.argv[1]), sys.argv[2:]
for number, how in enumerate(ends):
    print("END", number, file=sys.stderr, flush=True)
    more = [f"run_dir=run{number}", "+callbacks.ends._target_=trouble.Ends", f"+callbacks.ends.how='{how}'"]
    code = run_command([*words, *more])
    children = [open(f"/proc/{pid}/cmdline").read().split("\\0") for task in Path("/proc/self/task").glob("*/children")
                for pid in task.read_text().split()]
    ranks = [child for child in children if not re.search("forkserver|resource_tracker", " ".join(child))]
    print("CODE", code, "PORTS", listening(), "CHILDREN", ranks, file=sys.stderr, flush=True)
stop_forkserver()
"""


def test_the_first_cause_is_reported_and_nothing_is_left(conf: Path, temporary: Path) -> None:
    """All in one launching process, because starting one takes seconds."""
    words = ["fit", "--config-dir", str(conf), *WORDS[:-1]]
    script = [sys.executable, "-c", SCRIPT, repr([how for how, _, _ in ENDS.values()]), *words]
    done = warm_run(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), timeout=150)
    assert done.returncode == 0, done.stdout
    said = done.stdout.split("END ")[1:]
    for text, (_, code, told) in zip(said, ENDS.values(), strict=True):
        assert f"CODE {code} PORTS [] CHILDREN []" in text, text
        assert f"trainwright: {told}" in text, text
        # Nothing of the connections that the others have lost by it.
        assert "Traceback" not in text, text
        assert "Connection" not in text, text
    assert names_in(temporary) == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_everything(conf: Path, temporary: Path, times: int) -> None:
    run = Command(training(conf))
    assert len(run.session()) >= 4  # the launching process, the fork server, two ranks
    for _ in range(times):
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert run.end() == 130, run.said()
    assert run.said().count("trainwright: ended by SIGINT") == 1
    assert "Traceback" not in run.said()
    assert run.left() == {}
    assert names_in(temporary) == []


def test_sys_exit_in_a_run_of_one_process(conf: Path) -> None:
    more = (*ends("raise SystemExit(3)"), "strategy=single", "devices=1")
    Path("trouble.py").write_text(Path("trouble.py").read_text().replace("global_rank == 1", "global_rank == 0"))
    run = Command(training(conf, *more))
    assert run.end() == 3
    assert "trainwright: sys.exit(3) was called by" in run.said()
    assert "Traceback" not in run.said()


def names_in(folder: Path) -> list[str]:
    """Return the entries of a folder, without torch's cache."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]
