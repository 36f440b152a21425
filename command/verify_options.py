"""Options of `trainwright verify`: `verify.steps=`, `verify.tolerance=`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainwright.core.config.options import number, value_problems
from trainwright.core.problems import did_you_mean

PREFIX = "verify"
# Holds for fp32 on every layout; other precisions need an explicit bound.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class VerifyOptions:
    """Options of the command alone: a run's configuration has no such keys."""

    # Optimizer steps that both runs train, at least 1.
    steps: int = number(4, least=1)
    # Largest accepted relative difference, more than 0 and less than 1; null = 1e-5 with precision=32; required for any
    # other precision.
    tolerance: float | None = number(None, above=0, below=1, null="for the default")

    def problems(self, precision: str) -> list[str]:
        """Return what is wrong with these options, each with what to type instead.

        Args:
            precision: of the verified configuration.
        """
        found = list(value_problems(VerifyOptions, vars(self), f"{PREFIX}."))
        if self.tolerance is None and precision != "32":
            rounding = f"rounding differs by layout far more than the {TOLERANCE:g} of precision=32"
            found.append(f"precision={precision}: {rounding}; type precision=32, or verify.tolerance=0.01")
        return found

    @property
    def bound(self) -> float:
        """Largest accepted relative difference."""
        return TOLERANCE if self.tolerance is None else float(self.tolerance)


def take_options(overrides: Sequence[str]) -> tuple[VerifyOptions, list[str], list[str]]:
    """Split off the overrides of this command.

    Args:
        overrides: as typed, `key=value`.

    Returns:
        The options, the overrides of the run, and the problems.
    """
    keys = {f"{PREFIX}.{item.name}": item.name for item in fields(VerifyOptions)}
    own = [text for text in overrides if text.lstrip("+~").split("=", 1)[0].split(".")[0] == PREFIX]
    values: dict[str, Any] = {}
    problems: list[str] = []
    for text in own:
        key = text.split("=", 1)[0]
        if key not in keys:
            problems.append(f"{text}: there is no such key; {did_you_mean(key, list(keys), 'keys')}")
            continue
        try:
            values[keys[key]] = OverridesParser.create().parse_override(text).value()
        except HydraException:
            problems.append(f"{text}: this is not key=value; type for example verify.steps=4")
    return VerifyOptions(**values), [text for text in overrides if text not in own], problems
