"""One rank started by an engine, for the run in a run directory.

    python -m trainwright.command.engine_rank RUN_DIR VERB

The environment identifies the rank, as torchrun's or SLURM's does. All output, that of compiled code included, is
appended to the rank's log in the run directory.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from trainwright.command.run import next_config, run_in_process
from trainwright.core.failures.failure import FailureRecorder, log_file
from trainwright.core.failures.records import write_result
from trainwright.core.processes.orphans import end_with_agent
from trainwright.core.run.interrupt import Interrupted, raise_interrupted
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.launch.engines.torchrun.agreement import agree
from trainwright.launch.outcome.rank_records import forget_rank, record_local_rank
from trainwright.launch.ranks.output import Output


def run_rank(run_dir: Path, verb: str, launcher: Launcher) -> None:
    """Run the rank that this process is; rank 0 writes the final metrics into the run directory.

    Args:
        run_dir: with `config.yaml`; visible to all ranks.
        verb: fit, validate, test or predict.
        launcher: of `detect_launcher`.

    Raises:
        SystemExit: with exit code 1 after a recorded error; unchanged if the user's code raised it.
        Interrupted: if this process was interrupted.
    """
    ends = forget_rank(run_dir, launcher.rank, launcher.world_size)
    recorder = FailureRecorder(ends, launcher.rank, run_dir)
    try:
        cfg = agree(launcher, lambda launcher: next_config(run_dir, verb, launcher))
        if cfg is None:
            raise SystemExit(1)  # rank 0 reports the reason
        metrics = run_in_process(cfg, verb, on_exception=recorder.record)
    except SystemExit as error:
        recorder.record(error)
        raise
    except Exception as error:
        recorder.record(error)
        raise SystemExit(1) from None
    if launcher.rank == 0:
        write_result(ends, metrics)


def main(words: Sequence[str]) -> int:
    """Run the command above; return its exit code."""
    end_with_agent()
    signal.signal(signal.SIGTERM, raise_interrupted)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for the command `trainwright`
    run_dir, verb = Path(words[0]), words[1]
    launcher = detect_launcher()
    assert launcher is not None, "an engine gives its ranks RANK, WORLD_SIZE and the like"
    record_local_rank(run_dir, launcher.rank)
    Output().to(log_file(run_dir, launcher.rank))
    try:
        run_rank(run_dir, verb, launcher)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to shut down
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
