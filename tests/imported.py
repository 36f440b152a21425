"""Modules that a test had imported from a folder of its own: the next test has others of the same names."""

from __future__ import annotations

import sys
from pathlib import Path


def forget_modules_of(folder: str | Path) -> None:
    """Forget every module and package that was imported from within a folder."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        # A package without __init__.py has no file, only folders.
        folders = getattr(spec, "submodule_search_locations", None) or ()
        places = [Path(str(place)) for place in (getattr(module, "__file__", None), *folders) if place is not None]
        if any(Path(folder) in (place, *place.parents) for place in places):
            del sys.modules[name]
