"""Whether all ranks have met an exception, so that they may save together; one that is alone would wait for ever."""

from __future__ import annotations

import time

import torch.distributed as dist

from trainwright.checkpoint.exchange.groups import default_store

WAITING_SECONDS = 10.0
_PAUSE = 0.05
_KEY = "trainwright/interrupted"


def all_are_interrupted(seconds: float = WAITING_SECONDS) -> bool:
    """Return whether every rank has called this within ``seconds``; all that call it get the same answer.

    To be called once for each exception that ends a run. Ranks that did not meet one are not waited for longer, nor is
    anything sent to them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
    try:
        number = store.add(f"{_KEY}/{rank}", 1)
        here, answer = f"{_KEY}/{number}/here", f"{_KEY}/{number}/answer"
        until = time.monotonic() + seconds
        all_here = store.add(here, 1) == ranks
        while not all_here and time.monotonic() < until and not store.check([answer]):
            time.sleep(_PAUSE)
        said: bytes = store.compare_set(answer, "", "all" if all_here else "some")
    except (RuntimeError, dist.DistError):  # the process that holds the store is gone
        return False
    return said == b"all"
