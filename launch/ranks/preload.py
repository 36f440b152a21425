"""Imports of the fork server, shared by all ranks."""

import gc

from trainwright.core.processes.scratch import default_variables
from trainwright.launch.ranks.forkserver import serve, without_collector

serve()
# The default of a rank's threads that set no number of CPU threads; OpenMP reads it when it is loaded.
with without_collector(), default_variables({"OMP_NUM_THREADS": "1"}):
    import trainwright.launch.rank
    import trainwright.launch.ranks.progress
    import trainwright.launch.worker  # noqa: F401

# The imports live as long as the process: exclude them from garbage collection, which would also write to memory
# shared by all ranks.
gc.freeze()
