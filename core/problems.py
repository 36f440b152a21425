"""Errors that list all problems of a configuration at once."""

import difflib
from collections.abc import Iterable, Sequence

from trainwright.core.config.synonyms import names_for

_MOST_NAMES, _NEAREST = 20, 6


class ConfigError(ValueError):
    """A configuration that cannot run; nothing was started.

    Args:
        problems: one text per problem, each with what was given, what is allowed and what to type instead.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(format_problems(self.problems))


class ChangedDataError(ValueError):
    """A dataset that differs from the one of the checkpoint to resume; the message lists the differences."""


def format_problems(problems: Sequence[str]) -> str:
    """Return the problems, numbered if there are several, after a line that nothing was started."""
    if len(problems) == 1:
        return f"nothing was started, because:\n  {_indent(problems[0], 2)}"
    lines = [f"  {number}. {_indent(text, 5)}" for number, text in enumerate(problems, 1)]
    return f"nothing was started, because of {len(problems)} problems:\n" + "\n".join(lines)


def first_of(problems: Sequence[str]) -> str:
    """Return the first problem and the number of others; those of a module are mostly of one kind."""
    more = len(problems) - 1
    return problems[0] + (
        f" (And {more} more problem{'s' if more > 1 else ''} of this kind or others.)" if more else ""
    )


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that means the same as `given` or is most similar to it; None if there is none."""
    names = list(allowed)
    matches = names_for(given, names) or difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(given: str, allowed: Iterable[str], kind: str, shown_by: str = "`trainwright fit --help`") -> str:
    """Return the nearest allowed name as a question, followed by all of them, or of many by those most like it.

    Args:
        given: as typed.
        allowed: every accepted name.
        kind: plural noun for the names ("strategies").
        shown_by: shows all of many names.
    """
    names = sorted(allowed)
    near = nearest(given, names)
    question = f"did you mean {near}? " if near else ""
    if len(names) > _MOST_NAMES:
        like = difflib.get_close_matches(given, names, n=_NEAREST, cutoff=0.3) or names[:_NEAREST]
        return f"{question}{kind}: {', '.join(like)}, ...; {shown_by} shows all"
    return f"{question}{kind}: {', '.join(names) if names else 'there are none'}"


def _indent(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)


class DivergedError(RuntimeError):
    """Training ended by the loss guard; weights and checkpoints predate the bad step."""
