"""Commands of a shell block, split by the shell itself; none of them exists, so none runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.docs.blocks import Block

# bash calls this for what it does not find; nothing is found, since PATH is empty. What is typed with a folder in front
# (.venv/bin/python) is a script that does the same.
_RECORD = 'printf "%s\\0" $# "$@" >> "$RECORD"'
# A process of a block has ended before the block can end it.
_PREAMBLE = f"command_not_found_handle() {{ {_RECORD}; }}\nkill() {{ :; }}\n"
_IN_ENVIRONMENT = ("python", "python3", "pip", "pytest", "ruff", "trainwright", "torchrun", "mkdocs", "tensorboard")


def commands_of(block: Block, folder: Path) -> list[list[str]]:
    """The words of each command of a block.

    Args:
        block: in the language of a shell; of `console`, lines that begin with `$ ` are commands and the rest is output.
        folder: where the shell works.

    Raises:
        AssertionError: if the shell complains.
    """
    _make_environment(folder)
    record = folder / ".commands"
    record.write_bytes(b"")
    bash = shutil.which("bash")
    assert bash is not None, "the blocks of the documentation are read by bash, which is not there"
    ended = subprocess.run(
        [bash, "--norc", "-c", f"{_PREAMBLE}{_typed(block)}\nwait\n"],
        cwd=folder,
        env={"PATH": "/nowhere", "RECORD": str(record), "HOME": str(folder), "SLURM_JOB_ID": "4711"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert not ended.stderr, f"{block.place}: {ended.stderr.strip()}"
    return _words(record.read_bytes())


def _typed(block: Block) -> str:
    if block.language != "console":
        return block.text
    typed: list[str] = []
    for line in block.text.splitlines():
        goes_on = bool(typed) and typed[-1].endswith("\\") and line.startswith("> ")
        if line.startswith("$ ") or goes_on:
            typed.append(line[2:])
    return "\n".join(typed)


def _words(recorded: bytes) -> list[list[str]]:
    rest = recorded.decode().split("\0")[:-1]
    commands: list[list[str]] = []
    while rest:
        count = int(rest.pop(0))
        commands.append(rest[:count])
        del rest[:count]
    return commands


def _make_environment(folder: Path) -> None:
    """A .venv whose programs are recorded, too."""
    programs = folder / ".venv" / "bin"
    if programs.exists():
        return
    programs.mkdir(parents=True)
    (programs / "activate").write_text("")
    for name in _IN_ENVIRONMENT:
        script = programs / name
        script.write_text(f'#!/bin/bash\nset -- {name} "$@"\n{_RECORD}\n')
        os.chmod(script, 0o755)


def sbatch_options(block: Block) -> str:
    """Return the SLURM options of a batch script on one line; empty for other blocks."""
    return " ".join(re.findall(r"^#SBATCH (.*)$", block.text, flags=re.MULTILINE))
