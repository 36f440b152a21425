"""Sanitizing of untrusted text for terminals and HTML pages."""

from __future__ import annotations

import re

_MOST = 500
# Whole escape sequences first, so that their text goes with them; then single invisible characters.
_SEQUENCES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)"  # OSC, DCS, ...: titles, links
    "|\x1b[ -/]*[0-~]"
)
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return ``text`` without escape sequences and invisible or reordering characters; line breaks and tabs stay."""
    return _UNSEEN.sub("", _SEQUENCES.sub("", text))


def one_line(text: str) -> str:
    """Return the printable text on one line."""
    return " ".join(printable(text).split())


def shortened(text: str) -> str:
    """Return at most 500 characters of ``text``, followed by its length if it was cut."""
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text)} characters)"
