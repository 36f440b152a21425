"""A process that ends with the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

AGENT = "TRAINWRIGHT_AGENT"
"""Variable by which an agent tells its ranks its process id, so that they end with it."""
_PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """Have the kernel kill this process when the agent that has started it is gone, kill -9 included.

    Without :data:`AGENT` in the environment, and on other systems than Linux, nothing happens.
    """
    agent = os.environ.get(AGENT)
    if agent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(agent):  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
