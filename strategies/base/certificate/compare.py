"""Comparison of the results of a layout and of the module as written, and its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.strategies.base.certificate.sketch import PROJECTIONS
from trainwright.strategies.contract.precision import DTYPES

# Maximum number of parameter names in a message.
_SHOWN = 3


@dataclass(frozen=True)
class Tolerance:
    """Differences explained by rounding.

    Args:
        loss: relative, of losses.
        gradient: of a parameter's gradient, relative to its norm.
        noise: of a parameter's gradient, relative to the largest norm of all parameters, for gradients that are zero
            except for rounding.
        logged: relative, of logged values.
    """

    loss: float
    gradient: float
    noise: float
    logged: float


# By the dtype of matrix products; several hundred to several thousand times its rounding error.
_TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-7, 1e-11, 1e-7),
    torch.float32: Tolerance(2e-5, 3e-4, 5e-7, 1e-4),
    torch.float16: Tolerance(5e-3, 3e-2, 1e-3, 5e-2),
    torch.bfloat16: Tolerance(2e-2, 1e-1, 8e-3, 1e-1),
}


def tolerance_of(precision: Any, module: nn.Module, sent: Sequence[str] = ()) -> Tolerance:
    """Return the tolerance for a precision plugin, the dtypes of ``module``, and those that options have sent."""
    named = str(getattr(precision, "precision", "32"))
    used = {p.dtype for p in module.parameters() if p.is_floating_point()} or {torch.float32}
    used |= {DTYPES[name] for name in sent}
    if "bf16" in named or "transformer-engine" in named:
        used.add(torch.bfloat16)
    elif named.startswith("16"):
        used.add(torch.float16)
    if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        used.add(torch.float16)  # TF32 has as many bits
    coarsest = max((dtype for dtype in used if dtype in _TOLERANCES), key=lambda dtype: torch.finfo(dtype).eps)
    return _TOLERANCES[coarsest]


@dataclass(frozen=True)
class Comparison:
    """Outcome of a certificate.

    Args:
        parameters: number of compared parameters.
        losses: the pair with the largest difference: layout, module as written; ``None``: no loss.
        loss_difference: its relative difference.
        largest: name and relative difference of the gradient that differs most; ``None``: none was compared.
        wrong: names and relative differences of gradients that differ by more than rounding.
        logged: name and both values of a logged value that differs by more than rounding; ``None``: none does.
        tolerance: differences explained by rounding.
        seconds: duration.
        state: name of a buffer or counter that a step changes differently; ``None``: none.
        module: name of the first module or parameter that differs; empty: none or unknown.
        written_seconds: duration without the layout's run, which may trace or compile the first time.
    """

    parameters: int
    losses: tuple[float, float] | None
    loss_difference: float
    largest: tuple[str, float] | None
    wrong: tuple[tuple[str, float], ...]
    logged: tuple[str, float, float] | None
    tolerance: Tolerance
    seconds: float
    state: str | None = None
    module: str = ""
    written_seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """True if nothing differs by more than rounding."""
        differs = self.wrong or self.logged is not None or self.state is not None
        return not differs and self.loss_difference <= self.tolerance.loss

    def problem(self) -> str:
        """Describe the differences for a message."""
        parts = []
        if self.losses is not None and self.loss_difference > self.tolerance.loss:
            parts.append(f"the loss is {self.losses[0]:.7g} instead of {self.losses[1]:.7g}")
        if self.logged is not None:
            name, one, other = self.logged
            parts.append(f"the logged value {name!r} is {one:.7g} instead of {other:.7g}")
        if self.wrong:
            shown = ", ".join(f"{name} by {difference:.2g}" for name, difference in self.wrong[:_SHOWN])
            rest = f" and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
            parts.append(
                f"gradients of {len(self.wrong)} of {self.parameters} parameters differ: {shown}{rest} (relative; "
                f"rounding explains {self.tolerance.gradient:.0e})"
            )
        if self.state is not None:
            parts.append(f"a step changes {self.state} differently")
        if self.module:
            parts.append(f"the first to differ is {self.module}")
        return "; ".join(parts)

    def summary(self) -> str:
        """Summarize a successful certificate in one line."""
        largest = "" if self.largest is None else f", largest difference {self.largest[1]:.1e} ({self.largest[0]})"
        loss = "" if self.losses is None else f"loss {self.losses[0]:.6g} (difference {self.loss_difference:.1e}), "
        return f"{loss}gradients of {self.parameters} parameters{largest}; {self.seconds:.1f} s"

    def record(self) -> dict[str, Any]:
        """Return plain values for files."""
        values = {name: value for name, value in vars(self).items() if name != "tolerance"}
        return {
            "holds": self.holds,
            **values,
            "wrong": [list(pair) for pair in self.wrong],
            "allowed": self.tolerance.gradient,
            "seconds": round(self.seconds, 3),
            "problem": self.problem(),
        }


@dataclass(frozen=True)
class Found:
    """Results of all ranks, equal on every rank.

    Args:
        losses: ``(n, 2)``: layout, module as written; zeros if there was none.
        logged: logged values of each data rank: name, value of the layout, of the module as written.
        layout: sketches of the layout's gradients, summed over all ranks, ``(parameters, 9)``.
        plain: sketches of the module as written, averaged over data ranks, ``(parameters, 9)``.
        sizes: number of elements of each parameter.
        compared: whether to compare each parameter.
    """

    losses: Tensor
    logged: Sequence[tuple[str, float, float]]
    layout: Tensor
    plain: Tensor
    sizes: Sequence[int]
    compared: Sequence[bool]


def compare(
    names: Sequence[str], found: Found, tolerance: Tolerance, seconds: float, state: str | None = None
) -> Comparison:
    """Compare the results of both runs; ``state``: a buffer or counter that they change differently."""
    pairs = [(one, other) for one, other in found.losses.tolist() if one or other]
    losses = max(pairs, key=lambda pair: relative_difference(*pair), default=None)
    differences = _differences(names, found, tolerance)
    wrong = tuple((name, size) for name, size, excess in differences if not excess <= 1)
    logged = max(found.logged, key=lambda each: relative_difference(each[1], each[2]), default=None)
    if logged is not None and relative_difference(logged[1], logged[2]) <= tolerance.logged:
        logged = None
    largest = max(differences, key=lambda each: each[2], default=None)
    return Comparison(
        parameters=len(differences),
        losses=losses,
        loss_difference=0.0 if losses is None else relative_difference(*losses),
        largest=None if largest is None else largest[:2],
        wrong=wrong,
        logged=logged,
        tolerance=tolerance,
        seconds=seconds,
        state=state,
    )


def _differences(names: Sequence[str], found: Found, tolerance: Tolerance) -> list[tuple[str, float, float]]:
    """Return name, relative difference and its ratio to the allowed one, of every gradient that either side has."""
    copies = found.layout[:, -1] / torch.tensor(found.sizes, dtype=torch.float64).clamp(min=1)
    layout = found.layout[:, :PROJECTIONS] / copies.clamp(min=1e-9)[:, None]
    plain = found.plain[:, :PROJECTIONS]
    norms = plain.square().mean(1).sqrt()
    distances = (layout - plain).square().mean(1).sqrt()
    # Overflowing sums are infinite or NaN, depending on their order.
    distances[~layout.isfinite().all(1) & ~plain.isfinite().all(1)] = 0.0
    finite = norms[norms.isfinite()]
    scale = float(finite.max()) if len(finite) else 0.0
    rows = []
    for row, name in enumerate(names):
        has_gradient = bool(found.layout[row, -1] or found.plain[row, -1])
        if not found.compared[row] or not has_gradient:
            continue
        norm, distance = float(norms[row]), float(distances[row])
        allowed = tolerance.gradient * norm + tolerance.noise * scale
        # Without a distance, both may be infinite or NaN.
        excess = 0.0 if not distance else distance / allowed if allowed else math.inf
        rows.append((name, distance / (norm or scale or 1.0), math.inf if math.isnan(excess) else excess))
    return rows


def relative_difference(one: float, other: float) -> float:
    """Return ``|one - other|`` relative to ``other``; infinite if only one of them is finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if (math.isnan(one) and math.isnan(other)) or one == other else math.inf
    return abs(one - other) / max(abs(other), 1e-3)
