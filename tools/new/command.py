"""The verb `new`: create a project with a module, data, a recipe, a test and CI."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from trainwright.core.problems import ConfigError
from trainwright.tools.verb import OK, run_verb

VERB = "new"
# File of a project -> its template in `templates/`; `{name}` is the project, `{title}` its class prefix.
FILES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yml": "ci.yml",
    "{name}/__init__.py": "__init__.py",
    "{name}/module.py": "module.py",
    "{name}/data.py": "data.py",
    "conf/recipe/{name}.yaml": "recipe.yaml",
    "tests/test_layouts.py": "test_layouts.py",
}
_TEMPLATES = files("trainwright.tools.new") / "templates"
HELP = """trainwright new: create a project with a module, data, a recipe, a test and CI.

usage: trainwright new NAME

  NAME    folder to create, and the name of its package: letters in lower case, digits and _

example:
  trainwright new my_project
"""


def run_new_command(words: Sequence[str]) -> int:
    """Create a project and print what to type next.

    Args:
        words: the command line after `trainwright`, `new` included.

    Returns:
        The exit code: 0 success, 2 the command line was refused.
    """
    return run_verb(VERB, words, HELP, _create)


def _create(words: Sequence[str]) -> int:
    problem = _problem(words)
    if problem:
        raise ConfigError([problem])
    name = words[0]
    for path, text in project(name).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"created {name}/. Next:\n\n  cd {name}\n  trainwright fit --config-dir conf recipe={name}\n")
    return OK


def project(name: str) -> dict[Path, str]:
    """Return the files of a project: path -> text."""
    words = {"name": name, "title": "".join(word.capitalize() for word in name.split("_"))}
    texts = {path: (_TEMPLATES / f"{file}.txt").read_text(encoding="utf-8") for path, file in FILES.items()}
    return {Path(name, path.format(**words)): text.format(**words) for path, text in texts.items()}


def _problem(words: Sequence[str]) -> str | None:
    """Return why a project cannot be created; None: it can."""
    if len(words) > 1:
        return f"new takes one name, and was given {len(words)}: {' '.join(words)}; type trainwright new {words[0]}"
    name = words[0]
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        return (
            f"new {name}: the name must be a Python identifier in lower case that begins with a letter and ends with a "
            "letter or digit; type trainwright new my_project"
        )
    if Path(name).exists():
        return f"new {name}: {name} exists in this folder; choose another name"
    if name in ("tests", "conf") or find_spec(name) is not None:
        return f"new {name}: a package of this name exists already; type trainwright new my_{name}"
    if (files("trainwright.conf") / "recipe" / f"{name}.yaml").is_file():
        return f"new {name}: trainwright has a recipe of this name; type trainwright new my_{name}"
    return None
