"""Errors that list all problems of a configuration at once."""

import difflib
from collections.abc import Iterable, Sequence


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


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name most similar to `given`; None if none is similar."""
    matches = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(given: str, allowed: Iterable[str], kind: str) -> str:
    """Return the nearest allowed name as a question, followed by all of them.

    Args:
        given: as typed.
        allowed: every accepted name.
        kind: plural noun for the names ("strategies").
    """
    names = sorted(allowed)
    near = nearest(given, names)
    question = f"did you mean {near}? " if near else ""
    return f"{question}{kind}: {', '.join(names) if names else 'there are none'}"


def _indent(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)


class DivergedError(RuntimeError):
    """Training ended by the loss guard; weights and checkpoints predate the bad step."""
