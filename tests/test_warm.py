import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import WarmPopen, warm_run

WHAT_IT_IS = """
import multiprocessing, os, signal, sys
print(sys.argv[1:], os.getcwd(), os.environ["NAME"], os.getppid(), os.getsid(0) == os.getpid(), sys.stdin.read())
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, multiprocessing.parent_process(), os.listdir("/proc/self/fd"))
print(*(open(f"/proc/self/{name}").read().rstrip("\\0").split("\\0") for name in ("cmdline", "environ")))
"""


def test_it_looks_like_a_started_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WHAT_IT_IS)
    words, environment = [sys.executable, str(script), "a", "b c"], {"NAME": "value"}
    ways = {"cwd": tmp_path, "env": environment, "start_new_session": True, "stdin": subprocess.DEVNULL}
    started = subprocess.run(words, capture_output=True, text=True, check=True, **ways).stdout  # type: ignore[call-overload]
    found = warm_run(words, 30, capture_output=True, **ways).stdout
    assert str(os.getpid()) in started
    assert found == started
    assert (
        "torch" in warm_run([sys.executable, "-c", "import sys; print(*sys.modules)"], 30, capture_output=True).stdout
    )


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('boom')", 1, "ValueError: boom\n"),
        ("import atexit; atexit.register(print, 'end', file=__import__('sys').stderr)", 0, "end\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_a_started_one(code: str, returned: int, said: str) -> None:
    done = warm_run([sys.executable, "-c", code], 30, capture_output=True)
    assert (done.returncode, done.stderr[-len(said) :] if said else done.stderr) == (returned, said)


def test_signals_reach_it() -> None:
    process = WarmPopen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()


def test_its_fork_server_is_forked_too() -> None:
    asked = "'tests.pool' in __import__('sys').modules"
    code = "from trainwright.launch.ranks.forkserver import call_in_subprocess as f; "
    code += f"print(f(eval, {asked!r}), f(eval, '7'))"
    done = warm_run([sys.executable, "-c", code], 60, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 7\n", "")
