"""State of the translation of one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainwright.core.config.override_words import typed
from trainwright.tools.deepspeed.reading import ParsedFile
from trainwright.tools.deepspeed.recipe import Recipe
from trainwright.tools.deepspeed.report import Line, Report
from trainwright.tools.deepspeed.table import AUTO, KEYS, MAPPED, SWITCHED, UNSUPPORTED

# Each of these defines the global batch, so a typed one overrides the file's values of all.
_BATCH = ("global_batch_size", "accumulation", "accumulation.steps")


class Typed:
    """Command-line overrides by native key.

    Args:
        overrides: `key=value`, as typed.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self._by_key = {text.lstrip("+~").split("=", 1)[0].split("@")[0]: text for text in overrides}

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def over(self, key: str) -> str | None:
        """Return the override of a native key or one of its parents; None if there is none."""
        if key in _BATCH:
            return next((self._by_key[other] for other in _BATCH if other in self._by_key), None)
        parts = key.split(".")
        above = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        return next((self._by_key[name] for name in above if name in self._by_key), None)

    def value(self, key: str) -> Any:
        """Return the typed value of a key; None if it was not typed or is invalid."""
        if key not in self._by_key:
            return None
        try:
            override = OverridesParser.create().parse_override(self._by_key[key])
        except HydraException:
            return None  # refused when the configuration is composed
        return None if override.is_sweep_override() else override.value()


# Groups with free mappings, to which keys are added.
_OPEN = ("optimizer.", "callbacks.", "logger.")


@dataclass(frozen=True)
class _Setting:
    key: str
    value: Any
    by: str

    @property
    def text(self) -> str:
        return f"{'++' if self.key.startswith(_OPEN) else ''}{self.key}={typed(self.value)}"


@dataclass
class Translation:
    """Translation of a file to native configuration.

    Attributes:
        given: the file.
        recipe: configuration without it; None: no recipe.
        typed: overrides of the command line, which win.
        problems: of the file.
    """

    given: ParsedFile
    recipe: Recipe | None
    typed: Typed
    problems: list[str] = field(default_factory=list)
    _said: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    _settings: list[_Setting] = field(default_factory=list)
    _removed: list[str] = field(default_factory=list)
    _decided: dict[str, bool] = field(default_factory=dict)

    # ---- input -------------------------------------------------------------------------------------------------

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value of a key; `default` if the file has none or its section is off."""
        return self.given.values[path] if path in self.given.values and self.is_on(path) else default

    def has(self, path: str) -> bool:
        """Return whether the file has a value for a key."""
        return path in self.given.values

    def is_auto(self, path: str) -> bool:
        """Return whether the value is left to the recipe."""
        return bool(self.value(path) == AUTO)

    def is_on(self, path: str) -> bool:
        """Return whether the section of a key is enabled; :meth:`decide` sets "auto"."""
        section = path.partition(".")[0]
        switch = f"{section}.enabled"
        if section not in SWITCHED or path == switch:
            return True
        value = self.given.values.get(switch, False)
        return self._decided.get(switch, False) if value == AUTO else bool(value)

    def decide(self, path: str, on: bool) -> None:
        """Decide a switch that is "auto"."""
        self._decided[path] = on

    def paths(self, section: str) -> list[str]:
        """Return the keys of the file within a section."""
        return [path for path in self.given.values if path.startswith(f"{section}.")]

    @property
    def world_size(self) -> int | None:
        """Number of ranks; None if neither the recipe nor the command line has it."""
        if self.recipe is not None:
            return self.recipe.world_size
        devices, nodes = self.typed.value("devices"), self.typed.value("nodes")
        if not isinstance(devices, int):
            return None
        return devices * (nodes if isinstance(nodes, int) else 1)

    # ---- output ------------------------------------------------------------------------------------------------

    def say(self, path: str, status: str | None = None, note: str | None = None, stops: bool = False) -> None:
        """Report a key, if the file has it.

        Args:
            path: of the key.
            status: None: that of the table.
            note: None: that of the table, unless the status is mapped.
            stops: whether a run is refused.
        """
        if path in self.given.values:
            key = KEYS[path]
            status = status or key.status
            self._said[path] = (status, ("" if status == MAPPED else key.note) if note is None else note, stops)

    def set(self, key: str, value: Any, by: str) -> None:
        """Set a native key.

        Args:
            key: dotted, or the name of a group.
            value: plain.
            by: path of the DeepSpeed key it follows from, which the file need not have.
        """
        self._settings.append(_Setting(key, value, by))

    def is_set(self, key: str) -> bool:
        """Return whether a native key was set."""
        return any(setting.key == key for setting in self._settings)

    def remove(self, key: str) -> None:
        """Remove a key of the recipe."""
        if self.typed.over(key) is None:
            self._removed.append(f"~{key}")

    def note_absent(self, path: str, note: str) -> None:
        """Report the native behaviour for a key that the file does not have."""
        self._said[path] = (MAPPED, note, False)

    def refuse(self, problem: str) -> None:
        """Report a problem of the file."""
        self.problems.append(f"{self.given.name}: {problem}")

    def needs_recipe(self, path: str, remedy: str) -> None:
        """Refuse an "auto" without a value."""
        if self.recipe is None:
            self.refuse(f'{path} is "auto", and there is no recipe to take it from; type recipe=<name>, or {remedy}')
        else:
            self.refuse(f'{path} is "auto", but the recipe {self.recipe.name!r} does not define it; {remedy}')

    def apply_table(self) -> None:
        """Set and report what the table defines for each key."""
        by = {setting.by for setting in self._settings}
        for path, value in self.given.values.items():
            key = KEYS.get(path)
            if key is None or path in self._said or path in by or value == AUTO or not self.is_on(path):
                continue
            if key.status == UNSUPPORTED:
                if value != key.harmless:
                    self.say(path, stops=True)
            elif value and key.sets:
                self.set(*key.sets, by=path)
            elif value and key.note:
                self.say(path, note=key.note)

    # ---- report ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return the translation of every key of the file."""
        for setting in self._settings:
            if setting.by not in self._said:
                self.note_absent(setting.by, "")
                self.say(setting.by)
        values = self.given.values
        absent = [self._line(path) for path in self._said if path not in values]
        return Report(
            self.given.name,
            tuple(self._line(path) for path in values if path in self._said),
            tuple(line for line in absent if line.note or line.becomes),
            (*(path for path in values if path not in self._said), *self.given.empty),
            tuple(self.overrides()),
        )

    def overrides(self) -> list[str]:
        """Return the native configuration as overrides, without typed ones."""
        texts = [setting.text for setting in self._settings if self.typed.over(setting.key) is None]
        return [*self._removed, *dict.fromkeys(texts)]

    def _line(self, path: str) -> Line:
        status, note, stops = self._said[path]
        mine = [setting for setting in self._settings if setting.by == path]
        typed = [text for setting in mine if (text := self.typed.over(setting.key)) is not None]
        kept = [setting.text for setting in mine if self.typed.over(setting.key) is None]
        overridden = () if kept else tuple(dict.fromkeys(typed))
        return Line(path, self.given.values.get(path), status, tuple(dict.fromkeys(kept)), note, overridden, stops)
