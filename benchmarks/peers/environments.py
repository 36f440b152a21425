"""Throw-away environments of peers that this project does not install: one folder each, deleted at will.

An environment takes torch and whatever else is there from the interpreter that makes it, and adds the peer alone, in
the exact versions of ``constraints/<peer>.txt``. So all peers compute with the same torch, and none is downloaded.
The environments of :mod:`tests.libraries` are made in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
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
        requests: packages installed with it.
        alone: packages installed without their dependencies, whose pins exclude the shared versions. If the peer itself
            is among them, it is not installed otherwise.
        constraints: folder of the file of exact versions.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    build: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    prepare: str | None = None
    requests: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    constraints: Path = _CONSTRAINTS

    def folder(self, cache: Path) -> Path:
        """Of this environment."""
        return cache / self.name

    def python(self, cache: Path) -> Path:
        """Its interpreter.

        Raises:
            RuntimeError: if the peer is not installed there; with pip's own words if it could not be.
        """
        if self.is_installed(cache):
            return self.folder(cache) / "bin" / "python"
        if error := self.error(cache):
            raise RuntimeError(f"could not be installed: {error}")
        raise RuntimeError(f"not installed; type python -m benchmarks.peers.install --cache {cache}")

    def is_installed(self, cache: Path) -> bool:
        """Whether the peer is there."""
        return (self.folder(cache) / _DONE).exists()

    def error(self, cache: Path) -> str:
        """Why it could not be installed, in pip's words; empty if it was not tried."""
        file = self.folder(cache) / _ERROR
        return file.read_text().strip() if file.exists() else ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Its environment variables; what torch compiles for it stays in its folder and on its path."""
        folder = self.folder(cache)
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
        return {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PATH": path, **self.variables}

    @property
    def pins(self) -> Path:
        """The file of exact versions."""
        return self.constraints / f"{self.name}.txt"

    def added(self, cache: Path) -> list[str]:
        """What it adds to the shared packages, as ``name==version``, sorted."""
        found = distributions(path=[_packages(self.folder(cache))])
        named = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in found}
        return [f"{name}=={named[name]}" for name in sorted(named) if name != "pip"]

    def version(self) -> str:
        """The version that is installed, as its constraints say."""
        wanted = f"{self.name}=="
        lines = self.pins.read_text().splitlines()
        return next(line.removeprefix(wanted).strip() for line in lines if line.startswith(wanted))

    def install(self, cache: Path) -> bool:
        """Make it afresh; returns whether the peer is there. What pip said is kept in ``install.log``."""
        folder = self.folder(cache)
        shutil.rmtree(folder, ignore_errors=True)
        # pip is among the shared packages.
        venv.create(folder)
        _share_packages(folder)
        commands = self._commands(str(folder / "bin" / "python"))
        for each in commands:
            if error := self._failed(each, cache):
                (folder / _ERROR).write_text(error)
                return False
        (folder / _DONE).write_text("\n".join(self.added(cache)))
        return True

    def _failed(self, command: list[str], cache: Path) -> str:
        """Run a command; returns its last error, empty if it succeeded."""
        with (self.folder(cache) / "install.log").open("a+") as log:
            start = log.tell()
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **self.environment(cache)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=_PATIENCE,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"took more than {_PATIENCE} s"
            if done.returncode == 0:
                return ""
            log.seek(start)
            said = log.read().splitlines()
            errors = [line for line in said if line.startswith("ERROR")]
            return "".join(errors[-1:] or said[-1:]) or f"exit code {done.returncode}"

    def _commands(self, python: str) -> list[list[str]]:
        pip = [
            *(python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"),
            *("--constraint", str(self.pins)),
        ]
        named = [*self.requests, *([] if any(map(self._is_peer, self.alone)) else [self.name])]
        # torch is also a request, so that pip rather gives up than takes another one.
        commands = [[*pip, *self.options, f"torch=={version('torch').partition('+')[0]}", *named]]
        if self.build:
            commands.insert(0, [*pip, *self.build])
        if self.alone:
            commands.append([*pip, *self.options, "--no-deps", *self.alone])
        if self.prepare:
            commands.append([python, "-c", self.prepare])
        return commands

    def _is_peer(self, request: str) -> bool:
        return request.partition("[")[0] == self.name


def _packages(folder: Path) -> str:
    return sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})


def _share_packages(folder: Path) -> None:
    """Let the environment see what the running interpreter sees, behind its own; editable installs included."""
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(here)]
    Path(_packages(folder), "zz_shared.pth").write_text("\n".join(lines) + "\n")


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


def install(environments: Iterable[Environment], cache: Path) -> bool:
    """Install these; returns whether all are there."""
    complete = True
    for each in environments:
        say(f"{each.name} {each.version()} into {each.folder(cache)}, with {sys.executable}")
        if not each.install(cache):
            complete = False
            say(f"  {each.error(cache)}")
    return complete
