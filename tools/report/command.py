"""The verbs `report` and `watch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainwright.command.arguments import Parser
from trainwright.core.problems import ConfigError
from trainwright.core.text.printable import one_line

OK, REFUSED = 0, 2
_MOST_RUNS = 8
_LONGEST_WAIT = 86400

HELP = {
    "report": """trainwright report: show one run, or several side by side, as one self-contained HTML page.

usage: trainwright report RUN_DIR [RUN_DIR ...] [--out FILE]

  RUN_DIR       a run directory, of a finished or a running run; up to 8
  --out FILE    where the page is written; default: report.html in the run directory, or, for several runs, in the
                current directory

examples:
  trainwright report runs/gpt/2026-01-31_14-05-09
  trainwright report runs/gpt/2026-01-31_14-05-09 runs/gpt/2026-02-01_09-00-00 --out compared.html
""",
    "watch": """trainwright watch: show a running run in the terminal, from any shell. Ctrl-C ends watch, not
the run.

usage: trainwright watch RUN_DIR [--every SECONDS] [--once]

  RUN_DIR           a run directory; the run may have ended or not have started yet
  --every SECONDS   seconds between updates (default 2)
  --once            print the current state and exit

example:
  trainwright watch runs/gpt/2026-01-31_14-05-09
""",
}


def run_report_command(words: Sequence[str]) -> int:
    """Run `report` or `watch` and print errors to stderr.

    Args:
        words: the command line after `trainwright`, verb included.

    Returns:
        The exit code: 0 success, 2 the command line or a path was refused.
    """
    if "-h" in words or "--help" in words:
        print(HELP[next(word for word in words if word in HELP)], end="")
        return OK
    try:
        arguments = parse(words)
        return _report(arguments) if arguments.verb == "report" else _watch(arguments)
    except BrokenPipeError:  # the reader of `watch` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    except ConfigError as error:
        problem = "; ".join(error.problems)
    print(f"trainwright: {one_line(problem)}", file=sys.stderr)
    return REFUSED


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Args:
        words: the command line after `trainwright`, verb included.

    Raises:
        ConfigError: if it is invalid.
    """
    rest = list(words)
    verb = next(word for word in rest if word in HELP)
    rest.remove(verb)
    parser = Parser(verb)
    if verb == "report":
        parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path)
        parser.add_argument("--out", metavar="FILE", type=Path)
    else:
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
        parser.add_argument("--every", metavar="SECONDS", type=float, default=2.0)
        parser.add_argument("--once", action="store_true")
    arguments = parser.parse_intermixed_args(rest)
    arguments.verb = verb
    return arguments


def _report(arguments: argparse.Namespace) -> int:
    from trainwright.tools.report.page import PAGE_FILE, write_page
    from trainwright.tools.report.records import is_run

    run_dirs: list[Path] = arguments.run_dirs
    wrong = [f"{path}: {_why_not_a_run(path)}" for path in run_dirs if not is_run(path)]
    if wrong:
        raise ConfigError(wrong)
    if len(run_dirs) > _MOST_RUNS:
        raise ConfigError([f"{len(run_dirs)} run directories were given; a page shows at most {_MOST_RUNS}"])
    out = arguments.out or (run_dirs[0] if len(run_dirs) == 1 else Path()) / PAGE_FILE
    if out.is_dir():
        raise ConfigError([f"--out {out}: this is a folder; type a file name, for example {out / PAGE_FILE}"])
    try:
        write_page(run_dirs, out)
    except OSError as error:
        raise ConfigError([f"{out}: {error.strerror}; type another --out FILE"]) from error
    print(f"report: {one_line(os.fspath(out))}")
    return OK


def _watch(arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.every <= _LONGEST_WAIT:
        raise ConfigError([f"--every {arguments.every:g}: must be between 0.1 and {_LONGEST_WAIT} seconds"])
    if arguments.run_dir.exists() and not arguments.run_dir.is_dir():
        raise ConfigError([f"{arguments.run_dir}: this is a file; type the run directory"])
    from trainwright.tools.report.watch import watch

    watch(arguments.run_dir, arguments.every, once=arguments.once)
    return OK


def _why_not_a_run(path: Path) -> str:
    if not path.exists():
        return "this run directory does not exist; type runs/<name>/<time>"
    if not path.is_dir():
        return "this is a file; type the run directory"
    inside = sorted(below.name for below in path.iterdir() if (below / "config.yaml").is_file())
    if inside:
        return f"this folder contains runs but is not one itself; type for example {path / inside[-1]}"
    return "this is not a run directory: it has no config.yaml, metrics.csv or monitor/; type runs/<name>/<time>"


def write_report(run_dir: Path) -> None:
    """Write `report.html` into a run directory and print its path; print a failure instead of raising it."""
    try:
        from trainwright.tools.report.page import PAGE_FILE, write_page

        out = run_dir / PAGE_FILE
        write_page([run_dir], out)
    except Exception as error:  # a report must not change the outcome of a run
        why = one_line(str(error)) or type(error).__name__
        print(f"trainwright: no report was written: {why}", file=sys.stderr, flush=True)
        return
    relative = os.path.relpath(out)
    print(f"Report:        {out if relative.startswith('..') else relative}", flush=True)
