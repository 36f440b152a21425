"""Have ``pytorch_lightning`` be ``lightning.pytorch``, and ``lightning_fabric`` be ``lightning.fabric``.

Import this before a library that subclasses the classes of ``pytorch_lightning``. In the process of the reference,
which trains with the Trainer of that package, it does nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tests.libraries.environments import REFERENCE

_PACKAGES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _Alias(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, _, rest = spec.name.partition(".")
        module = importlib.import_module(".".join(filter(None, (_PACKAGES[package], rest))))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run under its own name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if REFERENCE not in os.environ:
    sys.meta_path.insert(0, _Alias())
