"""Each check around a test catches its kind of leak."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import mark_left_out

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
    threading.Thread(target=time.sleep, args=(3,)).start()

def test_group(tmp_path):
    import torch.distributed as dist
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

@pytest.mark.timeout(1)
def test_hang():
    time.sleep(60)

def test_folder(tmp_path):
    open("left.txt", "w").close()
    assert os.path.exists(tmp_path / "left.txt")
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("environment", "The test changed environment variables: {'LEFT_BEHIND'}"),
        ("child", "left 1 process(es) running:"),
        ("orphan", "left 1 process(es) running that lost their parent"),
        ("thread", "The test left threads running"),
        ("group", "The test left a process group"),
        ("hang", "Timeout (>1.0s)"),
        ("folder", ""),
    ],
)
def test_leaks_are_reported(leaks, test, message):
    assert message in leaks.get(test, ""), leaks
    assert (test in leaks) == bool(message), leaks


@pytest.fixture(scope="module")
def leaks(tmp_path_factory):
    """Report of each failed test of LEAKS, run by a pytest of its own."""
    folder, root = tmp_path_factory.mktemp("leaks"), Path(__file__).parents[1]
    (folder / "test_leaks.py").write_text(LEAKS)
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={root}"]
    options += [f"--config-file={root / 'pyproject.toml'}", f"--basetemp={folder / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, str(folder / "test_leaks.py")]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120).stdout
    assert "\n1 passed" not in printed, printed
    reports = re.split(
        r"^_+ (?:ERROR at teardown of )?test_(\w+) _+$", printed.partition("= slowest")[0], flags=re.MULTILINE
    )
    return dict(zip(reports[1::2], reports[2::2], strict=True))


class Case:
    """What sampling reads of a test item."""

    def __init__(self, number, **params):
        self.nodeid, self.callspec, self.marks = f"test_it[{number}]", SimpleNamespace(params=params), []

    def get_closest_marker(self, name):
        return SimpleNamespace(args=(3,)) if name == "sample" else None

    def add_marker(self, mark):
        self.marks.append(mark)


def test_a_sample_has_every_value():
    cases = [Case(n, strategy=s, ranks=r) for n, (s, r) in enumerate(product(("ddp", "zero3", "tensor"), (2, 3, 4)))]
    mark_left_out(cases)
    drawn = [case for case in cases if not case.marks]
    assert len(drawn) == 3
    assert {case.callspec.params["strategy"] for case in drawn} == {"ddp", "zero3", "tensor"}
    assert {case.callspec.params["ranks"] for case in drawn} == {2, 3, 4}
    assert {mark for case in cases for mark in case.marks} == {"thorough"}


def test_cases_that_are_fewer_than_a_sample_are_all_in_it():
    case = Case(0, strategy="ddp")
    mark_left_out([case])
    assert case.marks == []
