"""The packages ``pytorch_lightning`` and ``lightning_fabric`` as other names of Lightning's own modules.

They have the same classes under other names: a module of ``pytorch_lightning`` is none of ``lightning.pytorch``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_LINE = "import trainwright.pytorch_lightning_alias"
_KINDS = (type, ModuleType)


class _Alias(MetaPathFinder, Loader):
    """Imports the modules of the other packages as Lightning's own, which stay unchanged."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_other = name.partition(".")[0] in _NAMES and _other_version() is None
        found = find_spec(lightning_path(name)) if is_other else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return spec_from_loader(name, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(lightning_path(module.__name__))


def lightning_path(path: str) -> str:
    """Return a dotted path of the other packages as Lightning's; other paths are returned as they are."""
    head, dot, rest = path.partition(".")
    return _NAMES.get(head, head) + dot + rest


def use_alias() -> None:
    """Import ``pytorch_lightning`` and ``lightning_fabric`` as Lightning's modules from now on; idempotent.

    Raises:
        ImportError: if they are imported already, or installed in another version.
    """
    if problem := _problem():
        raise ImportError(f"pytorch_lightning cannot be another name of lightning.pytorch: {problem}.")
    _install()


def instantiate(node: Any, **more: Any) -> Any:
    """Build an object of the configuration; targets that import ``pytorch_lightning`` get Lightning's, if possible."""
    import hydra.utils

    if _imported() is None:
        _install()
    return hydra.utils.instantiate(node, _convert_="all", **more)


def refuse_other_package(given: Iterable[Any]) -> None:
    """Raise if a value, or an element of one, is of another package.

    Raises:
        TypeError: with what to type.
    """
    for each in (each for value in given for each in _elements(value)):
        names = (base.__module__.partition(".")[0] for base in type(each).__mro__)
        if name := next((name for name in names if name in _NAMES), None):
            raise TypeError(
                f"{type(each).__name__} is of the package {name}, whose classes are not those of {_NAMES[name]}. "
                f"In your code, type {_NAMES[name]} for {name}; the names in it are the same. "
                f"For a library, make both one: {_problem() or f'type `{_LINE}` before its import'}."
            )


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, Mapping) else [value]


def _install() -> None:
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())


def _problem() -> str | None:
    """Return why the alias is impossible in this process, and what to type; None if it is possible."""
    if (other := _other_version()) is not None:
        return other
    name = _imported()
    return None if name is None else f"{name} has been imported{_importer(name)}; type `{_LINE}` before that"


@cache  # reading metadata takes 5 ms per package
def _other_version() -> str | None:
    ours = version("lightning")
    for name in _NAMES:
        with suppress(PackageNotFoundError):
            if (other := version(name)) != ours:
                return f"{name} {other} is installed beside lightning {ours}; type `pip install {name}=={ours}`"
    return None


def _imported() -> str | None:
    """Return which of the other packages has been imported as itself, if any."""
    module_of = sys.modules.get
    return next((name for name, real in _NAMES.items() if module_of(name) not in (None, module_of(real))), None)


def _importer(package: str) -> str:
    """Return the first imported module that holds a package or one of its classes, if there is one."""
    for name, module in list(sys.modules.items()):
        held = [value for value in list(getattr(module, "__dict__", {}).values()) if issubclass(type(value), _KINDS)]
        owners = (str(getattr(value, "__module__", value.__name__)).partition(".")[0] for value in held)
        if name.partition(".")[0] not in _NAMES and package in owners:
            return f" by {name}"
    return ""
