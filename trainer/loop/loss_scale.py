"""Loss scaling for precision=16-mixed, which keeps small gradients from underflowing in float16.

Dynamic scaling: a step whose gradients overflow is dropped and the scale halves; after `growth_interval` steps without
overflow it doubles (Micikevicius et al., arXiv:1710.03740, section 3.2; torch.amp.GradScaler).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.core.config.options import number, unknown_options, value_problems

PRECISION = "16-mixed"


@dataclass
class LossScaling:
    """`trainer.loss_scale`: how the loss is scaled with precision=16-mixed."""

    # Scale of the first steps; null = 65536, and 1024 on CPUs, where runs are short and would drop their first steps.
    initial: float | None = number(None, above=0, null="for the default of the device")
    # Optimizer steps in a row without overflow after which the scale doubles.
    growth_interval: int = number(2000, least=1)
    # The scale never falls below this; 0 = no limit.
    least: float = number(0.0)
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
    problems = unknown_options(LossScaling, given, prefix) or list(value_problems(LossScaling, asked, prefix))
    if problems:
        return problems
    if asked["fixed"] and asked["least"]:
        problems.append(f"{prefix}least={asked['least']} with {prefix}fixed=true: a scale that stays needs no limit")
    other = [f"{prefix}{name}={value}" for name, value in asked.items() if value != getattr(LossScaling, name)]
    if not problems and other and precision != PRECISION:
        problems.append(
            f"{' '.join(other)}: precision={precision} scales no loss; type precision={PRECISION}, or leave it out"
        )
    return problems
