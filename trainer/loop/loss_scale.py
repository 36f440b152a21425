"""Loss scaling for precision=16-mixed, which keeps small gradients from underflowing in float16.

Dynamic scaling: a step whose gradients overflow is dropped and the scale halves; after `growth_interval` steps without
overflow it doubles (Micikevicius et al., arXiv:1710.03740, section 3.2; torch.amp.GradScaler).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

PRECISION = "16-mixed"


@dataclass
class LossScaling:
    """`trainer.loss_scale`: how the loss is scaled with precision=16-mixed."""

    # Scale of the first steps; null = 65536, and 1024 on CPUs, where runs are short and would drop their first steps.
    initial: float | None = None
    # Optimizer steps in a row without overflow after which the scale doubles.
    growth_interval: int = 2000
    # The scale never falls below this; 0 = no limit.
    least: float = 0.0
    # Never change the scale; false = it halves after an overflow and grows again.
    fixed: bool = False


def loss_scale_problems(given: Mapping[str, Any], precision: str, prefix: str = "trainer.loss_scale.") -> list[str]:
    """Return what is wrong with the options of a loss scale, each with what to type instead.

    Args:
        given: options by name.
        precision: of the run.
        prefix: of an option's name where it is typed.
    """
    asked = {**asdict(LossScaling()), **given}
    unknown = sorted(asked.keys() - {item.name for item in fields(LossScaling)})
    if unknown:
        names = ", ".join(item.name for item in fields(LossScaling))
        return [f"{prefix}{unknown[0]}: there is no such option; options: {names}"]
    problems = []
    for name, example in (("initial", 65536), ("least", 1)):
        value, bound = 1.0 if asked[name] is None else asked[name], "more than 0" if name == "initial" else "at least 0"
        if not math.isfinite(value) or value < 0 or (name == "initial" and value == 0):
            problems.append(f"{prefix}{name}={value}: must be {bound}; type {prefix}{name}={example}")
    if asked["growth_interval"] < 1:
        problems.append(
            f"{prefix}growth_interval={asked['growth_interval']}: must be at least 1; type {prefix}growth_interval=2000"
        )
    if asked["fixed"] and asked["least"]:
        problems.append(f"{prefix}least={asked['least']} with {prefix}fixed=true: a scale that stays needs no limit")
    other = [f"{prefix}{name}={value}" for name, value in asked.items() if value != getattr(LossScaling, name)]
    if not problems and other and precision != PRECISION:
        problems.append(
            f"{' '.join(other)}: precision={precision} scales no loss; type precision={PRECISION}, or leave it out"
        )
    return problems
