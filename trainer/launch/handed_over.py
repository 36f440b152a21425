"""The configuration on its way from rank 0 to the others: what it names is run, so nobody may put another there."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.checkpoint.messages import RUN_TOKEN, MessageError, run_token, seal, unseal
from trainwright.trainer.launch.launcher import Launcher
from trainwright.trainer.problems import ConfigError

_KEY = "trainwright/run"
_READ = f"{_KEY}/read"
_REFUSED = "refused"
_PREFIX = "trainwright-configuration-"
_LONGEST = 2**24
"""Bytes of a configuration."""


def problem_of(launcher: Launcher) -> str | None:
    """Why a configuration cannot be handed over safely; ``None`` if it can."""
    if run_token() or launcher.world_size == launcher.local_world_size:
        return None
    here, everywhere = launcher.local_world_size, launcher.world_size
    return (
        f"{launcher.name} has started {everywhere} ranks, {here} of them on this machine, and they share no secret: "
        f"the configuration, which says what code runs, travels to the other machines through a store that everyone "
        f"who reaches it can write. Give all machines the same: export {RUN_TOKEN}=<secret>, made once with "
        f"`openssl rand -hex 32`."
    )


def give(store: Any, text: str | None) -> None:
    """On rank 0: hand a configuration to the other ranks, or (``None``) the word that there is none."""
    token = run_token()
    if text is None:
        store.set(_KEY, _REFUSED)
    elif token:
        store.set(_KEY, seal(token, text))
    else:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        store.set(_KEY, str(folder))


def take(store: Any, readers: int) -> str | None:
    """On another rank: the configuration; ``None`` if rank 0 has refused it.

    Args:
        store: of the ranks.
        readers: ranks that take it; the last one clears up.

    Raises:
        ConfigError: if it does not come from rank 0 of this run.
    """
    said = store.get(_KEY)
    token, last = run_token(), store.add(_READ, 1) == readers
    if said == _REFUSED.encode():
        return None
    try:
        if token:
            return str(unseal(token, said, _LONGEST))
        return _text_in(Path(said[:4096].decode()), last)
    except (MessageError, OSError, ValueError) as error:
        raise ConfigError(
            [
                f"The configuration that was found in the store of the ranks is not the one of this run's rank 0 "
                f"({error}). Start the run again; if ranks do not share a folder for temporary files, or are on "
                f"several machines, export {RUN_TOKEN}=<secret> with the same value for all."
            ]
        ) from None


def read_by(store: Any) -> int:
    """Ranks that have taken it so far."""
    return int(store.add(_READ, 0))


def _text_in(folder: Path, remove: bool) -> str:
    """What rank 0 wrote, from a folder that belongs to this user alone."""
    if not folder.name.startswith(_PREFIX):
        raise OSError(f"{str(folder)[:100]!r} is no such folder")
    file = os.open(folder / "config.yaml", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        for state, is_kind in ((os.lstat(folder), stat.S_ISDIR), (os.fstat(opened.fileno()), stat.S_ISREG)):
            if not is_kind(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
                raise OSError(f"{folder} is not this user's alone")
        text = opened.read(_LONGEST).decode()
    if remove:
        with suppress(OSError):
            shutil.rmtree(folder)
    return text
