"""Messages between processes: authenticated before parsing, bounded in length and nesting.

JSON of plain values only, so a received message cannot run code.
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
"""Environment variable with the secret of a run, which its launcher sets for all ranks."""
LONGEST = 1 << 20
"""Largest message, in bytes."""


def run_token() -> str:
    """Return the secret shared by the ranks of this run; empty if none is set."""
    return os.environ.get(RUN_TOKEN, "")


def token_environment() -> dict[str, str]:
    """Return the variable with the secret for child ranks: this process's secret, or a new one."""
    return {RUN_TOKEN: run_token() or _new_token()}


@cache
def _new_token() -> str:
    return secrets.token_hex(16)


def proof_of(token: str, text: str) -> int:
    """Return a 48-bit message authentication code of ``text`` under ``token``, for messages that are numbers."""
    return int.from_bytes(hmac.digest(token.encode(), text.encode(), "sha256")[:6], "big")


def seal(token: str, message: Any) -> bytes:
    """Return a line of HMAC-SHA256 under ``token`` (hexadecimal), a space and the message as JSON.

    Args:
        token: secret shared by both ends; not sent.
        message: plain values.
    """
    text = json.dumps(message).encode()
    return b"%b %b\n" % (_proof(token, text), text)


def unseal(token: str, line: bytes, longest: int = LONGEST) -> Any:
    """Return the message of a line of :func:`seal`, with or without its line break.

    Args:
        token: of the sender; compared in constant time before anything is parsed.
        line: as received.
        longest: largest message, in bytes.

    Raises:
        ContentError: if the line was sealed with another token, or is malformed.
    """
    proof, _, text = line.rstrip(b"\r\n").partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, text)):
        raise ContentError("the message does not have the token of this run")
    return parse_json(text, longest)


def _proof(token: str, text: bytes) -> bytes:
    return hmac.digest(token.encode(), text, "sha256").hex().encode()
