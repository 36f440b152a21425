"""Report on the keys of a DeepSpeed JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.tools.deepspeed.table import APPROXIMATED, MAPPED, STATUSES, UNSUPPORTED

_WIDTH = 110
_TITLES = {
    MAPPED: "mapped",
    APPROXIMATED: "approximated: how it differs",
    UNSUPPORTED: "unsupported: why, and what to do instead",
}


@dataclass(frozen=True)
class Line:
    """Report on one key.

    Attributes:
        key: dotted path in the file.
        value: in the file; None if missing.
        status: mapped, approximated or unsupported.
        becomes: overrides it is translated to; may be empty.
        note: how it differs, or why it is not supported, with a remedy.
        overridden_by: overrides on the command line, which win.
        stops_a_run: whether runs from the file are refused for it.
    """

    key: str
    value: Any
    status: str
    becomes: tuple[str, ...] = ()
    note: str = ""
    overridden_by: tuple[str, ...] = ()
    stops_a_run: bool = False


@dataclass(frozen=True)
class Report:
    """Report on a file.

    Attributes:
        file: path of the file.
        lines: keys of the file with an effect or that stop a run, in its order.
        absent: missing keys whose default differs from DeepSpeed's or that lead to overrides.
        no_effect: all other keys of the file.
        overrides: the native configuration.
    """

    file: str
    lines: tuple[Line, ...] = ()
    absent: tuple[Line, ...] = ()
    no_effect: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def stopping(self) -> list[Line]:
        """Keys for which runs from the file are refused."""
        return [line for line in self.lines if line.stops_a_run and not line.overridden_by]

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys by status."""
        counts = {status: len(self.with_status(status)) for status in STATUSES}
        return {**counts, "without effect": len(self.no_effect)}

    def with_status(self, status: str) -> list[Line]:
        """Return the lines of a status, in the order of the file."""
        return [line for line in self.lines if line.status == status]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "file": self.file,
            "counts": self.counts,
            "keys": [asdict(line) for line in self.lines],
            "absent": [{"key": a.key, "becomes": list(a.becomes), "note": a.note} for a in self.absent],
            "no_effect": list(self.no_effect),
            "overrides": list(self.overrides),
        }

    def to_text(self) -> str:
        """Return text for a terminal."""
        return self._text(STATUSES)

    def summary(self) -> str:
        """Return counts and differences, without mapped keys."""
        return self._text((APPROXIMATED, UNSUPPORTED))

    def _text(self, statuses: tuple[str, ...]) -> str:
        total = len(self.lines) + len(self.no_effect)
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        parts = [[f"{self.file}: {total} key{'' if total == 1 else 's'}: {counts}"]]
        sections = [(_TITLES[status], self.with_status(status)) for status in statuses]
        for title, lines in [*sections, ("not in the file", self.absent)]:
            if lines:
                parts.append([title, *(text for line in lines for text in _shown(line))])
        if self.no_effect:
            these = f"no effect here (off, the default, or not supported): {', '.join(self.no_effect)}"
            parts.append(textwrap.wrap(these, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
        return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _shown(line: Line) -> Iterator[str]:
    """Yield the lines of a key and its translation."""
    head = f"  {line.key}"
    if line.value is not None:
        head += f" = {textwrap.shorten(json.dumps(line.value), 60, placeholder=' ...')}"
    if line.overridden_by:
        yield f"{head}  ->  on the command line: {' '.join(line.overridden_by)}"
        return
    native = [text.lstrip("+") for text in line.becomes]
    together = "  ->  ".join([head, *([" ".join(native)] if native else [])])
    yield from [together] if len(together) <= _WIDTH else [head, *(f"      ->  {text}" for text in native)]
    yield from textwrap.wrap(
        line.note, _WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False
    )
