"""One file on its way to native configuration: who says what of which key."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trainwright.tools.deepspeed.key import AUTO, BOOL, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.reading import Given
from trainwright.tools.deepspeed.recipe import Recipe
from trainwright.tools.deepspeed.report import Absent, Line, Report
from trainwright.tools.deepspeed.typed import Typed, hydra_value

_OFF = "off there, so nothing to do"
_SAME = "as it is here: nothing to do"
# Whose values are free mappings, to which keys are added.
_OPEN = ("optimizer.", "callbacks.", "logger.")


@dataclass
class _Said:
    status: str
    note: str
    stops: bool


@dataclass(frozen=True)
class _Setting:
    key: str
    value: Any
    by: str

    @property
    def text(self) -> str:
        return f"{'++' if self.key.startswith(_OPEN) else ''}{self.key}={hydra_value(self.value)}"


@dataclass
class Translation:
    """What is known while a file is translated.

    Attributes:
        given: the file.
        recipe: what holds without it; None = no recipe was given.
        typed: what the command line says, which wins.
        problems: what makes the file impossible, one text each.
    """

    given: Given
    recipe: Recipe | None
    typed: Typed
    problems: list[str] = field(default_factory=list)
    _said: dict[str, _Said] = field(default_factory=dict)
    _settings: list[_Setting] = field(default_factory=list)
    _absent: list[tuple[str, str]] = field(default_factory=list)
    _removed: list[str] = field(default_factory=list)
    _decided: dict[str, bool] = field(default_factory=dict)

    # ---- what the file says ------------------------------------------------------------------------------------

    def value(self, path: str, default: Any = None) -> Any:
        """The value of a key; `default` where the file has none or its section is off."""
        return self.given.values[path] if path in self.given.values and self.is_on(path) else default

    def has(self, path: str) -> bool:
        """Whether the file has a value for a key."""
        return path in self.given.values

    def is_auto(self, path: str) -> bool:
        """Whether the value is left to the recipe."""
        return bool(self.value(path) == AUTO)

    def is_on(self, path: str) -> bool:
        """Whether the section of a key is switched on; "auto" is decided by who knows what it stands for."""
        switch = self.given.keys[path].switch if path in self.given.keys else ""
        if not switch:
            return True
        value = self.given.values.get(switch, False)
        return bool(self._decided.get(switch, False) if value == AUTO else value) and self.is_on(switch)

    def decide(self, path: str, on: bool) -> None:
        """Say what a switch that is "auto" stands for."""
        self._decided[path] = on

    def paths(self, section: str) -> list[str]:
        """Keys of the file within a section."""
        return [path for path in self.given.values if path.startswith(f"{section}.")]

    @property
    def world_size(self) -> int | None:
        """Ranks of the run; None where neither a recipe nor the command line says."""
        if self.recipe is not None:
            return self.recipe.world_size
        devices, nodes = self.typed.value("devices"), self.typed.value("nodes")
        if not isinstance(devices, int):
            return None
        return devices * (nodes if isinstance(nodes, int) else 1)

    # ---- what becomes of it ------------------------------------------------------------------------------------

    def say(self, path: str, status: str | None = None, note: str | None = None, stops: bool | None = None) -> None:
        """Say what became of a key, if the file has it; what is left out is as the table has it."""
        if path not in self.given.keys:
            return
        key = self.given.keys[path]
        status = key.status if status is None else status
        self._said[path] = _Said(
            status,
            ("" if status == MAPPED else key.note) if note is None else note,
            (key.stops and status == UNSUPPORTED) if stops is None else stops,
        )

    def set(self, key: str, value: Any, by: str) -> None:
        """Set a native key.

        Args:
            key: dotted, or the name of a group.
            value: plain.
            by: path of the key of the file that it follows from, or of one that the file does not have.
        """
        self._settings.append(_Setting(key, value, by))

    def is_set(self, key: str) -> bool:
        """Whether a native key follows from the file so far."""
        return any(setting.key == key for setting in self._settings)

    def remove(self, key: str) -> None:
        """Have a key of the recipe taken out."""
        if self.typed.over(key) is None:
            self._removed.append(f"~{key}")

    def note_absent(self, path: str, note: str) -> None:
        """Say what holds for a key that the file does not have."""
        self._absent.append((path, note))

    def refuse(self, problem: str) -> None:
        """Say that the file cannot be meant so."""
        self.problems.append(f"{self.given.name}: {problem}")

    def needs_recipe(self, path: str, what: str) -> None:
        """Refuse an "auto" that cannot be filled in."""
        if self.recipe is None:
            self.refuse(f'{path} is "auto", and no recipe was given to take it from; type recipe=<name>, or {what}')
        else:
            self.refuse(f'{path} is "auto", but the recipe {self.recipe.name!r} does not say; {what}')

    # ---- the end -----------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """One line for every key of the file."""
        for path in self.given.values:
            if path not in self._said:
                self._say_as_in_table(path)
        lines = [self._line(path) for path in self.given.values]
        lines += [Line(path, None, MAPPED, note="empty: the default there") for path in self.given.empty]
        return Report(self.given.name, tuple(lines), tuple(self._absent_lines()), tuple(self.overrides()))

    def overrides(self) -> list[str]:
        """Native configuration, as it would be typed, without what was typed."""
        texts = [setting.text for setting in self._settings if self.typed.over(setting.key) is None]
        return [*self._removed, *dict.fromkeys(texts)]

    def _say_as_in_table(self, path: str) -> None:
        key, value = self.given.keys[path], self.given.values[path]
        if not self.is_on(path):
            self.say(path, MAPPED, _OFF)
        elif _is_among(value, key.harmless):
            self.say(path, MAPPED, _OFF if value is False else _SAME)
        elif value is False and key.kind == BOOL and (key.status == UNSUPPORTED or key.parts[-1] == "enabled"):
            self.say(path, MAPPED, _OFF)
        elif value == AUTO:
            self.say(path, MAPPED if key.status != UNSUPPORTED else UNSUPPORTED, key.note)
        else:
            self.say(path, note=key.note)

    def _line(self, path: str) -> Line:
        said, key = self._said[path], self.given.keys[path]
        mine = [setting for setting in self._settings if setting.by == path]
        typed = [text for setting in mine if (text := self.typed.over(setting.key)) is not None]
        kept = [setting.text for setting in mine if self.typed.over(setting.key) is None]
        return Line(
            path,
            "(not shown)" if key.secret else self.given.values[path],
            said.status,
            tuple(dict.fromkeys(kept)),
            said.note,
            tuple(dict.fromkeys(typed)) if not kept else (),
            said.stops,
        )

    def _absent_lines(self) -> list[Absent]:
        here = {*self.given.values, *self.given.empty}
        found = dict(self._absent)
        for setting in self._settings:
            if setting.by not in self.given.values:
                found.setdefault(setting.by, "")
        lines = []
        for path, note in found.items():
            mine = [s.text for s in self._settings if s.by == path and self.typed.over(s.key) is None]
            if note or mine:
                lines.append(Absent(path, tuple(dict.fromkeys(mine)), note))
        return [line for line in lines if line.key not in here or line.note or line.becomes]


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1."""
    return any(json.dumps(value) == json.dumps(other) or _equal_numbers(value, other) for other in values)


def _equal_numbers(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    return numbers and a == b
