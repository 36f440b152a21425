"""Users' gradient hooks on parameters that a strategy replaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def refuse_accumulation_hooks(module: nn.Module) -> None:
    """Raise if a parameter has a post-accumulate hook, which would see a local gradient only.

    Raises:
        ValueError: with the name of the parameter.
    """
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"The parameter {name!r} has a hook of register_post_accumulate_grad_hook (an optimizer that steps in "
                "backward?), but its gradient is not averaged over ranks when the hook runs. Use register_hook to "
                "change gradients, configure_optimizers for optimizer steps, or strategy=ddp."
            )


def refuse_hook(name: str, parameter: Tensor) -> None:
    """Raise if a parameter that is replaced by a part has a gradient hook.

    Raises:
        ValueError: with the name of the parameter.
    """
    if parameter._backward_hooks:
        raise ValueError(
            f"The parameter {name!r} has a gradient hook (register_hook), and ranks compute parts of its gradient. "
            "Change whole gradients in on_after_backward, or use strategy=ddp, zero2 or zero3."
        )


def hooks_of(parameters: Iterable[tuple[nn.Module, str]]) -> dict[tuple[nn.Module, str], Mapping[int, Any]]:
    """Return the gradient hooks of parameters, by module and name in it."""
    found = {}
    for owner, name in parameters:
        hooks = getattr(owner._parameters.get(name), "_backward_hooks", None)
        if hooks:
            found[owner, name] = hooks
    return found


def run_when_gathered(unit: nn.Module, hooks: Mapping[tuple[nn.Module, str], Mapping[int, Any]]) -> None:
    """Run hooks of parameters on gathered gradients, from the first forward on.

    Args:
        unit: split together by ``fully_shard``.
        hooks: of its parameters before the split; hooks removed later do not run.
    """
    if not hooks:
        return
    waiting = dict(hooks)

    def attach(*_: Any) -> None:
        handle.remove()
        while waiting:  # once, even if this hook is put back
            (owner, name), of_parameter = waiting.popitem()
            parameter = owner._parameters[name]
            # A parameter that is left whole has them already.
            if parameter is not None and parameter.requires_grad and parameter._backward_hooks is not of_parameter:
                parameter.register_hook(lambda gradient, found=of_parameter: _run(found, gradient))

    handle = unit.register_forward_pre_hook(attach)


def _run(hooks: Mapping[int, Any], gradient: Tensor) -> Tensor:
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
