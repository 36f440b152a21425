"""What is wrong with a configuration, said all at once."""

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
    """A run that would not go on in the data where its checkpoint stopped; the message lists what differs."""


def format_problems(problems: Sequence[str]) -> str:
    """Number the problems when there are several, and say that nothing was started."""
    if len(problems) == 1:
        return f"nothing was started, because:\n  {_indent(problems[0], 2)}"
    lines = [f"  {number}. {_indent(text, 5)}" for number, text in enumerate(problems, 1)]
    return f"nothing was started, because of {len(problems)} problems:\n" + "\n".join(lines)


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that `given` most looks like; None when none does."""
    matches = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(given: str, allowed: Iterable[str], kind: str) -> str:
    """The nearest allowed name as a question, then all of them.

    Args:
        given: what was typed.
        allowed: every name that would have been accepted.
        kind: what the names are, in the plural ("strategies").
    """
    names = sorted(allowed)
    near = nearest(given, names)
    question = f"did you mean {near}? " if near else ""
    return f"{question}{kind}: {', '.join(names) if names else 'there are none'}"


def _indent(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)


class DivergedError(RuntimeError):
    """The loss guard ended training; weights and checkpoints are those of before the bad step."""
