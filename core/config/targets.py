"""Resolution of `_target_` paths by reading source, without importing anything heavy."""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from trainwright.core.config.lightning_alias import lightning_path
from trainwright.core.problems import did_you_mean

_OWN = "trainwright"


def targets_in(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping with a `_target_` of a plain container with its dotted key."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield path, node
        for key, value in node.items():
            yield from targets_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from targets_in(value, f"{path}[{number}]")


def function_at(option: str, path: str, what: str) -> Any:
    """Import the function that an option names.

    Args:
        option: its name.
        path: ``package.module:function``.
        what: description of the expected function, such as "a function of the batch".

    Raises:
        ValueError: if it cannot be imported or called.
    """
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option}={path!r} cannot be found ({error}). Write package.module:function, {what}."
        ) from error
    if not callable(function):
        raise ValueError(f"{option}={path!r} is a {type(function).__name__}; it must be {what}.")
    return function


def lineage(target: str) -> Iterator[str]:
    """Yield the dotted paths of a class and its bases, nearest first, as far as source can be read.

    Args:
        target: dotted path of the class; imports are followed to its definition.
    """
    waiting, seen = [target], {target}
    while waiting:
        path = lightning_path(waiting.pop(0))
        yield path
        found = [base for base in definition(path)[1] if base not in seen]
        seen.update(found)
        waiting += found


def problem_of_target(key: str, target: str) -> str | None:
    """Return why `target` cannot be found; None if it can, or if only importing it could tell.

    Args:
        key: of the target in the configuration.
        target: dotted path of a class or function.
    """
    parts = lightning_path(target).split(".")
    where = f"{key}._target_={target}"
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"{where}: not the path of a class; type package.module.ClassName"
    spec, consumed = _deepest_module(parts)
    if spec is None:
        return (
            f"{where}: there is no module {parts[0]!r}; it must be installed, or lie in the directory where the "
            f"command is started, or on PYTHONPATH{_install(parts[0])}"
        )
    rest = parts[consumed:]
    module = ".".join(parts[:consumed])
    names = _top_level_names(spec)
    if names is None or not rest or rest[0] in names:
        return None
    if parts[0] == _OWN and (places := _places_of(parts[-1])):
        return f"{where}: {parts[-1]} has moved; type {key}._target_={' or '.join(places)}"
    imports = not any(names.values())  # all that it offers
    defined = sorted(f"{module}.{name}" for name, own in names.items() if (own or imports) and name[0] != "_")
    return f"{where}: {module} has no {rest[0]!r}; {did_you_mean(f'{module}.{rest[0]}', defined, 'it defines')}"


def _install(module: str) -> str:
    """Return the command that installs a module of an extra; empty for others."""
    try:
        required = requires(_OWN) or []
    except PackageNotFoundError:  # imported from its source
        return ""
    for text in required:
        found = re.match(r"([\w-]+).*extra == [\"'](?!dev)(\w+)", text)
        if found and found[1].replace("-", "_").lower() == module:
            return f'. Type: pip install "{_OWN}[{found[2]}]"'
    return ""


def _places_of(name: str) -> list[str]:
    """Return the dotted paths of this package's classes and functions of a name, for users of an older path."""
    root = Path(__file__).parents[2]
    pattern = re.compile(rf"^(?:class|def) {name}\b", re.MULTILINE)
    files = (file for folder in sorted(root.iterdir()) for file in sorted(folder.rglob("*.py")))
    found = (file for file in files if pattern.search(file.read_text(encoding="utf8")))
    return [".".join((_OWN, *file.relative_to(root).with_suffix("").parts, name)) for file in found]


def _deepest_module(parts: list[str]) -> tuple[ModuleSpec | None, int]:
    """Return the spec of the longest leading part of a path that is a module, and its number of parts."""
    found: ModuleSpec | None = None
    search: Any = None
    for count in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:count]), search)
        if spec is None:
            return found, count - 1
        found, search = spec, spec.submodule_search_locations
        if search is None:
            return found, count
    return found, len(parts)


def _find_spec(name: str, search: Any) -> ModuleSpec | None:
    """Find a spec like importlib.util.find_spec, but without importing parent packages."""
    if search is None:
        try:
            known = importlib.util.find_spec(name)
        except (ValueError, ImportError):
            return None
        # For a loaded module this is the cached spec, whose file may be gone; new processes search again.
        if known is None or not (known.has_location and known.origin is not None and not Path(known.origin).exists()):
            return known
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None


def definition(path: str) -> tuple[ast.ClassDef | ast.FunctionDef | None, list[str]]:
    """Return the source of a class or function, if it is defined at a dotted path, and where the rest is.

    That is the dotted paths of its bases, or of what its name is imported from; [] if unknown.
    """
    parts = path.split(".")
    spec, consumed = _deepest_module(parts)
    tree = None if spec is None or consumed != len(parts) - 1 else _tree(spec)
    if spec is None or tree is None:
        return None, []
    module, name, imported = ".".join(parts[:-1]), parts[-1], _imported(tree, spec, ".".join(parts[:-1]))
    for node in _top_level_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            written = [base.value if isinstance(base, ast.Subscript) else base for base in getattr(node, "bases", ())]
            heads = [ast.unparse(base).partition(".") for base in written]
            return node, [imported.get(head, f"{module}.{head}") + dot + rest for head, dot, rest in heads]
    return None, [imported[name]] if name in imported else []


def _imported(tree: ast.Module, spec: ModuleSpec, module: str) -> dict[str, str]:
    """Return the dotted paths of names that a module imports."""
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    found: dict[str, str] = {}
    for node in _top_level_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            try:
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue  # beyond the outermost package
            found.update({alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                found[alias.asname or head] = alias.name if alias.asname else head
    return found


def _tree(spec: ModuleSpec) -> ast.Module | None:
    """Return the parsed source of a module; None if it cannot be read."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        state = Path(spec.origin).stat()
        return _parsed(spec.origin, state.st_mtime_ns, state.st_size)
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache(maxsize=64)
def _parsed(origin: str, changed: int, size: int) -> ast.Module:
    # `changed` and `size` invalidate the cache when the file is edited.
    return ast.parse(Path(origin).read_bytes())


def _top_level_names(spec: ModuleSpec) -> dict[str, bool] | None:
    """Return names bound at the top level of a module's source, and whether it defines them rather than imports them;
    None if reading cannot determine them."""
    tree = _tree(spec)
    if tree is None:
        return None
    names: dict[str, bool] = {}
    for node in _top_level_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = True
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0]: False for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node.id != "__all__"
    return None if "*" in names or "__getattr__" in names else names


def _top_level_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes outside the bodies of functions and classes, those of conditional code included."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _top_level_nodes(child)
