"""Installs the peers into environments of their own, or removes them."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.peers.environments import ENVIRONMENTS, default_cache, install


def main() -> int:
    """Install."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description=__doc__)
    parser.add_argument("peers", nargs="*", help=f"default: {' '.join(ENVIRONMENTS)}")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder (default: %(default)s)")
    parser.add_argument("--remove", action="store_true", help="delete the environments instead")
    options = parser.parse_args()
    unknown = [name for name in options.peers if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is {', '.join(ENVIRONMENTS)}")
    names = options.peers or list(ENVIRONMENTS)
    if options.remove:
        for name in names:
            shutil.rmtree(ENVIRONMENTS[name].folder(options.cache), ignore_errors=True)
        return 0
    return 0 if install([ENVIRONMENTS[name] for name in names], options.cache) else 1


if __name__ == "__main__":
    raise SystemExit(main())
