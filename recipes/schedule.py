"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, warmup_steps: int, total_steps: float, final_factor: float) -> float:
    """Factor on the base learning rate: linear warm-up, then half a cosine down to ``final_factor``, then constant.

    Args:
        step: optimizer steps done, from 0.
        warmup_steps: steps until the factor is 1; 0 is off. Step 0 already has ``1 / (warmup_steps + 1)``, since a
            step at rate 0 would be wasted.
        total_steps: step at which ``final_factor`` is reached; ``math.inf``: the factor stays 1 after the warm-up.
        final_factor: the factor at the end, 0 to 1; 1 is off.

    Returns:
        The factor, 0 to 1.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if math.isinf(total_steps):
        return 1.0
    if step >= total_steps:
        return final_factor
    progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
