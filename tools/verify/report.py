"""The outcome of `trainwright verify`: numbers, verdict, and both as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_MOST_ROWS = 24
_WORST = 5
_ENDS = 4  # steps of which the module table shows so many from the start and from the end


@dataclass(frozen=True)
class LossDifference:
    """The loss of one optimizer step, the mean over its global batch.

    Attributes:
        step: counted from 1.
        reference: of the one-process run; None when no micro-batch returned one.
        layout: under the layout.
        difference: relative to the reference.
        passed: whether it is within the tolerance.
    """

    step: int
    reference: float | None
    layout: float | None
    difference: float
    passed: bool


@dataclass(frozen=True)
class TensorDifference:
    """One gradient, or one parameter, after one optimizer step.

    Attributes:
        step: counted from 1; 0 for the initial parameters.
        name: of the parameter.
        distance: L2 norm of the difference.
        norm: L2 norm in the one-process run.
        difference: `distance` divided by `norm`, or by the floor of small ones (see `tools/verify/compare.py`).
        passed: whether it is within the tolerance.
        left_out: elements that rounding alone may have moved, which do not count (see there).
        factor: when all that is wrong is the scale, how many times the one-process value this is; else None.
    """

    step: int
    name: str
    distance: float
    norm: float
    difference: float
    passed: bool
    left_out: int = 0
    factor: float | None = None


@dataclass(frozen=True)
class Start:
    """Where the difference starts.

    Attributes:
        step: counted from 1; 0: before the first.
        what: run, samples, parameters, loss or gradients.
        module: name of the first module, in the order of execution, that differs; None where that cannot be told.
        parameter: its first parameter that differs; None as for `module`.
        text: the same in words.
    """

    step: int
    what: str
    module: str | None
    parameter: str | None
    text: str


@dataclass(frozen=True)
class VerifyReport:
    """Whether a layout trains as one process does.

    Attributes:
        recipe: name of the run.
        strategy: class of the strategy.
        ranks: number of processes under the layout.
        layout: sizes of its mesh axes, those that are not 1.
        precision: of both runs.
        tolerance: largest relative difference that passes.
        global_batch: samples per optimizer step, and what they are made of, in words.
        dropout_off: attributes that held a dropout probability and were set to 0.
        losses: one per step.
        samples: what is wrong with the samples that were read, one text each.
        gradients: before clipping, one per step and parameter.
        parameters: at the start (step 0) and after every step, one per parameter.
        problems: what else the runs do not have in common, one text each.
        start: where the difference starts; None when all is within the tolerance.
    """

    recipe: str
    strategy: str
    ranks: int
    layout: Mapping[str, int]
    precision: str
    tolerance: float
    global_batch: str
    dropout_off: Sequence[str]
    losses: Sequence[LossDifference]
    samples: Sequence[str]
    gradients: Sequence[TensorDifference]
    parameters: Sequence[TensorDifference]
    problems: Sequence[str]
    start: Start | None

    @property
    def passed(self) -> bool:
        """The verdict."""
        return self.start is None

    @property
    def final_parameters(self) -> list[TensorDifference]:
        """Those after the last step."""
        last = max((one.step for one in self.parameters), default=0)
        return [one for one in self.parameters if one.step == last]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; what is not a finite number is null."""
        steps = sorted({one.step for one in self.gradients})
        groups = groups_of([one.name for one in self.final_parameters])
        document = {
            "passed": self.passed,
            **asdict(self),
            "steps": len(self.losses),
            "modules": [
                {
                    "module": group,
                    "gradients": [_worst_of(self.gradients, names, step) for step in steps],
                    "parameters": _worst_of(self.final_parameters, names),
                }
                for group, names in groups.items()
            ],
        }
        return {key: _finite(value) for key, value in document.items()}

    def to_text(self) -> str:
        """As a person reads it."""
        parts = ["\n".join(self._head()), "\n".join(self._loss_table()), "\n".join(self._module_table())]
        parts += ["\n".join(lines) for lines in (self._worst(), self._left_out(), self._verdict()) if lines]
        return "\n\n".join(parts) + "\n"

    def _head(self) -> list[str]:
        axes = " ".join(f"{axis}={size}" for axis, size in self.layout.items()) or "one rank"
        dropout = f"off in {len(self.dropout_off)} place(s)" if self.dropout_off else "none in the model"
        return [
            f"{self.recipe}: {self.strategy} ({axes}, {self.ranks} process(es)) against one process",
            f"{self.global_batch}; precision {self.precision}; dropout {dropout}",
        ]

    def _loss_table(self) -> list[str]:
        lines = ["step      one process           layout  difference"]
        for one in self.losses:
            values = f"{_loss(one.reference):>15}  {_loss(one.layout):>15}"
            lines.append(f"{one.step:>4}  {values}  {one.difference:10.1e}{_mark(one.passed)}")
        return lines

    def _module_table(self) -> list[str]:
        steps = sorted({one.step for one in self.gradients})
        groups = groups_of([one.name for one in self.final_parameters])
        width = max([len(group) for group in groups] + [len("largest difference")])
        steps = steps if len(steps) <= 2 * _ENDS else [*steps[:_ENDS], *steps[-_ENDS:]]
        head = " ".join(f"{f'step {step}':>9}" for step in steps)
        lines = [
            f"{'largest difference':<{width}}  {'of gradients':<{len(head)}}  of parameters",
            f"{'of the module':<{width}}  {head}  at the end",
        ]
        rows = []
        for group, names in groups.items():
            gradients = [_worst_of(self.gradients, names, step) for step in steps]
            last = _worst_of(self.final_parameters, names)
            cells = " ".join(f"{value:9.1e}" for value in gradients)
            failed = any(not one.passed for one in (*self.gradients, *self.final_parameters) if one.name in names)
            rows.append(
                (max([*gradients, last], key=_order), f"{group:<{width}}  {cells}  {last:.1e}{_mark(not failed)}")
            )
        shown = sorted(range(len(rows)), key=lambda row: _order(rows[row][0]), reverse=True)[:_MOST_ROWS]
        lines += [rows[row][1] for row in sorted(shown)]
        if len(rows) > len(shown):
            lines.append(f"... and {len(rows) - len(shown)} modules that differ less")
        return lines

    def _worst(self) -> list[str]:
        lines = ["worst parameters"]
        for kind, differences in (("gradient", self.gradients), ("parameter", self.final_parameters)):
            seen: dict[str, TensorDifference] = {}
            for one in sorted(differences, key=lambda one: _order(one.difference), reverse=True):
                seen.setdefault(one.name, one)
            for one in list(seen.values())[:_WORST]:
                what = f"{kind} after step {one.step}" if kind == "parameter" else f"{kind} of step {one.step}"
                lines.append(f"  {one.difference:.1e}  {one.name}, {what}{_scaled(one)}{_mark(one.passed)}")
        return lines

    def _left_out(self) -> list[str]:
        found = [one for one in self.final_parameters if one.left_out]
        if not found:
            return []
        names = ", ".join(one.name for one in found[:_WORST])
        names += f" and {len(found) - _WORST} more" if len(found) > _WORST else ""
        count = sum(one.left_out for one in found)
        return [f"left out: {count} element(s) whose gradient is nothing but rounding, of {names}"]

    def _verdict(self) -> list[str]:
        if self.start is None:
            return [f"passed: every difference is within {self.tolerance:g}"]
        lines = [f"FAILED, tolerance {self.tolerance:g}: the difference starts {self.start.text}"]
        others = [text for text in (*self.problems, *self.samples) if text not in self.start.text]
        lines += [f"  {text}" for text in others[:_WORST]]
        return lines + ([f"  ... and {len(others) - _WORST} more of this kind"] if len(others) > _WORST else [])


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by module: by the first level of names on which they differ, and each member of a list by itself.

    `model.blocks.0.up.weight` and `model.head.weight` are in `blocks.0` and `head`.

    Returns:
        Names by group, in the order given.
    """
    names = list(dict.fromkeys(names))
    split = [name.split(".") for name in names]
    common = 0
    while len(split) > 1 and all(len(parts) > common + 2 and parts[common] == split[0][common] for parts in split):
        common += 1
    groups: dict[str, list[str]] = {}
    for name, parts in zip(names, split, strict=True):
        path = parts[common:-1] or parts[common:]
        last = next((place for place, part in enumerate(path) if part.isdigit() and place), 0)
        # The number of a list says nothing without the list's name.
        list_name = parts[common - 1 : common] if path[0].isdigit() else []
        groups.setdefault(".".join([*list_name, *path[: last + 1]]), []).append(name)
    return groups


def _worst_of(differences: Sequence[TensorDifference], names: Sequence[str], step: int | None = None) -> float:
    wanted = set(names)
    found = [one.difference for one in differences if one.name in wanted and step in (None, one.step)]
    return max(found, key=_order, default=0.0)


def _order(value: float) -> float:
    """NaN is worse than everything."""
    return math.inf if math.isnan(value) else value


def _mark(passed: bool) -> str:
    return "" if passed else "  <-"


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _scaled(one: TensorDifference) -> str:
    return "" if one.factor is None else f", {one.factor:.4g} times that of one process"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
