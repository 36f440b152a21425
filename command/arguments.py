"""Command-line parsing: argparse whose errors have the form of all others."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from trainwright.core.problems import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """Parser of a verb's arguments, without abbreviations and argparse's help.

    Args:
        verb: of `trainwright`; empty = the command itself.
    """

    def __init__(self, verb: str = "") -> None:
        super().__init__(prog=f"trainwright {verb}".rstrip(), add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message and what to type."""
        raise ConfigError([f"{message}; `{self.prog} --help` shows the usage"])

    def parse_among_words(
        self, words: Sequence[str], options: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str], list[str]]:
        """Parse options mixed with other words, like key=value.

        Args:
            words: the command line.
            options: names to suggest for an unknown one.

        Returns:
            The options, the other words in order, and a problem for each unknown option.

        Raises:
            ConfigError: if an option lacks its value.
        """
        self.add_argument("words", nargs="*")
        arguments, rest = self.parse_known_intermixed_args(list(words))
        unknown = [word for word in rest if word.startswith("-")]
        plain = [*arguments.words, *(word for word in rest if not word.startswith("-"))]
        problems = [f"{word}: there is no such option; {did_you_mean(word, options, 'options')}" for word in unknown]
        return arguments, plain, problems
