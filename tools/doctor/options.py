"""What can be typed behind `doctor` and `profile`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.command.arguments import Parser
from trainwright.core.problems import ConfigError, did_you_mean
from trainwright.core.run.launcher import Launcher
from trainwright.tools.doctor.together import Wish

_ACCELERATORS = ("auto", "cpu", "gpu")


def _number(least: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(
                f"{key}={text}: not a whole number of at least {least}; type for example {key}={least + 1}"
            )
        return int(text)

    return read


def _accelerator(key: str, text: str) -> str:
    if text not in _ACCELERATORS:
        raise ValueError(f"{key}={text}: {did_you_mean(text, _ACCELERATORS, 'accelerators')}")
    return text


def _devices(key: str, text: str) -> int | None:
    return None if text == "auto" else _number(1)(key, text)


def _text(key: str, text: str) -> str:
    if not text:
        raise ValueError(f"{key}= is empty; give a folder, or leave it out")
    return text


_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "devices": ("devices", _devices),
    "accelerator": ("accelerator", _accelerator),
    "launch.threads": ("threads", _number(1)),
    "workers": ("workers", _number(0)),
    "run_dir": ("run_dir", _text),
}
_OF_DOCTOR = tuple(_KEYS)
_OF_PROFILE = ("devices", "accelerator", "launch.threads")


def parse(verb: str, words: Sequence[str], launcher: Launcher | None) -> argparse.Namespace:
    """Understand what was typed.

    Args:
        verb: doctor or profile.
        words: behind it.
        launcher: of this process; it says how many ranks there are.

    Returns:
        The options by name, and `wish`: what the keys say.

    Raises:
        ConfigError: with all problems.
    """
    options = {"doctor": ("--json", "--help"), "profile": ("--out", "--overwrite", "--help")}[verb]
    parser = Parser(verb)
    parser.add_argument("-h", "--help", action="store_true")
    for option in options[:-1]:
        parser.add_argument(option, action="store" if option == "--out" else "store_true")
    arguments, plain, problems = parser.parse_among_words(words, options)
    keys = _OF_DOCTOR if verb == "doctor" else _OF_PROFILE
    values: dict[str, Any] = {}
    for key, is_key, text in (word.partition("=") for word in plain):
        if not is_key or key not in keys:
            problems.append(f"{key}: there is no such key of {verb}; {did_you_mean(key, keys, 'keys')}")
            continue
        name, read = _KEYS[key]
        try:
            values[name] = read(key, text)
        except ValueError as failure:
            problems.append(str(failure))
    if launcher is not None and values.get("devices") not in (None, launcher.local_world_size):
        problems.append(
            f"devices={values['devices']}: {launcher.name} has started {launcher.local_world_size} ranks on this "
            "machine; leave devices out"
        )
    if problems:
        raise ConfigError(problems)
    arguments.wish = Wish(**values, figures=verb == "profile")
    return arguments
