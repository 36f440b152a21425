"""Try libraries in their environments and record the outcomes: ``python -m tests.libraries.record [NAME[:ROW] ...]``.

Without names, all libraries that are installed and have rows. Afterwards write the page: ``python -m tests.libraries``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from benchmarks.report import say
from tests.libraries.environments import LIBRARIES, default_cache
from tests.libraries.table import theme_of

# Seconds of a library.
PATIENCE = 7200


def main() -> int:
    """Record."""
    parser = argparse.ArgumentParser(prog="python -m tests.libraries.record", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME[:ROW]", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder (default: %(default)s)")
    options = parser.parse_args()
    chosen: dict[str, list[str]] = {}
    for each in options.names or LIBRARIES:
        library, _, row = each.partition(":")
        chosen.setdefault(library, []).extend([row] if row else [])
    if unknown := chosen.keys() - LIBRARIES:
        parser.error(f"{', '.join(sorted(unknown))}: there is {', '.join(LIBRARIES)}")
    recorded = [_record(library, names, options.cache) for library, names in chosen.items()]
    return 0 if all(recorded) else 1


def _record(library: str, names: list[str], cache: Path) -> bool:
    environment = LIBRARIES[library]
    if find_spec(theme_of(library)) is None:
        return True
    try:
        python = environment.python(cache)
    except RuntimeError as error:
        say(f"{library}: {error}")
        return False
    command = [str(python), "-m", "tests.libraries.try_rows", library, *names]
    variables = {**os.environ, **environment.environment(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, timeout=PATIENCE, check=False).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
