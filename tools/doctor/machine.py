"""Checks of cores and memory against the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.processes.machine import MachineFacts
from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning

AREA = "machine"
# Memory of a rank that has imported torch and Lightning, and of one that trains a small model.
_LEAST_MEMORY, _ENOUGH_MEMORY = 2**29, 2**30


@dataclass(frozen=True)
class Demand:
    """Resources that a run asks of one machine.

    Args:
        ranks: on this machine.
        workers: data-loader processes per rank.
        threads: CPU threads per rank.
        on_gpu: whether ranks compute on GPUs.
        hosts: number of machines of the run.
    """

    ranks: int
    workers: int = 0
    threads: int = 1
    on_gpu: bool = False
    hosts: int = 1


def judge_machine(facts: MachineFacts, demand: Demand) -> list[Finding]:
    """Judge cores and memory against the ranks of this machine."""
    return [_cores(facts, demand), _memory(facts, demand)]


def _cores(facts: MachineFacts, demand: Demand) -> Finding:
    usable = facts.cores if facts.quota is None else min(facts.cores, facts.quota)
    found = f"{facts.cores} cores"
    if facts.quota is not None:
        found += f", {facts.quota:g} usable by the cgroup limit"
    found += f" for {demand.ranks} ranks of {demand.threads} threads"
    if demand.ranks > usable and not demand.on_gpu:
        wanted = "one core per rank; ranks that share a core wait for each other in every collective"
        todo = f"devices={max(1, int(usable))}, or more cores (docker run --cpus, srun --cpus-per-task)"
    elif demand.ranks * demand.threads > usable:
        wanted = f"at most {usable:g} threads in total"
        todo = f"launch.threads={max(1, int(usable // demand.ranks))}, or export OMP_NUM_THREADS"
    elif demand.ranks * demand.workers > 2 * usable:
        found += f" with {demand.workers} loader workers each"
        wanted = f"at most about {int(2 * usable)} workers on this machine"
        todo = f"num_workers={max(1, int(2 * usable // demand.ranks))} in the loaders"
    else:
        return ok(AREA, "cores", found)
    return warning(AREA, "cores", found, wanted, todo)


def _memory(facts: MachineFacts, demand: Demand) -> Finding:
    found = f"{size_text(facts.available)} available of {size_text(facts.memory)}"
    if facts.memory_limit is not None:
        found += f", {size_text(facts.memory_limit)} allowed by the cgroup"
    each = facts.available // demand.ranks
    if each >= _ENOUGH_MEMORY:
        return ok(AREA, "memory", found)
    judge = error if each < _LEAST_MEMORY else warning
    return judge(
        AREA,
        "memory",
        f"{found}: {size_text(each)} for each of {demand.ranks} ranks",
        f"{size_text(_ENOUGH_MEMORY)} per rank before it holds a model; with less the kernel kills ranks",
        "use fewer devices=, stop other processes, or raise the limit (docker run --memory, srun --mem)",
    )
