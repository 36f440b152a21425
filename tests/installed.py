"""Metadata of a package as `pip install -e .` writes it, in a folder on the import path."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def install(folder: Path) -> None:
    """Write the metadata of the package in a folder, if it has a pyproject.toml."""
    if not (folder / "pyproject.toml").exists():
        return
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
              for group, names in project["entry-points"].items()]  # fmt: skip
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def forget_strategies() -> None:
    """Remove strategies that a test's package added to Hydra's store."""
    module = sys.modules.get("hydra.core.config_store")
    store = {} if module is None else module.ConfigStore.instance().repo.get("strategy", {})
    for name in [name for name in store if not name.startswith("_")]:
        del store[name], store[f"_{name}"]
