"""Hand the configuration from rank 0 to the others, sealed: it says what code runs, so no one else may set it.

Ranks of one machine that share no secret get one from rank 0, in a file that only this user can read.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from typing import Any

from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.bounded import open_regular
from trainwright.core.text.messages import RUN_TOKEN, run_token, seal, token_environment, unseal

_KEY = "trainwright/run"
_READ = f"{_KEY}/read"
_REFUSED = "refused"
_SECRET = re.compile(rb"[0-9a-f]{32}")
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
    if text is None:
        store.set(_KEY, _REFUSED)
        return
    place = "" if run_token() else _written_secret()
    store.set(_KEY, seal(run_token(), text) + place.encode())


def take(store: Any, readers: int) -> str | None:
    """On another rank: the configuration; ``None`` if rank 0 has refused it.

    Args:
        store: of the ranks.
        readers: ranks that take it; the last one clears up.

    Raises:
        ConfigError: if it does not come from rank 0 of this run.
    """
    said = store.get(_KEY)
    shared, is_last = run_token(), store.add(_READ, 1) == readers
    if said == _REFUSED.encode():
        return None
    sealed, _, place = said[: _LONGEST + 4096].partition(b"\n")
    try:
        token = shared or _secret_in(place)
        text = str(unseal(token, sealed, _LONGEST))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"The configuration that was found in the store of the ranks is not the one of this run's rank 0 "
                f"({error}). Start the run again; if ranks do not share a folder for temporary files, or are on "
                f"several machines, export {RUN_TOKEN}=<secret> with the same value for all."
            ]
        ) from None
    os.environ[RUN_TOKEN] = token
    if is_last and not shared:
        with suppress(OSError):
            os.unlink(place)
    return text


def read_by(store: Any) -> int:
    """Ranks that have taken it so far."""
    return int(store.add(_READ, 0))


def _written_secret() -> str:
    """Make the secret of this run, and write it to a file; return its path."""
    os.environ.update(token_environment())
    file, path = tempfile.mkstemp(prefix="trainwright-secret-")
    with os.fdopen(file, "w") as opened:
        opened.write(run_token())
    return path


def _secret_in(path: bytes) -> str:
    """What rank 0 wrote; only this user can have written and read it."""
    with open_regular(path.decode(), os.O_NOFOLLOW) as file:
        state, secret = os.fstat(file.fileno()), file.read(64)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077 or not _SECRET.fullmatch(secret):
        raise OSError(f"{path[:100]!r} holds no secret of this user's alone")
    return secret.decode()
