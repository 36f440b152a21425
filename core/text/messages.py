"""Messages between processes: authenticated before they are parsed, and bounded in length and nesting.

JSON of plain values alone, so nothing that is received runs code.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from functools import cache
from typing import Any

from trainwright.core.text.bounded import ContentError, parse_json

RUN_TOKEN = "TRAINWRIGHT_RUN_TOKEN"  # noqa: S105 - a name
"""Variable with a secret of the run, which its launcher gives to all ranks."""
LONGEST = 1 << 20
"""Bytes of a message."""


def run_token() -> str:
    """Return the secret that the ranks of this run share; empty where nobody has given them one."""
    return os.environ.get(RUN_TOKEN, "")


def token_environment() -> dict[str, str]:
    """Return the variable with the secret for ranks that this process starts: the one that it has, or a new one."""
    return {RUN_TOKEN: run_token() or _new_token()}


@cache
def _new_token() -> str:
    return secrets.token_hex(16)


def proof_of(token: str, text: str) -> int:
    """Return 48 bits that only who knows ``token`` can compute for ``text``, for messages that are numbers."""
    return int.from_bytes(hmac.digest(token.encode(), text.encode(), "sha256")[:6], "big")


def seal(token: str, message: Any) -> bytes:
    """Return a line: HMAC-SHA256 of the message under ``token`` (hexadecimal), a space, the message as JSON.

    Args:
        token: secret that both ends know; it is not sent.
        message: plain values.
    """
    text = json.dumps(message).encode()
    return b"%b %b\n" % (_proof(token, text), text)


def unseal(token: str, line: bytes, longest: int = LONGEST) -> Any:
    """Return the message of a line of :func:`seal`, with or without its line break.

    Args:
        token: that the line must have been sealed with; checked in constant time before anything is parsed.
        line: as it was received.
        longest: bytes that it may have.

    Raises:
        ContentError: if the line was sealed with another token, or is not such a line.
    """
    proof, _, text = line.rstrip(b"\r\n").partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, text)):
        raise ContentError("the message does not have the token of this run")
    return parse_json(text, longest)


def _proof(token: str, text: bytes) -> bytes:
    return hmac.digest(token.encode(), text, "sha256").hex().encode()
