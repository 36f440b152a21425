"""Install the environments of libraries: ``python -m tests.libraries.install [--pin] [--remove] [NAME ...]``.

Without names, all that are not installed. With ``--pin`` the newest versions that fit the shared packages are
installed and recorded in ``constraints/``; otherwise those recorded there.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.environments import Environment, install
from benchmarks.report import say
from tests.libraries.environments import LIBRARIES, SHARED, default_cache


def main() -> int:
    """Install."""
    parser = argparse.ArgumentParser(prog="python -m tests.libraries.install", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder (default: %(default)s)")
    parser.add_argument("--pin", action="store_true", help="record the newest versions that fit")
    parser.add_argument("--remove", action="store_true", help="delete the environments instead")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in LIBRARIES]:
        parser.error(f"{', '.join(unknown)}: there is {', '.join(LIBRARIES)}")
    chosen = [LIBRARIES[name] for name in options.names or LIBRARIES]
    if options.remove:
        for each in chosen:
            shutil.rmtree(each.folder(options.cache), ignore_errors=True)
        return 0
    if not options.names:
        chosen = [each for each in chosen if not each.is_installed(options.cache)]
    if options.pin:
        pinned = [_pin(each, options.cache) for each in chosen]
        return 0 if all(pinned) else 1
    return 0 if install(chosen, options.cache) else 1


def _pin(environment: Environment, cache: Path) -> bool:
    shared = [f"{name}=={version(name).partition('+')[0]}" for name in SHARED]
    environment.pins.parent.mkdir(exist_ok=True)
    environment.pins.write_text("\n".join([*shared, ""]))
    say(f"{environment.name} into {environment.folder(cache)}")
    if not environment.install(cache):
        say(f"  {environment.error(cache)}")
        environment.pins.unlink()
        return False
    head = f"# What the environment of {environment.name} adds to that of this project, and what both share."
    added = environment.added(cache)
    if not any(line.startswith(f"{environment.name}==") for line in added):
        shared.append(f"{environment.name}=={version(environment.name)}")
    environment.pins.write_text("\n".join([head, *shared, *added, ""]))
    return True


if __name__ == "__main__":
    raise SystemExit(main())
