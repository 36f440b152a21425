"""What the launching process must know of the machine before it starts ranks."""

import errno
import os
import socket


def num_gpus() -> int:
    """GPUs that torch can use here. Counts them without making a CUDA context."""
    import torch

    return torch.cuda.device_count()


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def port_is_taken(port: int) -> bool:
    """Whether another process listens on this TCP port of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the rendezvous store does: a port that is merely cooling down after a run counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False
