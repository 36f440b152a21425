"""The first thing that a rank runs."""

import os
from collections.abc import Mapping
from pathlib import Path

from trainwright.core.failures.failure import FailureRecorder, log_file
from trainwright.core.failures.records import write_result
from trainwright.core.processes.watch import ShutdownWatch
from trainwright.core.run.run_directory import read_config
from trainwright.launch.ranks.forkserver import become_ordinary
from trainwright.launch.ranks.output import Output


def rank_main(environment: Mapping[str, str], verb: str, folder: Path, records: Path) -> None:
    """Run one rank of a run whose configuration lies in a folder.

    Args:
        environment: variables of this rank; the fork server has those of the time when it started.
        verb: fit, validate, test or predict.
        folder: with config.yaml.
        records: where failures are written down, how far the rank is, and by rank 0 the metrics of the end.

    Raises:
        SystemExit: with exit code 1 after an error, which is written down; as it came if the user's code raised it.
    """
    os.environ.update(environment)
    rank = int(environment["RANK"])
    recorder = FailureRecorder(records, rank)
    try:
        become_ordinary()
        cfg = read_config(folder)
        recorder.run_dir = Path(cfg.run_dir)
        if rank != 0:
            Output().to(log_file(Path(cfg.run_dir), rank))
        ShutdownWatch.start_in_rank(cfg.launch.grace_seconds)
        # Imported in the fork server already; here it costs nothing, and an error in it is this rank's error.
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
        raise SystemExit(1) from None  # the launching process tells what was recorded; here it would be told twice
