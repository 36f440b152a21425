"""Throw-away environments of peers that this project does not install: one folder each, deleted at will.

An environment takes torch and whatever else is there from the interpreter that makes it, and adds the peer alone, in
the exact versions of ``constraints/<peer>.txt``. So all peers compute with the same torch, and none is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import say

_CONSTRAINTS = Path(__file__).parent / "constraints"
_ERROR = "error.txt"
_DONE = "installed.txt"
_PATIENCE = 900


@dataclass(frozen=True)
class Environment:
    """Where a peer runs.

    Args:
        name: of the peer's package; its version stands in ``constraints/<name>.txt``.
        variables: environment variables, for installing and for running.
        build: packages that building the peer needs, installed before it.
        options: of ``pip install``.
        prepare: Python that runs once after it, such as building what would else be built by the first run.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    build: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    prepare: str | None = None

    def folder(self, cache: Path) -> Path:
        """Of this environment."""
        return cache / self.name

    def python(self, cache: Path) -> Path:
        """Its interpreter.

        Raises:
            RuntimeError: if the peer is not installed there; with pip's own words if it could not be.
        """
        folder = self.folder(cache)
        if (folder / _DONE).exists():
            return folder / "bin" / "python"
        if (folder / _ERROR).exists():
            raise RuntimeError(f"could not be installed: {(folder / _ERROR).read_text().strip()}")
        raise RuntimeError(f"not installed; type python -m benchmarks.peers.install --cache {cache}")

    def environment(self, cache: Path) -> dict[str, str]:
        """Its environment variables; what torch compiles for it stays in its folder and on its path."""
        folder = self.folder(cache)
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
        return {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PATH": path, **self.variables}

    def version(self) -> str:
        """The version that is installed, as its constraints say."""
        wanted = f"{self.name}=="
        lines = (_CONSTRAINTS / f"{self.name}.txt").read_text().splitlines()
        return next(line.removeprefix(wanted).strip() for line in lines if line.startswith(wanted))

    def install(self, cache: Path) -> bool:
        """Make it afresh; returns whether the peer is there. What pip said is kept in ``install.log``."""
        folder = self.folder(cache)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _share_packages(folder)
        commands = self._commands(str(folder / "bin" / "python"))
        with (folder / "install.log").open("w+") as log:
            for each in commands:
                environment = {**os.environ, **self.environment(cache)}
                done = subprocess.run(
                    each, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_PATIENCE, check=False
                )
                if done.returncode != 0:
                    log.seek(0)
                    said = log.read().splitlines()
                    errors = [line for line in said if line.startswith("ERROR")]
                    (folder / _ERROR).write_text("".join(errors[-1:] or said[-1:]))
                    return False
        (folder / _DONE).write_text(self.version())
        return True

    def _commands(self, python: str) -> list[list[str]]:
        pip = [
            *(python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"),
            *("--constraint", str(_CONSTRAINTS / f"{self.name}.txt")),
        ]
        # torch is also a request, so that pip rather gives up than takes another one.
        commands = [[*pip, *self.options, f"torch=={version('torch').partition('+')[0]}", self.name]]
        if self.build:
            commands.insert(0, [*pip, *self.build])
        if self.prepare:
            commands.append([python, "-c", self.prepare])
        return commands


def _share_packages(folder: Path) -> None:
    """Let the environment see what the running interpreter sees, behind its own; editable installs included."""
    there = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(here)]
    Path(there, "zz_shared.pth").write_text("\n".join(lines) + "\n")


def default_cache() -> Path:
    """``~/.cache/trainwright/peers``."""
    return Path.home() / ".cache" / "trainwright" / "peers"


# On the CPU DeepSpeed compiles its shared-memory collectives when a process group is first made.
_BUILD_COLLECTIVES = """
from deepspeed.accelerator import get_accelerator
if get_accelerator().device_name() == "cpu":
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
    ShareMemCommBuilder().load()
"""

ENVIRONMENTS = {
    "accelerate": Environment("accelerate"),
    # Its build asks for torch, so it is built in this environment; a new one's setuptools may make no wheels.
    "deepspeed": Environment(
        "deepspeed", {"DS_BUILD_OPS": "0"}, ("setuptools",), ("--no-build-isolation",), _BUILD_COLLECTIVES
    ),
    "torchtitan": Environment("torchtitan"),
}


def install(names: list[str], cache: Path) -> bool:
    """Install these; returns whether all are there."""
    results = {}
    for name in names:
        say(f"{name} {ENVIRONMENTS[name].version()} into {ENVIRONMENTS[name].folder(cache)}, with {sys.executable}")
        results[name] = ENVIRONMENTS[name].install(cache)
        if not results[name]:
            say(f"  {(ENVIRONMENTS[name].folder(cache) / _ERROR).read_text().strip()}")
    return all(results.values())
