"""What the fork server imports, once for all ranks that are forked from it."""

import gc

from trainwright.launch.ranks.forkserver import serve
from trainwright.launch.ranks.importing import without_collector

serve()
with without_collector():
    import trainwright.launch.rank
    import trainwright.launch.ranks.progress
    import trainwright.launch.worker  # noqa: F401

# What was imported lives as long as the process: no rank looks through it for garbage, nor writes to memory that all
# ranks share.
gc.freeze()
