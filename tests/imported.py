"""Modules that a test had imported from a folder of its own: the next test has others of the same names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def forget_modules_of(folder: str | Path, before: Mapping[str, ModuleType] | None = None) -> None:
    """Forget every module and package that was imported from within a folder.

    Args:
        folder: the folder.
        before: a copy of `sys.modules` from before anything could be imported from it, so that of thousands of modules
            only the new ones are looked at; None looks at all.
    """
    known, folder = before or {}, os.path.normpath(folder)
    # One expression: the whole suite holds eighteen thousand modules, and this runs after every test.
    new = [(name, module) for name, module in list(sys.modules.items()) if known.get(name) is not module]
    for name, module in new:
        spec = getattr(module, "__spec__", None)
        # A package without __init__.py has no file, only folders.
        folders = getattr(spec, "submodule_search_locations", None) or ()
        places = [os.path.normpath(place) for place in (getattr(module, "__file__", None), *folders) if place]
        if any(place == folder or place.startswith(folder + os.sep) for place in places):
            del sys.modules[name]
