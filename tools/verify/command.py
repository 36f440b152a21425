"""The verb `verify`."""

from __future__ import annotations

import argparse
import json
import sys

from trainwright.command.run import plan
from trainwright.command.schema.compose import compose_checked
from trainwright.command.schema.expansion import tell_import
from trainwright.command.verify_options import take_options
from trainwright.core.problems import ConfigError
from trainwright.launch.ranks.output import ranks_speak_to_stderr
from trainwright.tools.verify.verify import problems_of, verify

OK, FAILED = 0, 1


def run_verify_command(arguments: argparse.Namespace) -> int:
    """Compare a layout with one process; standard output holds the report alone.

    Args:
        arguments: of the command line, parsed.

    Returns:
        The exit code: 0 = equal, 1 = not.

    Raises:
        ConfigError: if the configuration is impossible.
    """
    options, overrides, problems = take_options(arguments.overrides)
    if arguments.multirun:
        problems.append("--multirun with verify: it compares one layout; start one after the other")
    composition = compose_checked(overrides, arguments.config_dir)
    problems += composition.problems
    if problems or composition.cfg is None:
        if composition.cfg is not None and composition.guessed:
            problems += [*problems_of(composition.cfg, options), *plan(composition.cfg, "fit")[1]]
        raise ConfigError(problems)

    def say(text: str) -> None:
        print(f"verify: {text}", file=sys.stderr, flush=True)

    tell_import(composition.import_report, sys.stderr)

    with ranks_speak_to_stderr():
        report = verify(composition.cfg, options, on_progress=say)
    print(json.dumps(report.to_dict(), allow_nan=False) if arguments.json else report.to_text().rstrip(), flush=True)
    return OK if report.passed else FAILED
