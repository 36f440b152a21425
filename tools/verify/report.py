"""Result of `trainwright verify`: numbers, verdict, and text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_MOST_ROWS = 24
_WORST = 5
_ENDS = 4  # steps shown in the module table, from the start and from the end


@dataclass(frozen=True)
class LossDifference:
    """Loss of one optimizer step, the mean over its global batch.

    Attributes:
        step: counted from 1.
        reference: of the one-process run; None if no micro-batch returned one.
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
    """Difference of one gradient or parameter after one optimizer step.

    Attributes:
        step: counted from 1; 0 for the initial parameters.
        name: of the parameter.
        distance: L2 norm of the difference.
        norm: L2 norm in the one-process run.
        difference: `distance` divided by `norm`, or by the floor of small ones (see `tools/verify/compare.py`).
        passed: whether it is within the tolerance.
        left_out: number of excluded elements, which may differ by rounding (see there).
        factor: ratio to the one-process value, if only the scale differs; else None.
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
class FirstDifference:
    """First difference between the runs.

    Attributes:
        step: counted from 1; 0: before the first.
        what: run, samples, parameters, loss or gradients.
        module: first module that differs, in order of execution; None if unknown.
        parameter: its first parameter that differs; None if unknown.
        text: description.
    """

    step: int
    what: str
    module: str | None
    parameter: str | None
    text: str


@dataclass(frozen=True)
class VerifyReport:
    """Comparison of training under a layout and in one process.

    Attributes:
        recipe: name of the run.
        strategy: class of the strategy.
        ranks: number of processes under the layout.
        layout: sizes of its mesh axes other than 1.
        precision: of both runs.
        tolerance: largest relative difference that passes.
        global_batch: description of the samples per optimizer step.
        dropout_off: attributes with dropout probabilities set to 0.
        losses: one per step.
        samples: problems with the samples read.
        gradients: before clipping, one per step and parameter.
        parameters: initial (step 0) and after every step, one per parameter.
        problems: other mismatches of the runs.
        start: first difference; None if all is within the tolerance.
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
    start: FirstDifference | None

    @property
    def passed(self) -> bool:
        """True if all differences are within the tolerance."""
        return self.start is None

    @property
    def final_parameters(self) -> list[TensorDifference]:
        """Differences after the last step."""
        last = max((one.step for one in self.parameters), default=0)
        return [one for one in self.parameters if one.step == last]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document; numbers that are not finite become null."""
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
        """Return text for a terminal."""
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
            lines.append(f"... and {len(rows) - len(shown)} modules with smaller differences")
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
        return [f"excluded: {count} element(s) with gradients of rounding only, in {names}"]

    def _verdict(self) -> list[str]:
        if self.start is None:
            return [f"passed: every difference is within {self.tolerance:g}"]
        lines = [f"FAILED, tolerance {self.tolerance:g}: the first difference is {self.start.text}"]
        others = [text for text in (*self.problems, *self.samples) if text not in self.start.text]
        lines += [f"  {text}" for text in others[:_WORST]]
        return lines + ([f"  ... and {len(others) - _WORST} more"] if len(others) > _WORST else [])


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameters by module: by the first level of names that differs, with members of lists separate.

    `model.blocks.0.up.weight` and `model.head.weight` are in `blocks.0` and `head`.

    Returns:
        Names by group, in the given order.
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
        # An index is meaningless without the name of its list.
        list_name = parts[common - 1 : common] if path[0].isdigit() else []
        groups.setdefault(".".join([*list_name, *path[: last + 1]]), []).append(name)
    return groups


def _worst_of(differences: Sequence[TensorDifference], names: Sequence[str], step: int | None = None) -> float:
    wanted = set(names)
    found = [one.difference for one in differences if one.name in wanted and step in (None, one.step)]
    return max(found, key=_order, default=0.0)


def _order(value: float) -> float:
    """Return a sort key that puts NaN last."""
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
