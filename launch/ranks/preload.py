"""Imports of the fork server, shared by all ranks."""

from trainwright.core.processes.machine import on_one_stack
from trainwright.core.processes.scratch import default_variables
from trainwright.launch.ranks.forkserver import serve, without_collector


@on_one_stack
def _import_all() -> None:
    import trainwright.launch.rank
    import trainwright.launch.ranks.progress
    import trainwright.launch.worker  # noqa: F401


serve()
# The default of a rank's threads that set no number of CPU threads; OpenMP reads it when it is loaded.
with without_collector(), default_variables({"OMP_NUM_THREADS": "1"}):
    _import_all()
