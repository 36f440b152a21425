"""Threads of a rank leave MKL as it is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import torch
from trainwright.core.processes.machine import use_threads
if sys.argv[1] == "one":
    use_threads(1)
else:
    torch.set_num_threads = None
use_threads(3)
(torch.ones(300, 300) @ torch.ones(300, 300)).sum()
use_threads(3)
print(torch.get_num_threads(), torch.__config__.parallel_info())
"""


@pytest.mark.parametrize("before", ["one", "as torch chose"])
def test_threads_are_changed(before: str) -> None:
    # A process of its own: torch keeps a number of threads for good.
    told = subprocess.run([sys.executable, "-c", _SCRIPT, before], check=True, capture_output=True, text=True).stdout
    assert told.startswith("3 ")
    of_mkl = re.search(r"mkl_get_max_threads\(\) : (\d+)", told)
    assert of_mkl is None or of_mkl[1] == "3"
