"""Removal of modules that a test imported from its own folder, since another test may reuse their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def forget_modules_of(folder: str | Path, before: Mapping[str, ModuleType] | None = None) -> None:
    """Remove every module and package that was imported from a folder from `sys.modules`.

    Args:
        folder: the folder.
        before: an earlier copy of `sys.modules`, whose modules are skipped; ``None`` skips none.
    """
    known, folder = before or {}, os.path.normpath(folder)
    # One expression, since this runs over 18,000 modules after every test.
    new = [(name, module) for name, module in list(sys.modules.items()) if known.get(name) is not module]
    for name, module in new:
        spec = getattr(module, "__spec__", None)
        # A package without __init__.py has no file, only folders.
        folders = getattr(spec, "submodule_search_locations", None) or ()
        places = [os.path.normpath(place) for place in (getattr(module, "__file__", None), *folders) if place]
        if any(place == folder or place.startswith(folder + os.sep) for place in places):
            del sys.modules[name]
