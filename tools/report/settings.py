"""How a run was asked for: its command, its configuration, and the versions of libraries."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from trainwright.core.text.printable import shortened
from trainwright.tools.report.plain import text_of
from trainwright.tools.report.records import RunRecord


def settings(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Key, value and whether it, or what it lies in, was typed."""
    typed = _typed_keys(run)
    for key, value in run.settings.items():
        parents = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        yield key, value, any(parent in typed for parent in parents)


def command_line(run: RunRecord) -> str | None:
    """What to type to have the run again; None if the command was not kept."""
    return None if run.command is None else " ".join(["trainwright", *map(shlex.quote, run.command)])


def versions(run: RunRecord) -> str:
    """Of the libraries, as the newest checkpoint tells them; "" if there is none."""
    for saved in reversed(run.checkpoints):
        known = saved.about.get("versions")
        if isinstance(known, Mapping) and known:
            return shortened(", ".join(f"{name} {text_of(version)}" for name, version in sorted(known.items())))
    return ""


def _typed_keys(run: RunRecord) -> set[str]:
    """Keys and groups that were typed, without plus signs and tildes."""
    words = (word for word in run.command or () if "=" in word and not word.startswith("-"))
    return {word.split("=", 1)[0].lstrip("+~") for word in words}
