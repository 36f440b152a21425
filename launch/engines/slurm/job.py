"""Program of a SLURM task, one per machine, that runs the ranks of its machine.

On one machine the ranks are those of `launch=local`, with all its recovery. On several, each task is a torchrun agent,
and the agents meet on the first machine of the job. So failed ranks are restarted within the job, which keeps its
machines; with one task per rank, SLURM would end the job and queue it again.
"""

import os
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import write_result
from trainwright.core.processes.orphans import AGENT
from trainwright.core.run.interrupt import Interrupted, raise_interrupted
from trainwright.core.run.run_directory import read_config
from trainwright.core.tools import tool
from trainwright.launch.engines.torchrun.agent import Rendezvous, run_agent
from trainwright.launch.outcome.rank_records import NodeOutcome, ends_folder, forget_node, is_restart, write_node
from trainwright.launch.ranks.forkserver import start_forkserver, stop_forkserver

# Like Lightning and torch, derive the port from the job id, which is unique on a machine.
_FIRST_PORT, _PORTS = 20000, 20000


def run_node(run_dir: str, verb: str) -> None:
    """Run the ranks of this machine; called by submitit in every task of the job.

    Args:
        run_dir: with the resolved `config.yaml`; visible to all machines.
        verb: fit, validate, test or predict.

    Raises:
        SystemExit: with the exit code of the task, unless it is 0.
    """
    from submitit import JobEnvironment

    signal.signal(signal.SIGTERM, raise_interrupted)  # submitit's own handler ignores it
    place = JobEnvironment()
    folder = ends_folder(Path(run_dir))
    forget_node(folder, place.node)
    cfg = read_config(Path(run_dir))
    try:
        if cfg.nodes == 1:
            end = _run_local(cfg, verb, folder)
        else:
            rendezvous = rendezvous_of(place.raw_job_id, list(place.hostnames), place.node)
            end = _run_multi_node(cfg, verb, rendezvous)
    except Interrupted as interrupted:
        end = NodeOutcome(interrupted.exit_code, interrupted.number)
    except KeyboardInterrupt:
        end = NodeOutcome(128 + signal.SIGINT, signal.SIGINT)
    finally:
        stop_forkserver()
    write_node(folder, place.node, end)
    if place.node == 0 and verb == "fit" and cfg.report and not cfg.launch.wait:  # else the waiting command does it
        tool("write_report")(Path(run_dir))
    if end.error is not None:
        print(f"trainwright: {end.error}", file=sys.stderr, flush=True)
    if end.exit_code:
        raise SystemExit(end.exit_code)


def rendezvous_of(job: str, hosts: list[str], node: int) -> Rendezvous:
    """Return the rendezvous of a job's agents, on its first machine.

    Args:
        job: id of the job, in an array that of its own task.
        hosts: names of the machines, in order.
        node: number of this machine.
    """
    return Rendezvous(f"slurm-{job}", hosts[0], _FIRST_PORT + int(job) % _PORTS, is_host=node == 0)


def _run_local(cfg: DictConfig, verb: str, folder: Path) -> NodeOutcome:
    from trainwright.launch.local.local import launch_local
    from trainwright.launch.recovery.check_resume import resume_in_place

    start_forkserver()
    is_requeued = is_restart(Path(cfg.run_dir))
    if is_requeued:
        cfg = resume_in_place(cfg, verb)
    try:
        metrics = launch_local(cfg, verb, is_written=not is_requeued)
    except RankError as error:
        return NodeOutcome.of_error(error)
    write_result(folder, metrics)
    return NodeOutcome(0)


def _run_multi_node(cfg: DictConfig, verb: str, rendezvous: Rendezvous) -> NodeOutcome:
    threads = cfg.launch.threads or os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[AGENT] = str(os.getpid())
    # SLURM signals all processes of the job; agents end with their ranks.
    return run_agent(cfg, verb, rendezvous)
