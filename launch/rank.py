"""Entry point of a rank."""

import os
from collections.abc import Mapping
from pathlib import Path

from trainwright.core.failures.failure import FailureRecorder, log_file
from trainwright.core.failures.records import write_result
from trainwright.core.processes.watch import ShutdownWatch
from trainwright.core.run.run_directory import read_config
from trainwright.launch.ranks.forkserver import restore_defaults
from trainwright.launch.ranks.output import Output


def rank_main(environment: Mapping[str, str], verb: str, folder: Path, records: Path) -> None:
    """Run one rank of the run whose configuration is in `folder`.

    Args:
        environment: variables of this rank; the fork server has those of its own start.
        verb: fit, validate, test or predict.
        folder: has config.yaml.
        records: folder for failures, progress and, from rank 0, the final metrics.

    Raises:
        SystemExit: with exit code 1 after a recorded error; unchanged if the user's code raised it.
    """
    os.environ.update(environment)
    rank = int(environment["RANK"])
    recorder = FailureRecorder(records, rank)
    try:
        restore_defaults()
        cfg = read_config(folder)
        recorder.run_dir = Path(cfg.run_dir)
        if rank != 0:
            Output().to(log_file(Path(cfg.run_dir), rank))
        ShutdownWatch.start_in_rank(cfg.launch.grace_seconds)
        # The fork server has imported these already; an import error here is recorded as this rank's error.
        from trainwright.launch.ranks.progress import ProgressReport
        from trainwright.launch.worker import run_verb

        metrics = run_verb(cfg, verb, on_exception=recorder.record, more_callbacks=[ProgressReport(records)])
        if rank == 0:
            write_result(records, metrics)
    except SystemExit as error:
        recorder.record(error)
        raise
    except BaseException as error:
        recorder.record(error)
        raise SystemExit(1) from None  # the launching process prints the recorded error; here it would appear twice
