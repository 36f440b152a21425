"""What `pip install -e .` leaves of a package, without pip: its metadata in a folder that is on the path."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def install(folder: Path) -> None:
    """Write the metadata of the package whose pyproject.toml stands in a folder; nothing where there is none."""
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
    """Forget choices of strategies that a test's package has added to Hydra's store, where they would stay."""
    module = sys.modules.get("hydra.core.config_store")
    store = {} if module is None else module.ConfigStore.instance().repo.get("strategy", {})
    for name in [name for name in store if not name.startswith("_")]:
        del store[name], store[f"_{name}"]
