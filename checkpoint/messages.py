"""Messages between processes: authenticated before they are parsed, and bounded in length and nesting.

JSON of plain values alone, so nothing that is received runs code. Python's own parser recurses with the nesting of its
input; the depth is therefore counted before it is called.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from functools import cache
from typing import Any

RUN_TOKEN = "TRAINWRIGHT_RUN_TOKEN"  # noqa: S105 - a name
"""Variable with a secret of the run, which its launcher gives to all ranks."""
LONGEST = 1 << 20
"""Bytes of a message."""
DEEPEST = 32
"""Brackets of a message within each other."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class MessageError(ValueError):
    """A message that is too long or too deep, lacks the right token, or says nothing that the receiver knows."""


def run_token() -> str:
    """Return the secret that the ranks of this run share; empty where nobody has given them one."""
    return os.environ.get(RUN_TOKEN, "")


@cache
def token_of_run() -> str:
    """Return the secret for the ranks that this process starts: the one that it was given, or a new one."""
    return run_token() or secrets.token_hex(16)


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
        MessageError: if the line was sealed with another token, or is not such a line.
    """
    _check_length(line, longest)
    proof, _, text = line.rstrip(b"\r\n").partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, text)):
        raise MessageError("the message does not have the token of this run")
    return parse(text, longest)


def parse(text: bytes, longest: int = LONGEST, deepest: int = DEEPEST) -> Any:
    """Return the plain values of JSON that a stranger may have written.

    Args:
        text: UTF-8.
        longest: bytes that it may have.
        deepest: brackets that may be open at a time.

    Raises:
        MessageError: if it is longer or deeper, or no JSON.
    """
    _check_length(text, longest)
    depth = 0
    for bracket in _BRACKET.findall(_TEXT.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        if depth > deepest:
            raise MessageError(f"the message has more than {deepest} brackets within each other")
    try:
        return json.loads(text)
    except ValueError as error:
        raise MessageError(f"the message is no JSON: {error}") from None


def _proof(token: str, text: bytes) -> bytes:
    return hmac.digest(token.encode(), text, "sha256").hex().encode()


def _check_length(text: bytes, longest: int) -> None:
    if len(text) > longest:
        raise MessageError(f"the message has {len(text)} bytes, which is more than {longest}")
