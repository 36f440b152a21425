"""Imports of the fork server, shared by all ranks."""

import gc

from trainwright.launch.ranks.forkserver import serve, without_collector

serve()
with without_collector():
    import trainwright.launch.rank
    import trainwright.launch.ranks.progress
    import trainwright.launch.worker  # noqa: F401

# The imports live as long as the process: exclude them from garbage collection, which would also write to memory
# shared by all ranks.
gc.freeze()
