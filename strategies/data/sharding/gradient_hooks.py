"""Hooks that users have put on parameters, where a strategy exchanges these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def refuse_accumulation_hooks(module: nn.Module) -> None:
    """Raise if a parameter has a hook that runs once its gradient is accumulated, which ranks have only a part of.

    Raises:
        ValueError: with the name of the parameter.
    """
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"The parameter {name!r} has a hook of register_post_accumulate_grad_hook (an optimizer that steps in "
                f"backward?), but its gradient is not averaged over ranks when that runs. Use register_hook for what "
                f"changes gradients, configure_optimizers for what steps, or strategy=ddp."
            )


def refuse_hook(name: str, parameter: Tensor) -> None:
    """Raise if a parameter that is exchanged for a part has a gradient hook.

    Raises:
        ValueError: with the name of the parameter.
    """
    if parameter._backward_hooks:
        raise ValueError(
            f"The parameter {name!r} has a gradient hook (register_hook), and ranks compute parts of its gradient. "
            f"Change gradients in on_after_backward or on_before_optimizer_step, where they are whole, or use "
            f"strategy=ddp, zero2 or zero3."
        )


def hooks_of(parameters: Iterable[tuple[nn.Module, str]]) -> dict[tuple[nn.Module, str], Mapping[int, Any]]:
    """Return the gradient hooks of those parameters, by module and name in it, that have any."""
    found = {}
    for owner, name in parameters:
        hooks = getattr(owner._parameters.get(name), "_backward_hooks", None)
        if hooks:
            found[owner, name] = hooks
    return found


def run_when_gathered(unit: nn.Module, hooks: Mapping[tuple[nn.Module, str], Mapping[int, Any]]) -> None:
    """Let hooks of parameters run on their gathered gradients, from the first forward of what gathers them on.

    Args:
        unit: what ``fully_shard`` has split together.
        hooks: of its parameters before that; one that is removed later does not run any more.
    """
    if not hooks:
        return
    waiting = dict(hooks)

    def attach(*_: Any) -> None:
        handle.remove()
        while waiting:  # once, even if somebody puts this hook back
            (owner, name), of_parameter = waiting.popitem()
            parameter = owner._parameters[name]
            if parameter is not None and parameter.requires_grad:
                parameter.register_hook(lambda gradient, found=of_parameter: _run(found, gradient))

    handle = unit.register_forward_pre_hook(attach)


def _run(hooks: Mapping[int, Any], gradient: Tensor) -> Tensor:
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
