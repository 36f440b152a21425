"""What the fork server imports, once for all ranks that are forked from it."""

import gc

from trainwright.trainer.launch.forkserver import serve
from trainwright.trainer.launch.importing import without_collector

serve()
with without_collector():
    import trainwright.trainer.launch.progress
    import trainwright.trainer.launch.rank
    import trainwright.trainer.worker  # noqa: F401

# What was imported lives as long as the process: no rank looks through it for garbage, nor writes to memory that all
# ranks share.
gc.freeze()
