"""Program of each pod of `launch=kubernetes`: a torchrun agent that starts the ranks of the pod.

    python -m trainwright.launch.engines.kubernetes.node VERB

The configuration was composed where the job was submitted, and is mounted by the cluster. The output of the ranks goes
to the pod's log, prefixed with the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.failures.failure import first_failure, log_file
from trainwright.core.failures.records import read_result
from trainwright.core.processes.machine import threads_of_rank
from trainwright.core.run.interrupt import Interrupted, raise_interrupted
from trainwright.core.run.run_directory import CONFIG_FILE, holds_run, read_config, write_config
from trainwright.launch.engines.kubernetes.manifest import CONFIG_FOLDER, JOB_NAME, POD_IP, WORKDIR
from trainwright.launch.engines.kubernetes.submit import metrics_line
from trainwright.launch.engines.torchrun.agent import Rendezvous, agent_environment, run_agent
from trainwright.launch.outcome.interruption import interruption_in
from trainwright.launch.outcome.rank_records import LOCAL_RANKS, NodeOutcome, ends_folder, local_ranks
from trainwright.launch.ranks.follow import Follower

# Seconds between two reads of the ranks' logs, and between attempts to connect to the first pod.
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class PodPlace:
    """Rendezvous of a job's agents, from the variables of a pod.

    Attributes:
        host: name of the first pod.
        port: of its store.
        is_first: whether this pod is the first.
    """

    host: str
    port: int
    is_first: bool


def place_of(environment: Mapping[str, str]) -> PodPlace:
    """Return the rendezvous of the agents.

    Args:
        environment: variables of the pod, set by Kubeflow Trainer for the pods of a TrainJob.

    Raises:
        ValueError: if the variables are missing.
    """
    if "PET_MASTER_ADDR" not in environment:
        raise ValueError("PET_MASTER_ADDR is not set: this program runs in the pods of launch=kubernetes")
    port = environment.get("PET_MASTER_PORT", "29500")
    return PodPlace(environment["PET_MASTER_ADDR"], int(port), environment.get("PET_NODE_RANK", "0") == "0")


def main(words: Sequence[str], folder: str = CONFIG_FOLDER) -> int:
    """Run the ranks of this pod.

    Args:
        words: the verb.
        folder: with the composed `config.yaml`.

    Returns:
        The exit code of the container.
    """
    [verb] = words
    signal.signal(signal.SIGTERM, raise_interrupted)
    os.chdir(os.environ[WORKDIR])
    cfg, place = read_config(folder), place_of(os.environ)
    problem = settle(cfg, (Path(folder) / CONFIG_FILE).read_text(encoding="utf-8")) if place.is_first else None
    if problem is not None:
        print(f"trainwright: {problem}", file=sys.stderr, flush=True)
        return 2
    with tempfile.TemporaryDirectory(prefix="trainwright-here-", ignore_cleanup_errors=True) as here:
        try:
            with _logs_shown(Path(cfg.run_dir), Path(here)):
                end = _run(cfg, verb, place)
        except Interrupted as interrupted:
            return interrupted.exit_code
        return _report(cfg, end, 0 in local_ranks(Path(here)))


def settle(cfg: DictConfig, text: str) -> str | None:
    """Create the run directory on the volume, with the configuration in it; called on the first pod.

    Args:
        cfg: the resolved configuration.
        text: the same, as submitted.

    Returns:
        Why the run cannot be there; None = it can.
    """
    run_dir = Path(cfg.run_dir)
    if not holds_run(run_dir):
        write_config(cfg)
    elif (run_dir / CONFIG_FILE).read_text(encoding="utf-8") != text:
        if cfg.resume != AUTO:
            given = f"run_dir={run_dir}: holds another run already, in launch.claim={cfg.launch.claim}"
            return f"{given}; type resume=auto to resume it, or another run_dir=..."
        write_config(cfg)
    return None


def _run(cfg: DictConfig, verb: str, place: PodPlace) -> NodeOutcome:
    """Run the agent of this pod."""
    address = os.environ[POD_IP]
    from trainwright.launch.ranks.rendezvous import LocalStore

    store = LocalStore(place.port, address) if place.is_first else None
    try:
        host = address if store is not None else _wait_for_first(place, cfg.launch.start_timeout)
        threads = {"OMP_NUM_THREADS": threads_of_rank(cfg.launch.threads, cfg.devices)}
        os.environ.update(agent_environment(address, host, place.port) | threads)
        rendezvous = Rendezvous(os.environ[JOB_NAME], host, place.port, False, address)
        return run_agent(cfg, verb, rendezvous)
    finally:
        if store is not None:
            store.close()


def _wait_for_first(place: PodPlace, seconds: float) -> str:
    """Return the name of the first pod once its store responds: its image may be pulled later than this pod's.

    Raises:
        TimeoutError: if it does not respond within `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((place.host, place.port), timeout=_CONNECT_SECONDS).close()
            return place.host
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(
        f"the first pod, {place.host}, has not answered at port {place.port} within launch.start_timeout={seconds:g} s"
    )


@contextlib.contextmanager
def _logs_shown(run_dir: Path, folder: Path) -> Iterator[None]:
    """Print the logs of this pod's ranks as they grow; the ranks register in `folder`."""
    os.environ[LOCAL_RANKS] = str(folder)
    logs, known, ended = Follower(), set[int](), threading.Event()

    def look() -> None:
        for rank, at in local_ranks(folder).items():
            if rank not in known:
                known.add(rank)
                logs.add(log_file(run_dir, rank), f"[rank {rank}]", at=at)
        logs.poll()

    def show() -> None:
        while not ended.wait(_POLL_SECONDS):
            look()

    thread = threading.Thread(target=show, name="trainwright-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()
        logs.finish()
        del os.environ[LOCAL_RANKS]


def _report(cfg: DictConfig, end: NodeOutcome, has_first: bool) -> int:
    """Report the outcome of this pod's ranks to the user and the submitting command; return the exit code.

    Args:
        cfg: the resolved configuration.
        end: of the ranks.
        has_first: whether rank 0 is among them.
    """
    folder = ends_folder(Path(cfg.run_dir))
    if end.signal is not None:
        return end.exit_code
    if end.codes:
        interruption = interruption_in(cfg, end.codes)
        if interruption is not None:
            return interruption.exit_code
        everybody: dict[int, int | None] = dict.fromkeys(range(cfg.devices * cfg.nodes))
        failure = first_failure(folder, everybody | end.codes, Path(cfg.run_dir))
        print(f"trainwright: {failure}", file=sys.stderr, flush=True)
        return 1
    if has_first:
        metrics = read_result(folder)
        if metrics is not None:
            print(metrics_line(metrics), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
