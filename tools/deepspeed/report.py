"""What became of each key of a DeepSpeed JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainwright.tools.deepspeed.key import STATUSES

_WIDTH = 110
_TITLES = {
    "mapped": "mapped",
    "approximated": "approximated: how it differs",
    "unsupported": "unsupported: why, and what to do instead",
}


@dataclass(frozen=True)
class Line:
    """What became of one key.

    Attributes:
        key: dotted path in the file.
        value: as the file has it; "(not shown)" for a secret.
        status: mapped, approximated or unsupported.
        becomes: the overrides that stand for it; empty if none are needed.
        note: how it differs, or why it is not to be had and what to do instead.
        typed: what the command line says in its place; it wins.
        stops: it changes what is trained and cannot be had, so that a run from the file is refused.
    """

    key: str
    value: Any
    status: str
    becomes: tuple[str, ...] = ()
    note: str = ""
    typed: tuple[str, ...] = ()
    stops: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "key": self.key,
            "value": self.value,
            "status": self.status,
            "becomes": list(self.becomes),
            "note": self.note,
            "overridden_by": list(self.typed),
            "stops_a_run": self.stops,
        }


@dataclass(frozen=True)
class Absent:
    """A key that the file does not have, where that needs a word.

    Attributes:
        key: dotted path.
        becomes: overrides that follow all the same.
        note: what holds instead.
    """

    key: str
    becomes: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        file: the file that was read.
        lines: one for each key of the file, in its order.
        absent: what is to be said of keys that it does not have.
        overrides: the native configuration, as it would be typed.
    """

    file: str
    lines: tuple[Line, ...] = ()
    absent: tuple[Absent, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def stopping(self) -> list[Line]:
        """Keys for which a run from the file is refused."""
        return [line for line in self.lines if line.stops and not line.typed]

    def with_status(self, status: str) -> list[Line]:
        """Lines of a status, in the order of the file."""
        return [line for line in self.lines if line.status == status]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "file": self.file,
            "counts": {status: len(self.with_status(status)) for status in STATUSES},
            "keys": [line.to_dict() for line in self.lines],
            "absent": [{"key": a.key, "becomes": list(a.becomes), "note": a.note} for a in self.absent],
            "overrides": list(self.overrides),
        }

    def to_text(self) -> str:
        """For a terminal."""
        counts = ", ".join(f"{len(self.with_status(status))} {status}" for status in STATUSES)
        total = len(self.lines)
        parts = [f"{self.file}: {total} key{'' if total == 1 else 's'}: {counts}"]
        for status in STATUSES:
            lines = self.with_status(status)
            if lines:
                parts.append("\n".join([_TITLES[status], *_block(lines)]))
        if self.absent:
            parts.append("\n".join(["not in the file", *(text for absent in self.absent for text in _absent(absent))]))
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """Counts and what differs, without what is mapped."""
        short = Report(self.file, tuple(line for line in self.lines if line.status != STATUSES[0]), self.absent)
        return short.to_text()


def _block(lines: list[Line]) -> Iterator[str]:
    """Lines of which the same is to be said stand together, above it."""
    rest = list(lines)
    while rest:
        first = rest.pop(0)
        alike = [first]
        if first.note and not first.becomes and not first.typed:
            alike += [line for line in rest if (line.note, line.becomes, line.typed) == (first.note, (), ())]
            rest = [line for line in rest if line not in alike]
        for line in alike:
            yield from _line(line)
        yield from _wrapped(first.note if not first.typed else "")


def _line(line: Line) -> Iterator[str]:
    shown = json.dumps(line.value)
    head = f"  {line.key} = {textwrap.shorten(shown, 60, placeholder=' ...')}"
    if line.typed:
        yield f"{head}  ->  on the command line: {' '.join(line.typed)}"
        return
    yield from _with_native(head, line.becomes)


def _absent(absent: Absent) -> Iterator[str]:
    yield from _with_native(f"  {absent.key}", absent.becomes)
    yield from _wrapped(absent.note)


def _with_native(head: str, becomes: tuple[str, ...]) -> Iterator[str]:
    """A key and what it becomes, on as many lines as that takes."""
    native = [text.lstrip("+") for text in becomes]
    if not native:
        yield head
    elif len(together := f"{head}  ->  {' '.join(native)}") <= _WIDTH:
        yield together
    else:
        yield head
        yield from (f"      ->  {text}" for text in native)


def _wrapped(note: str) -> list[str]:
    return textwrap.wrap(note, _WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
