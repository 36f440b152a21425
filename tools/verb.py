"""Frame of a verb: help, errors and exit codes."""

import sys
from collections.abc import Callable, Sequence

from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError

OK, FAILED, REFUSED = 0, 1, 2


def run_verb(
    verb: str,
    words: Sequence[str],
    usage: str,
    run: Callable[[list[str]], int],
    bare: bool = False,
    silent: bool = False,
) -> int:
    """Run a verb, or print its usage if it lacks arguments; print errors to stderr.

    Args:
        verb: its name.
        words: the command line after `trainwright`, verb included.
        usage: for `--help`.
        run: takes the other words and returns the exit code.
        bare: whether it also runs without arguments.
        silent: whether another process prints the errors.

    Returns:
        The exit code: 0 success, 1 a rank failed or a checkpoint is damaged, 2 the command line was refused.
    """
    rest = list(words)
    rest.remove(verb)
    if "-h" in rest or "--help" in rest or not (rest or bare):
        print(usage, end="")
        return OK if rest else REFUSED
    try:
        return run(rest)
    except (ConfigError, CheckpointError, RankError) as error:
        if not silent:
            print(f"trainwright: {error}", file=sys.stderr)
        return FAILED if isinstance(error, DamagedCheckpoint | RankError) else REFUSED
