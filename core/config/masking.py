"""Masking of secrets in configurations that are shown: values under secret keys become stars.

Files that ranks read keep their secrets; pages, tables, logs and terminals get the output of these functions.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

MASK = "***"
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(
    r"(api|auth)tokens?|apikeys?|auth(orization)?|bearer|cookies?|credentials?|pass(phrase|wd|words?)|pwd|secrets?"
)
_OF_KEYS = re.compile(r"access|account|api|auth|encryption|license|private|secret|service|shared|signing|ssh")
# Words that mark `token` or `tokens` as tokens of a text, which are not secret.
_OF_TEXT = re.compile(
    r"begin|bos|cls|count|decoder|end|eo[st]|extra|fim|image|mask|max|min|num|pad(ding)?|prefix|sep|separator|sos|special|"
    r"start|stop|suffix|unk(nown)?"
)
_SECRET_BELOW = re.compile(r"(\w+_)?headers|env|environ|environment|env_vars", re.IGNORECASE)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_REFERENCE = re.compile(r"\$\{[\w.:\[\]]+\}")
_PLAIN = frozenset(["", "null", "none", "true", "false", "???", "{}", "[]"])
_KEY_INSIDE = re.compile(r"([\w.\-]+)[\"']?\s*[:=]")


def masked(value: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return nested plain values with secrets replaced by stars.

    A value is secret if one of its keys names a secret (``password``, ``hf_token``, ``api_key``) or it lies below
    ``headers`` or ``env``. In URLs (``https://user:password@host``), user and password are masked. Null, booleans and
    lone references (``${oc.env:HF_TOKEN}``) are shown.

    Args:
        value: mappings, lists and their contents.
        keys: path of ``value``, outermost first.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, (*keys, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, (*keys, "")) for item in value]
    if _hides(keys, value):
        return MASK
    return _without_user(value) if isinstance(value, str) else value


def masked_word(word: str) -> str:
    """Return an override as typed, its value replaced by stars if it is or contains a secret."""
    key, equals, value = word.partition("=")
    if not equals:
        return word
    keys = tuple(key.lstrip("+~").split("."))
    inside = (tuple(found.split(".")) for found in _KEY_INSIDE.findall(value) if value[:1] in "{[")
    below = (*keys, "") if value[:1] in ("{", "[") else keys
    if _hides(below, value) or any(_is_secret((*keys, *each, "")) for each in inside):
        return f"{key}={MASK}"
    return _without_user(word)


def masked_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command, each masked by :func:`masked_word`."""
    return [masked_word(word) for word in words]


class MaskedParameters:
    """A mixin for loggers that write hyper-parameters into the run directory, without secrets.

    Attributes:
        references: text to write instead of hyper-parameters that come from the environment, by name.
    """

    references: Mapping[str, Any] = {}

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Write hyper-parameters; the arguments are the logger's own."""
        given = vars(params) if isinstance(params, Namespace) else params or {}
        referred = {key: text for key, text in self.references.items() if key in given}
        super().log_hyperparams(masked({**given, **referred}), *args, **kwargs)  # type: ignore[misc]


def _without_user(text: str) -> str:
    return _USER_OF_ADDRESS.sub(f"{MASK}@", text)


def _hides(keys: tuple[str, ...], value: object) -> bool:
    if value is None or isinstance(value, bool) or str(value).strip("'\"").lower() in _PLAIN:
        return False
    return _is_secret(keys) and _REFERENCE.fullmatch(str(value).strip("'\"")) is None


def _is_secret(keys: tuple[str, ...]) -> bool:
    return any(map(_SECRET_BELOW.fullmatch, keys[:-1])) or any(map(_names_secret, keys))


def _names_secret(key: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if words[-1:] in (["token"], ["tokens"]):
        return not any(map(_OF_TEXT.fullmatch, words))
    of_key = any(_OF_KEYS.fullmatch(one) and two in ("key", "keys") for one, two in pairwise(words))
    return of_key or any(_SECRET.fullmatch(word) for word in words)
