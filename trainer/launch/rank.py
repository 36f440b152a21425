"""The first thing that a rank runs."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.trainer.launch.failure import FailureRecorder, log_file
from trainwright.trainer.launch.records import write_result
from trainwright.trainer.launch.watch import ShutdownWatch
from trainwright.trainer.run_directory import read_config


def rank_main(environment: Mapping[str, str], verb: str, run_dir: Path, records: Path) -> None:
    """Run one rank of a run whose configuration lies in its directory.

    Args:
        environment: variables of this rank; the fork server has those of the time when it started.
        verb: fit, validate, test or predict.
        run_dir: with config.yaml.
        records: where failures are written down, and by rank 0 the metrics of the end.

    Raises:
        SystemExit: with exit code 1 after an error, which is written down; as it came if the user's code raised it.
    """
    os.environ.update(environment)
    rank = int(environment["RANK"])
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

        metrics = run_verb(cfg, verb, on_exception=recorder.record)
        if rank == 0:
            write_result(records, metrics)
    except SystemExit:
        raise
    except BaseException as error:
        recorder.record(error)
        raise SystemExit(1) from None  # the launching process tells what was recorded; here it would be told twice


def _redirect_output(path: Path) -> None:
    """Send everything this process prints, compiled code included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
