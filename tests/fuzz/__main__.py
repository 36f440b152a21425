"""Run seeds of the fuzzer: ``python -m tests.fuzz 0-99``, ``python -m tests.fuzz 17 --cell ddp``.

Prints each cell that is not equal, and counts. With ``--shrink``, a failure is reduced to the features that it needs,
and a script that reproduces it is written. Exits with 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.cells import Outcome, run_cell
from tests.fuzz.draw import cells_of, program_of
from tests.fuzz.script import script
from tests.fuzz.shrink import shrunk
from tests.pool import RankPool


def seeds_of(text: str) -> list[int]:
    """Return the seeds that ``0-99`` or ``3,17`` names."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> int:
    """Run the chosen seeds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seeds", help="such as 0-99 or 3,17")
    parser.add_argument("--cell", action="append", help="run only this layout, or FIRST>SECOND for a resumed run")
    parser.add_argument("--shrink", action="store_true", help="reduce failures and print scripts")
    parser.add_argument("--quiet", action="store_true", help="do not print refused cells")
    parser.add_argument("--scripts", default=str(Path("build").absolute()), help="folder for scripts (build)")
    arguments = parser.parse_args()
    Path(arguments.scripts).mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    pool, counts, started = RankPool(), Counter[str](), time.monotonic()
    with TemporaryDirectory() as folder, chdir(folder):
        for seed in seeds_of(arguments.seeds):
            program = program_of(seed)
            for cell in arguments.cell or cells_of(seed, program):
                outcome = run_cell(pool.run, program, cell)
                counts[outcome.kind] += 1
                if outcome.is_failure or arguments.cell or (outcome.kind == "refused" and not arguments.quiet):
                    print(f"{seed} {cell} | {outcome}\n    {program}", flush=True)
                if outcome.is_failure and arguments.shrink:
                    small, on, said = shrunk(partial(run_cell, pool.run), program, cell, outcome)
                    name = f"fuzz_{seed}_{cell.replace('>', '_to_')}.py"
                    Path(arguments.scripts, name).write_text(script(small, on))
                    print(f"    shrunk: {on} | {said}\n    {small}\n    {arguments.scripts}/{name}", flush=True)
    pool.close()
    print(f"{arguments.seeds}: {sum(counts.values())} cells, {dict(counts)}, {time.monotonic() - started:.0f} s")
    return int(any(Outcome(kind).is_failure for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
