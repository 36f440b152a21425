"""What can be typed behind `doctor` and `profile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Typed:
    """What was asked for.

    Args:
        wish: the run.
        json: print JSON alone.
        out: file of the profile.
        overwrite: replace it.
        help: show how it is typed.
    """

    wish: Wish
    json: bool = False
    out: str | None = None
    overwrite: bool = False
    help: bool = False


def parse(verb: str, words: Sequence[str], launcher: Launcher | None) -> Typed:
    """Understand what was typed.

    Args:
        verb: doctor or profile.
        words: behind it.
        launcher: of this process; it says how many ranks there are.

    Raises:
        ConfigError: with all problems.
    """
    flags: Mapping[str, str] = {"--json": "json"} if verb == "doctor" else {"--overwrite": "overwrite"}
    keys = _OF_DOCTOR if verb == "doctor" else _OF_PROFILE
    problems: list[str] = []
    values: dict[str, Any] = {}
    typed: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, is_key, text = word.partition("=")
        if word in ("-h", "--help"):
            typed["help"] = True
        elif word in flags:
            typed[flags[word]] = True
        elif verb == "profile" and key == "--out":
            if not is_key and not rest:
                problems.append("--out: the file is missing; type --out conf/device/mine.yaml")
            else:
                typed["out"] = text if is_key else rest.pop(0)
        elif word.startswith("-"):
            options = [*flags, "--help", *(["--out"] if verb == "profile" else [])]
            problems.append(f"{word}: there is no such option of {verb}; {did_you_mean(word, options, 'options')}")
        elif not is_key or key not in keys:
            problems.append(f"{word}: there is no such key of {verb}; {did_you_mean(key, keys, 'keys')}")
        else:
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
    return Typed(Wish(**values, figures=verb == "profile"), **typed)
