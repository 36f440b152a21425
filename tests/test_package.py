"""Package-wide rules: folders, directions of imports, names in documentation, prose, dependencies."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trainwright.core.layout import Layout
from trainwright.strategies.contract.registry import all_options, target_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
API = ROOT / "src" / "trainwright"
# Folders of the repository that are not installed.
NOT_INSTALLED = {"src", "tests", "benchmarks", "docs", "build"}
# Package -> packages of this project that it may import, imports for types included.
_BELOW_TRAINER = {"core", "checkpoint", "strategies", "callbacks"}
ALLOWED = {
    "core": set(),
    "checkpoint": {"core"},
    "strategies": {"core", "checkpoint"},
    "callbacks": {"core", "checkpoint"},
    "trainer": _BELOW_TRAINER,
    "launch": {*_BELOW_TRAINER, "trainer"},
    "planning": {*_BELOW_TRAINER, "trainer"},
    "command": {*_BELOW_TRAINER, "trainer", "launch", "planning", "conf"},
    "tools": {*_BELOW_TRAINER, "trainer", "launch", "planning", "command"},
    "api": {*_BELOW_TRAINER, "trainer", "launch", "command"},
    "recipes": {"api"},
    "conf": set(),
}
# Folders of `strategies` that each may import beside itself.
_AXES = {"contract", "plan"}
_BELOW_BASE = {*_AXES, "tensor", "context", "expert", "pipeline", "state"}
_BELOW_COMPOSE = {*_BELOW_BASE, "base", "averaging", "data", "parameter_server"}
ALLOWED_IN_STRATEGIES = {
    "contract": set(),
    "plan": {"contract"},
    "tensor": _AXES,
    "context": _AXES,
    "expert": _AXES,
    "pipeline": _AXES,
    "state": {"contract"},
    "averaging": {"contract", "state"},
    "base": {*_BELOW_BASE, "averaging"},
    "data": {"contract", "plan", "state", "base", "averaging"},
    "parameter_server": {"contract", "plan", "state", "base", "averaging"},
    "compose": _BELOW_COMPOSE,
    "local_updates": {*_BELOW_COMPOSE, "compose"},
}
# Modules that the command line or a launching parent imports: torch takes 1.4 s, Lightning 3.9 s.
LIGHT = {
    "trainwright": {"torch", "lightning"},
    "trainwright.strategies.contract.registry": {"torch", "lightning"},
    "trainwright.strategies.compose.hybrid_options": {"torch", "lightning", "omegaconf"},
    "trainwright.core.layout": {"torch", "lightning"},
    "trainwright.core.global_batch": {"torch", "lightning"},
    "trainwright.launch.schema": {"torch", "lightning"},
    "trainwright.command.schema.compose": {"torch", "lightning"},
    "trainwright.command.cli": {"torch", "lightning", "jinja2", "rich"},
    "trainwright.tools.report.page": {"torch", "lightning", "omegaconf"},
    "trainwright.tools.report.watch": {"torch", "lightning", "omegaconf"},
    "trainwright.launch.worker": {"wandb", "mlflow"},
}


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its import name."""
    found = {}
    for file in [*API.glob("*.py"), *(file for link in links() for file in link.resolve().rglob("*.py"))]:
        inside = file.relative_to(API if file.parent == API else ROOT).with_suffix("")
        found[".".join(["trainwright", *inside.parts]).removesuffix(".__init__")] = file
    return dict(sorted(found.items()))


def links() -> list[Path]:
    return sorted(path for path in API.iterdir() if path.is_symlink())


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "api"


@cache
def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(modules()[module].read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of this project that ``module`` imports: at load, inside functions, and for types."""
    return frozenset().union(*map(imported_by, ast.walk(tree(module))))


def imported_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.split(".")[0] == "trainwright"}
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainwright":
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        submodules = names & modules().keys()
        return submodules if len(submodules) == len(names) else submodules | {node.module}
    return set()


# ---- Folders, and what they import ----------------------------------------------------------------------------------


def test_every_folder_with_code_is_installed():
    with_code = {file.relative_to(ROOT).parts[0] for file in ROOT.glob("*/**/*.py")}
    installed = {folder for folder in with_code - NOT_INSTALLED if not folder.startswith(".")}
    assert {link.name: link.readlink() for link in links()} == {folder: Path("../..", folder) for folder in installed}


def test_every_folder_with_code_is_a_package():
    assert [str(file) for file in modules().values() if not (file.parent / "__init__.py").is_file()] == []


def test_wheel_contains_the_package_only(tmp_path, monkeypatch):
    """Ask setuptools what it would put into one, without building it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PLAT", "")  # setuptools sets it
    found = setuptools.distutils.core.run_setup("setup.py", ["--quiet"], stop_after="config")
    found.command_options["egg_info"] = {"egg_base": ("test", str(tmp_path))}
    built = found.get_command_obj("build_py")
    built.ensure_finalized()
    files = {Path(file).relative_to(built.build_lib) for file in built.get_outputs(include_bytecode=False)}
    kinds = {".py": 0, ".yaml": 0, ".j2": 0, ".css": 0, ".txt": 0, ".typed": 0}
    for file in files:
        assert file.parts[0] == "trainwright"
        kinds[file.suffix if file.suffix else file.name] += 1
    assert kinds[".py"] == len(modules())
    assert kinds[".yaml"] == len(list((ROOT / "conf").glob("**/*.yaml")))
    templates = [*(ROOT / "core" / "charts" / "templates").iterdir(), *(ROOT / "tools" / "new" / "templates").iterdir()]
    assert kinds[".j2"] + kinds[".css"] + kinds[".txt"] == len(templates) > 0
    assert Path("trainwright/py.typed") in files
    assert found.metadata.license_files == ["LICENSE"]
    links = re.findall(r"\]\(([^)#]+)\)", found.metadata.long_description)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_changelog_has_this_version():
    assert re.search(rf"^## \[{re.escape(PROJECT['project']['version'])}\] - \d{{4}}-\d{{2}}-\d{{2}}$",
                     (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)  # fmt: skip


def test_imports_go_one_way():
    wrong = {
        (module, name)
        for module in modules()
        for name in imports(module)
        if layer_of(name) not in {layer_of(module), *ALLOWED[layer_of(module)]}
    }
    assert wrong == set()


def test_imports_within_strategies_go_one_way():
    wrong = {
        (module, name)
        for module in modules()
        for folder, allowed in ALLOWED_IN_STRATEGIES.items()
        if module.startswith(f"trainwright.strategies.{folder}.")
        for name in imports(module)
        if layer_of(name) == "strategies" and name.split(".")[2] not in {folder, *allowed}
    }
    assert wrong == set()
    assert {path.name for path in (ROOT / "strategies").iterdir() if path.is_dir()} - {"__pycache__"} == (
        ALLOWED_IN_STRATEGIES.keys()
    )


def test_folders_have_at_most_14_entries():
    folders = {file.parent for file in modules().values()}
    entries = {
        str(folder.relative_to(ROOT)): sum(each.name not in ("__pycache__", "__init__.py") for each in folder.iterdir())
        for folder in folders
        if folder not in (API, ROOT / "conf")  # each group of `conf` is a choice of users
    }
    assert {folder: count for folder, count in entries.items() if count > 14} == {}


def test_recipes_use_the_public_api_only():
    recipes = [module for module in modules() if layer_of(module) == "recipes"]
    of_api = {name for module in recipes for name in imports(module) if layer_of(name) == "api"}
    assert of_api == {"trainwright"}


# ---- No code outside of `strategies` depends on which strategy runs -------------------------------------------------


@cache
def strategy_identifiers() -> tuple[set[str], set[str]]:
    """Return the classes and the names of strategies, but for the four that are named after their axis of layouts."""
    classes = {target_of(options).rpartition(".")[2] for _, options in all_options()}
    return classes, {name for name, _ in all_options()} - {axis.name for axis in fields(Layout)}


def strategy_comparisons(source: ast.Module) -> list[str]:
    """Return the expressions that compare with the name or class of a strategy."""
    classes, names = strategy_identifiers()
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Constant) and str(node.value).rpartition(".")[2] in classes:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = {
                ast.unparse(each).rpartition(".")[2] for each in ast.walk(node.args[1]) if isinstance(each, ast.expr)
            }
            found += [ast.unparse(node)] if asked & classes else []
        elif isinstance(node, ast.Compare | ast.MatchValue):
            constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            found += [ast.unparse(node)] if constants & names else []
    return found


def test_no_code_outside_of_strategies_compares_with_one():
    outside = [module for module in modules() if layer_of(module) not in ("strategies", "api")]
    found = {module: compared for module in outside if (compared := strategy_comparisons(tree(module)))}
    chosen = "'trainwright.strategies.data.single.SingleDeviceStrategy'"
    assert found == {"trainwright.tools.verify.verify": [chosen]}


def test_strategy_comparisons_are_found():
    text = "a == 'ddp'\nb in ('zero1', 'x')\nc == 'pipeline'\nisinstance(s, d.ZeroStrategy)\nt.endswith('DDPStrategy')"
    found = ["a == 'ddp'", "b in ('zero1', 'x')", "isinstance(s, d.ZeroStrategy)", "'DDPStrategy'"]
    assert sorted(strategy_comparisons(ast.parse(text))) == sorted(found)


# Calls that make objects of what pickles name, or that torch makes with pickles.
UNPICKLE = re.compile(
    r"^(load|loads|Unpickler|all_gather_object|broadcast_object_list|gather_object|scatter_object_list|"
    r"send_object_list|recv_object_list|read_pickle)$"
)
UNPICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch", "dist", "ForkingPickler"}
# File -> why what it unpickles is trusted.
MAY_UNPICKLE = {
    "checkpoint/foreign/pickled_file.py": "torch.load of files beside a DCP folder that the user has said to trust",
    "checkpoint/foreign/unpickle.py": "torch.load of a file, with weights_only unless the user has said to trust it",
    "checkpoint/foreign/torch_file.py": "torch.load(weights_only=True) of what was just written",
}


def unpicklers(source: ast.Module) -> list[str]:
    """Return the calls that unpickle."""
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and UNPICKLE.match(node.func.attr):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner in UNPICKLERS or node.func.attr.endswith(("object", "object_list", "Unpickler")):
                found.append(ast.unparse(node.func))
        elif isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
            found += [f"{node.module}.{each.name}" for each in node.names if UNPICKLE.match(each.name)]
    return found


def test_nothing_is_unpickled():
    """Data from a socket, a store or a file must not run code."""
    used = {
        str(file.relative_to(ROOT)): calls for module, file in modules().items() if (calls := unpicklers(tree(module)))
    }
    assert used.keys() == MAY_UNPICKLE.keys(), used


def test_unpicklers_are_found():
    text = "import pickle, torch\npickle.loads(x)\ntorch.load(y)\ndist.all_gather_object(a, b)\njson.loads(z)"
    assert unpicklers(ast.parse(text)) == ["pickle.loads", "torch.load", "dist.all_gather_object"]
    assert unpicklers(ast.parse("from pickle import loads")) == ["pickle.loads"]


def test_no_import_cycles():
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module in done or module not in modules():
            return
        for name in imports(module):
            walk(name, (*path, module))
        done.add(module)

    for module in modules():
        walk(module, ())


def test_files_have_at_most_500_lines():
    long = {
        str(file.resolve().relative_to(ROOT)) for file in modules().values() if len(file.read_text().splitlines()) > 500
    }
    assert long == set()


def test_no_public_class_name_is_defined_twice():
    defined: dict[str, list[str]] = {}
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(module)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


INTERNALS = {"lightning": "trainwright.core.lightning_internals", "torch": "trainwright.core.torch_internals"}


def private_imports(module: str) -> list[tuple[str, str]]:
    """Return module and name of each private name that a module imports from Lightning and torch."""
    imported = [
        (node.module, alias.name)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in INTERNALS
        for alias in node.names
    ]
    return [(source, name) for source, name in imported if re.search(r"(^|\.)_(?!_)", f"{source}.{name}")]


def test_private_names_are_imported_in_one_place():
    used = {module: private_imports(module) for module in modules() if module not in INTERNALS.values()}
    assert {module: names for module, names in used.items() if names} == {}


def test_the_installed_versions_have_all_private_names():
    names = [each for module in INTERNALS.values() for each in private_imports(module)]
    assert len(names) > 10
    assert [f"{source}.{name}" for source, name in names if not has(source, name)] == []


def has(source: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(source), name)
    except ImportError:
        return False


def test_each_form_of_import_is_found():
    source = "import trainwright.core.layout\nfrom trainwright.core import tools\ndef f():\n    import trainwright"
    seen = set().union(*(imported_by(node) for node in ast.walk(ast.parse(source))))
    assert seen == {"trainwright.core.layout", "trainwright.core.tools", "trainwright"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("module", sorted(LIGHT))
def test_light_modules_stay_light(module):
    command = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert not LIGHT[module] & set(loaded)


def test_the_public_api_is_complete():
    import trainwright

    assert {name for name in trainwright.__all__ if not hasattr(trainwright, name)} == set()
    assert set(trainwright.__all__) <= set(dir(trainwright))
    with pytest.raises(AttributeError, match="no attribute 'Trainor'.*Trainer"):
        trainwright.Trainor  # noqa: B018


# ---- Configuration and texts ----------------------------------------------------------------------------------------


def targets(node: object) -> set[str]:
    """Return every literal ``_target_`` in ``node``."""
    if isinstance(node, dict):
        own = {node["_target_"]} if isinstance(node.get("_target_"), str) and "$" not in node["_target_"] else set()
        return own.union(*(targets(value) for value in node.values()))
    return set().union(*(targets(value) for value in node)) if isinstance(node, list) else set()


def test_every_target_of_a_yaml_exists():
    found = {
        target for file in (ROOT / "conf").glob("**/*.yaml") for target in targets(yaml.safe_load(file.read_text()))
    }
    assert len(found) > 20
    assert [target for target in found if pkgutil.resolve_name(target) is None] == []


def pinned() -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {
        canonicalize_name(name): Version(version)
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def test_constraints_are_exact_and_allowed():
    project = PROJECT["project"]
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    requirements = [
        Requirement(text) for text in [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]
    ]
    pins = pinned()
    assert not [str(r) for r in requirements if canonicalize_name(r.name) not in pins]
    assert not [str(r) for r in requirements if pins[canonicalize_name(r.name)] not in r.specifier]


def test_constraints_hold_everything_that_is_installed():
    from importlib.metadata import distributions

    installed = {canonicalize_name(d.metadata["Name"]): Version(d.version) for d in distributions()}
    seen = {"trainwright"}
    queue = ["trainwright"]
    while queue:
        for requirement in dependencies_of(queue.pop()):
            if requirement not in seen and requirement in installed:
                seen.add(requirement)
                queue.append(requirement)
    pins = pinned()
    assert not sorted(name for name in seen - {"trainwright"} if name not in pins)


def dependencies_of(name: str) -> set[str]:
    from importlib.metadata import requires

    extras = ("dev", "docs", "recipes") if name == "trainwright" else ("",)
    requirements = [Requirement(text) for text in requires(name) or ()]
    return {
        canonicalize_name(r.name)
        for r in requirements
        for e in extras
        if r.marker is None or r.marker.evaluate({"extra": e})
    }


def texts() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def found_in_texts(pattern: str) -> list[tuple[Path, str]]:
    return [(file, match) for file in texts() for match in re.findall(pattern, file.read_text(), flags=re.DOTALL)]


def test_links_of_texts_exist():
    links = found_in_texts(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    made = ("api.md", "keys.md")  # with the site
    missing = [(str(file), link) for file, link in links if not (file.parent / link).exists()]
    assert [each for each in missing if Path(each[1]).name not in made] == []


def test_modules_that_texts_run_exist():
    missing = []
    for file, module in found_in_texts(r"python3? -m ((?:benchmarks|tests|trainwright)[\w.|]*)"):
        head, _, last = module.rpartition(".")
        names = [f"{head}.{choice}" for choice in last.split("|")] if head else [module]
        missing += [(str(file), name) for name in names if importlib.util.find_spec(name) is None]
    assert missing == []


def test_names_that_texts_import_exist():
    codes = {code for _, code in found_in_texts(r"```python\n(.*?)```")}
    for line in {line for code in codes for line in re.findall(r"^from trainwright[\w.]* import [\w, ]+$", code, re.M)}:
        exec(line, {})  # as a reader would: a module of a package counts, too


# Phrases and docstring openings that read as translated, and how many of them may be left.
PHRASES = re.compile(r"\b(is told|tells of|go on with|goes on|whoever|somebody|nobody)\b", re.IGNORECASE)
OPENINGS = re.compile(r'^ *"""(What|Who|Whoever|Whether)\b', re.MULTILINE)


def test_docstrings_open_with_a_verb_or_a_noun():
    found = {name: opened for name, file in modules().items() if (opened := OPENINGS.findall(file.read_text()))}
    assert sum(map(len, found.values())) <= 20, found


def test_prose_is_plain():
    files = [*modules().values(), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = {str(file): said for file in files if (said := PHRASES.findall(file.read_text()))}
    assert sum(map(len, found.values())) <= 40, found


def test_the_readme_shows_both_commands_and_few_links():
    text = (ROOT / "README.md").read_text()
    typed = "\n".join(re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.DOTALL))
    assert re.search(r"^make train\b", typed, flags=re.MULTILINE)
    assert re.search(r"^make test\b", typed, flags=re.MULTILINE)
    assert len(re.findall(r"(?<!!)\[[^\]]*\]\(", text)) <= 10


def test_continuous_integration_runs_the_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")
