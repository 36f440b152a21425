"""Kernel state of ending processes."""

import os
import subprocess
import sys

import pytest

from trainwright.core.processes.process import children_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nothing")
# Of a hundred processes that are asked for all the time, seven are asked for at an instant at which they are half gone.
_PROCESSES = 50


def test_children_of_an_ending_process() -> None:
    for _ in range(_PROCESSES):
        process = subprocess.Popen(["true"])
        assert process.pid in children_of(os.getpid())
        other = os.fork()  # asks; this process waits, so that the one that is asked for vanishes meanwhile
        if other == 0:
            _ask_until_gone(process.pid)
        process.wait()
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0


def _ask_until_gone(process: int) -> None:
    code = 1
    try:
        while os.path.exists(f"/proc/{process}"):
            assert children_of(process) == []
        code = 0
    finally:
        os._exit(code)
