"""Entry point of the command `trainwright`, before anything heavy is imported.

    trainwright <verb> [Hydra overrides] [options]
    trainwright checkpoint <verb> PATH [options]
    trainwright import-deepspeed ds_config.json [Hydra overrides] [options]
    trainwright generate RUN prompt=TEXT [Hydra overrides] [options]
    trainwright report RUN_DIR [RUN_DIR ...] [options]
    trainwright new NAME
    trainwright watch RUN_DIR [options]
    trainwright schema [--config-dir DIR]
    trainwright doctor|profile [key=value ...] [options]

Imports dominate the start-up time. So this module imports next to nothing: it installs the signal handlers, starts the
fork server, which imports torch and Lightning on another core, and only then imports `trainwright.command.verbs`.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from trainwright.core.problems import ConfigError
from trainwright.core.processes.machine import on_one_stack
from trainwright.core.processes.orphans import end_with_agent
from trainwright.core.run.interrupt import Interrupted, raise_interrupted
from trainwright.core.run.launcher import detect_launcher
from trainwright.core.tools import tool
from trainwright.launch.ranks.forkserver import start_forkserver, stop_forkserver, without_collector
from trainwright.launch.ranks.output import ranks_to_stderr

# Verbs that compose no configuration.
_TOOL_VERBS = ("checkpoint", "new", "report", "watch", "schema", "doctor", "profile")


@on_one_stack
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after `trainwright`; None = those of this process.

    Returns:
        The exit code: 0 success; 1 a rank or job failed, `verify` found a difference, `doctor` an error, or a
        checkpoint is damaged; 2 the command or configuration was refused and nothing was started; 130 and 143 after
        Ctrl-C and SIGTERM (138 after SIGUSR1, or `preemption.exit_code`); any other number was given to `sys.exit` by
        the user's code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        from trainwright.command.completion import complete

        _make_cwd_importable()
        complete()
    end_with_agent()
    previous = signal.signal(signal.SIGTERM, raise_interrupted)
    try:
        verb = next((word for word in words if word not in ("-h", "--help")), None)
        if verb not in ("checkpoint", "report", "watch"):  # which may be given absolute paths
            _make_cwd_importable()
        if verb in _TOOL_VERBS:
            return int(tool(verb)(words))
        if verb in ("import-deepspeed", "generate"):  # their configuration may name modules in the working directory
            return int(tool(verb)(words))
        if _needs_forkserver(words) and detect_launcher() is None:
            # The output of `verify`'s ranks must not mix with its report.
            with ranks_to_stderr() if "verify" in words else contextlib.nullcontext():
                start_forkserver()
        with without_collector():
            from trainwright.command.verbs import run_command

        return run_command(words)
    except Interrupted as interrupted:
        return _report_interrupt(interrupted)
    except KeyboardInterrupt:
        return _report_interrupt(Interrupted(signal.SIGINT))
    except ConfigError as error:
        print(f"trainwright: {error}", file=sys.stderr)
        return 2
    finally:
        stop_forkserver()
        signal.signal(signal.SIGTERM, previous)


def _report_interrupt(interrupted: Interrupted) -> int:
    """Print the signal that ended the command; return its exit code."""
    # A second Ctrl-C must not interrupt the last steps of this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the reader of stderr may have exited as well
        print(f"trainwright: ended by {interrupted.number.name}", file=sys.stderr)
    return interrupted.exit_code


def _needs_forkserver(words: Sequence[str]) -> bool:
    """Guess from the words alone, so that the fork server starts before composing. A wrong guess only costs time."""
    if any(word in words for word in ("-h", "--help", "--version", "--print-config", "--cfg", "layout", "plan")):
        return False
    if any(word.startswith("launch=") and word not in ("launch=local", "launch=resilient") for word in words):
        return False  # the ranks are started elsewhere
    several = any(word.startswith("devices=") and word != "devices=1" for word in words)
    several |= any(word == "launch=resilient" or word.startswith("launch.max_restarts=") for word in words)
    return several or "-m" in words or "--multirun" in words or "verify" in words


def _make_cwd_importable() -> None:
    """Let `_target_: my_model.MyModule` find my_model.py in the working directory, as `python my_script.py` would."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ConfigError(["the working directory was removed; change to one that exists: type cd ~"]) from None
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
