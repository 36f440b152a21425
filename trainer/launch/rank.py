"""The first thing that a rank runs."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.trainer.launch.failure import FailureRecorder, log_file
from trainwright.trainer.launch.watch import ShutdownWatch
from trainwright.trainer.run_directory import read_config


def rank_main(verb: str, run_dir: Path, environment: Mapping[str, str], records: Path) -> dict[str, float]:
    """Run one rank of a run whose configuration lies in its directory.

    Args:
        verb: fit, validate, test or predict.
        run_dir: with config.yaml.
        environment: variables of the launching process; the fork server has those of the time when it started.
        records: where failures are written down.

    Returns:
        The metrics of the end, by name.
    """
    rank = int(os.environ["RANK"])
    for name, value in environment.items():
        if name not in _OF_THE_AGENT:
            os.environ[name] = value
    recorder = FailureRecorder(records, rank)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cfg = read_config(run_dir)
        if rank != 0:
            _redirect_output(log_file(run_dir, rank))
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        ShutdownWatch(cfg.launch.grace_seconds, launcher.sentinel).start()
        # Imported in the fork server already; here it costs nothing, and an error in it is this rank's error.
        from trainwright.trainer.worker import run_verb

        return run_verb(cfg, verb, on_exception=recorder.record)
    except BaseException as error:
        recorder.record(error)
        raise


_OF_THE_AGENT = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
    | {"TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
)


def _redirect_output(path: Path) -> None:
    """Send everything this process prints, compiled code included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
