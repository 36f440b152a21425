"""Values that Hydra takes only in quotes."""

import re
import shlex
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainwright.callbacks.inject.sentences import is_inject
from trainwright.core.config.override_words import typed as typed_value

# A value, or one of a list, a mapping or a sweep.
_WORD = re.compile(r"[^\[\]{},]+")


def quote_values(overrides: Sequence[str]) -> list[str]:
    """Quote the values, alone or within lists and sweeps, that Hydra takes only in quotes: `ü`, `it's`, `step=4`.

    Overrides that Hydra parses, and those that remain faulty, are returned as they are.
    """
    return [text if is_inject(text) or _parses(text) else _with_quotes(text) for text in overrides]


def _with_quotes(text: str) -> str:
    key, equals, value = text.partition("=")
    found = key + equals + _WORD.sub(_quoted_word, value)
    return found if _parses(found) else text


def _quoted_word(match: re.Match[str]) -> str:
    word = match[0].strip()
    is_part = word.strip("'\"") != word or word.count("(") != word.count(")")  # of a text or call with a comma
    return match[0] if is_part or _parses(f"x={word}") else typed_value(word)


def _parses(text: str) -> bool:
    try:
        return bool(OverridesParser.create().parse_override(text))
    except HydraException:
        return False


def spaced(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield overrides typed as several words, or with a colon, like `lr = 3`, and the one word that each means."""
    sign = r"(?:\0=\0?|=([^\0]*,)\0|=\0|:\0?)"
    for found in re.finditer(rf"(?:(?<=\0)|^)([A-Za-z_][\w./@]*){sign}([^\0=]+)(?=\0|$)", "\0".join(words)):
        yield found[0].replace("\0", " "), f"{found[1]}={found[2] or ''}{found[3]}"


def as_text(override: str) -> str:
    """Return what to type for a value that is text, as the end of a sentence; empty without a value."""
    key, equals, value = override.partition("=")
    text = value.replace('"', r"\"")
    typed = f'{key}="{text}"'
    return f"; for a text with these signs type {shlex.quote(typed)}" if equals else ""
