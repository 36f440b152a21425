"""How many of a seeded draw of small mistakes in the product the tests notice.

Each mutant is one changed operator, constant, condition or result. Its tests are those of the mirrored folder, then
those that import its module, then a few that train under most layouts; they stop at the first failure. What `make test`
does not notice, the cases that only `make thorough` runs may. Works on copies of the committed tree below a temporary
folder; ``--tests REVISION`` takes the tests of another commit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import trainwright

ROOT = Path(trainwright.__file__).resolve().parents[2]
FOLDERS = ("core", "checkpoint", "strategies", "callbacks", "trainer", "planning", "launch", "command", "tools")
WIDE = (
    "tests/parity/test_strategies.py",
    "tests/parity/test_layouts.py",
    "tests/parity/test_features.py",
    "tests/parity/test_run_state.py",
    "tests/launch/test_launch.py",
    "tests/test_structure.py",
)
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Attributes:
        file: path below the root of the project.
        line: of the expression, from 1.
        before: its text.
        after: what stands there instead.
    """

    file: str
    line: int
    before: str
    after: str


def changed(node: ast.expr) -> ast.expr | None:
    """Return the mistake to make of an expression; None: it stays."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in SWAPS:
            return ast.Compare(left, [SWAPS[type(operator)]()], right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(SWAPS[type(operator)](), values)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPS and not _is_text(left, right):
            return ast.BinOp(left, SWAPS[type(operator)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
    return None


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(each, ast.JoinedStr | ast.Constant) and not _is_number(each) for each in nodes)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of the bodies of a file's functions, where an expression stands on one line of plain text."""
    text = file.read_text()
    bodies = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for body in bodies:
        for statement in body.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.expr) and node.lineno == node.end_lineno and (new := changed(node)):
                    old = ast.get_source_segment(text, node)
                    if old and text.splitlines()[node.lineno - 1].count(old) == 1:
                        yield Mutant(str(file.relative_to(ROOT)), node.lineno, old, f"({ast.unparse(new)})")


def draw(number: int, seed: int) -> list[Mutant]:
    """Draw mutants: a file by its length, then a place in it."""
    generator = random.Random(seed)
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    files = [file for file in files if list(mutants_of(file))]
    lengths = [len(file.read_text().splitlines()) for file in files]
    return [generator.choice(sorted(mutants_of(file), key=str)) for file in generator.choices(files, lengths, k=number)]


def tests_of(tree: Path, mutant: Mutant) -> list[list[str]]:
    """Files and folders of tests in the order in which they are tried."""
    folder = Path("tests", mutant.file).parent
    while not list((tree / folder).glob("**/test_*.py")):
        folder = folder.parent
    parts = Path(mutant.file).with_suffix("").parts
    name = ".".join(parts)
    importing = [
        str(file.relative_to(tree))
        for file in sorted((tree / "tests").rglob("test_*.py"))
        if f"trainwright.{name} " in file.read_text() and folder not in file.relative_to(tree).parents
    ]
    return [tests for tests in ([str(folder)], importing, list(WIDE)) if tests]


def noticed_by(tree: Path, mutant: Mutant, marks: str, seconds: float, workers: int) -> str | None:
    """Return the first test with ``marks`` that fails with a mutant, or what was slow; None: none does."""
    file = tree / mutant.file
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    lines[mutant.line - 1] = lines[mutant.line - 1].replace(mutant.before, mutant.after)
    file.write_text("".join(lines))
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks, "-n", str(workers), "--dist", "loadfile"]
    options += ["-o", f"timeout={seconds / 4}"]
    try:
        for tests in tests_of(tree, mutant):
            command = [sys.executable, "-m", "pytest", *options, *tests]
            ended = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
            if ended.returncode not in (0, 5):  # 5: nothing to run
                said = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return said[0].partition(" - ")[0] if said else f"pytest ended with {ended.returncode}"
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s"
    finally:
        file.write_text(text)
    return None


def main() -> None:
    """Draw mutants, run their tests, and print which are noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--tests", help="commit to take the tests from (default: the present one)")
    parser.add_argument("--seconds", type=float, default=600, help="each of the three groups of tests may take")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="trainwright-mutants-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        if given.tests:
            subprocess.run(["git", "rm", "-q", "-r", "tests"], cwd=tree, check=True)
            subprocess.run(["git", "checkout", "-q", given.tests, "--", "tests"], cwd=tree, check=True)
        for mutant in draw(given.number, given.seed):
            by = noticed_by(tree, mutant, "not thorough", given.seconds, given.workers)
            rest = None if by else noticed_by(tree, mutant, "thorough", given.seconds, given.workers)
            said = by or (f"by make thorough alone: {rest}" if rest else "NOT noticed")
            print(f"{mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}: {said}", flush=True)
            results.append({**asdict(mutant), "noticed_by": by, "thorough": rest})
    noticed = sum(each["noticed_by"] is not None for each in results)
    more = sum(each["thorough"] is not None for each in results)
    found = {"seed": given.seed, "mutants": len(results), "noticed": noticed, "by_thorough_alone": more}
    print(json.dumps({**found, "results": results}))


if __name__ == "__main__":
    main()
