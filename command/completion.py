"""Shell completion of the command line, through argcomplete.

On TAB, the shell runs the command with ``_ARGCOMPLETE`` set and the line in ``COMP_LINE``; argcomplete sends back what
fits. Without candidates, the shell completes file names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.command.schema.compose import choices_of, compose_checked, config_loader, group_names
from trainwright.command.verbs import ALL_VERBS, FIRST_WORD_VERBS, make_parser
from trainwright.core.problems import ConfigError
from trainwright.launch.schema import RunConfig


def complete() -> None:
    """Send the completions of the line in the environment to the shell, and exit.

    Raises:
        ConfigError: if argcomplete is missing.
    """
    try:
        import argcomplete
    except ImportError as error:
        raise ConfigError(["shell completion needs argcomplete; pip install 'trainwright[completion]'"]) from error

    def of_line(prefix: str, **rest: Any) -> list[str]:
        _, _, _, words, _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
        return list(candidates(words[1:], prefix))

    parser = make_parser()
    words: Any = parser.add_argument("words", nargs="*")
    words.completer = of_line
    argcomplete.autocomplete(parser, always_complete_options=False)


def candidates(words: Sequence[str], begun: str) -> Iterator[str]:
    """Yield what may follow on the command line: verbs, groups, their choices, and keys.

    Args:
        words: complete words after `trainwright`.
        begun: the word to complete; may be empty. Candidates need not start with it.
    """
    arguments, plain, _ = make_parser().parse_among_words(words, ())
    if not plain:
        yield from ALL_VERBS
        return
    if plain[0] in FIRST_WORD_VERBS:
        return
    loader = config_loader(arguments.config_dir)
    key, is_value, _ = begun.partition("=")
    if is_value:
        yield from (f"{key}={choice}" for choice in choices_of(loader, key))
    elif "." in key:
        yield from (f"{name}=" for name in _keys(compose_checked(plain[1:], arguments.config_dir).cfg))
    else:
        yield from (f"{group}=" for group in group_names(loader))
        yield from (f"{field.name}=" for field in fields(RunConfig))


def _keys(cfg: DictConfig | None) -> Iterator[str]:
    """Yield the path of every value in a configuration."""
    found: list[tuple[str, Any]] = [] if cfg is None else [("", OmegaConf.to_container(cfg, resolve=False))]
    while found:
        path, value = found.pop()
        if isinstance(value, dict):
            found.extend((f"{path}.{key}".lstrip("."), item) for key, item in value.items())
        if path:
            yield path
