"""The checks around every test must catch what they are there for."""

import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import os, subprocess, sys, threading, time
import pytest
import tests.pool

tests.pool.GRACE_SECONDS = 1.0  # what is left here stays for longer

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

def test_environment():
    os.environ["LEFT_BEHIND"] = "1"

def test_child():
    subprocess.Popen(SLEEP)

def test_orphan():
    in_background = "exec 1>&- 2>&-; \\"$0\\" -c 'import time; time.sleep(60)' &"
    subprocess.run(["sh", "-c", in_background, sys.executable], check=True)

def test_thread():
    threading.Thread(target=time.sleep, args=(4,)).start()

def test_group(tmp_path):
    import torch.distributed as dist
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

@pytest.mark.timeout(3)
def test_hang():
    time.sleep(60)

def test_folder(tmp_path):
    open("left.txt", "w").close()
    assert os.path.exists(tmp_path / "left.txt")
"""


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("environment", "The test changed environment variables: {'LEFT_BEHIND'}"),
        ("child", "left 1 process(es) running:"),
        ("orphan", "left 1 process(es) running that lost their parent"),
        ("thread", "The test left threads running"),
        ("group", "The test left a process group"),
        ("hang", "Timeout (>3.0s)"),
        ("folder", "1 passed"),
    ],
)
def test_what_is_left_is_caught(leaks, test, message):
    assert message in leaks[test], leaks[test]


@pytest.fixture(scope="module")
def leaks(tmp_path_factory):
    """Output of pytest on each test of LEAKS, run apart and all at once."""
    file = tmp_path_factory.mktemp("leaks") / "test_leaks.py"
    file.write_text(LEAKS)
    root = Path(__file__).parents[1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={root}",
    ]
    command += [f"--config-file={root / 'pyproject.toml'}"]
    names = ["environment", "child", "orphan", "thread", "group", "hang", "folder"]
    runs = {
        name: subprocess.Popen(
            [*command, f"{file}::test_{name}", f"--basetemp={file.parent / name}"],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    }
    return {name: run.communicate(timeout=120)[0] for name, run in runs.items()}
