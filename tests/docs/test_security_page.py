"""docs/security.md names tests that exist, and every test of tests/security."""

from __future__ import annotations

import ast
import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE))


def test_named_tests_exist() -> None:
    for file, name in NAMED:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        tests = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert not name or name in tests, f"{file}::{name}"


def test_every_file_of_attacks_is_named() -> None:
    attacks = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert attacks <= {file for file, _ in NAMED}


def test_every_row_has_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    for row in rows:
        assert re.search(r"`tests/[^|]*\|$|\| - \|$|\| tests \|$", row), row
