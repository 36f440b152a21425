"""A Hugging Face model without memory, in which one submodule at a time is initialised as the model would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign.hugging_face import is_pretrained_model
from trainwright.strategies.plan.names import within


class Shell:
    """A copy of a model whose tensors all are on the meta device.

    Hugging Face initialises by ``_init_weights(module)``, a method of the model that is called for every submodule,
    children before parents, and a parent's turn may set tensors of its children (GPT-2 scales its residual
    projections so). Here the tensors of one submodule are real for as long as its turn and those of the modules around
    it take. What those turns write into other tensors is lost, as these are on the meta device: no draw of theirs
    moves the generator, so that values depend on nothing but its state at the start.

    Args:
        name: fully qualified name of the model.
        model: the model, a ``PreTrainedModel``; it is not touched.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self._name = name
        self._model = _emptied(model, {})

    def holds(self, name: str) -> bool:
        """Whether the module called ``name`` is the model or lies in it."""
        return within(name, self._name)

    def values(self, name: str, tensors: tuple[str, ...]) -> dict[str, Tensor]:
        """Initial values of ``tensors``, which the module called ``name`` owns, on the CPU; draws from its generator.

        Raises:
            ValueError: if neither ``_init_weights`` nor ``reset_parameters()`` sets one of them.
        """
        path = name.removeprefix(self._name).removeprefix(".")
        chain = self._chain(path)
        owner = chain[0]
        state = torch.get_rng_state()
        missing: list[str] = []
        for resets in (False, True):
            torch.set_rng_state(state)
            found, missing = self._initialised(owner, tensors, chain, resets=resets)
            if not missing:
                return found
        raise ValueError(
            f"The model was built on the meta device, but {name} ({type(owner).__name__}) cannot be initialised: "
            f"neither {type(self._model).__name__}._init_weights nor a reset_parameters() of the module sets "
            f"{', '.join(missing)}. Set it in one of them, or build the model in __init__ instead of configure_model."
        )

    def _chain(self, path: str) -> list[nn.Module]:
        """The submodule and those around it, from the inside out."""
        parts = path.split(".") if path else []
        return [self._model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]

    def _initialised(
        self, owner: nn.Module, tensors: tuple[str, ...], chain: list[nn.Module], *, resets: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Values, and the names of those that nothing has set."""
        found: dict[str, Tensor] = {}
        missing: set[str] = set()
        # Not-a-number shows what stays as it was. Integers have no such value: what differs after two runs that
        # started from different ones was not set.
        whole_numbers = any(not getattr(owner, name).is_floating_point() for name in tensors)
        state = torch.get_rng_state()
        for start in (0, 1) if whole_numbers else (0,):
            torch.set_rng_state(state)
            values = _run(owner, tensors, chain, start, resets=resets)
            missing |= {n for n, v in values.items() if v.is_floating_point() and bool(v.isnan().any())}
            missing |= {n for n, v in found.items() if not v.is_floating_point() and not torch.equal(v, values[n])}
            found = values
        return found, sorted(missing)


def _run(
    owner: nn.Module, tensors: tuple[str, ...], chain: list[nn.Module], start: int, *, resets: bool
) -> dict[str, Tensor]:
    empty = {name: getattr(owner, name) for name in tensors}
    try:
        for name, meta in empty.items():
            fill = float("nan") if meta.is_floating_point() else start
            # A buffer may be expanded from one row, which nothing could write into.
            _put(owner, name, torch.full(tuple(meta.shape), fill, dtype=meta.dtype, device="cpu"))
        reset = getattr(owner, "reset_parameters", None)
        if resets and callable(reset):
            reset()
        for index, module in enumerate(chain):
            _initialiser(chain[index:])(module)
        return {name: getattr(owner, name).detach() for name in tensors}
    finally:
        for name, meta in empty.items():
            _put(owner, name, meta)


def _initialiser(chain: list[nn.Module]) -> Callable[[nn.Module], Any]:
    """``_init_weights`` of the innermost model that the first module of ``chain`` is or lies in."""
    model = next(module for module in chain if is_pretrained_model(module))
    return cast(Callable[[nn.Module], Any], model._init_weights)


def _emptied(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """A copy of ``module`` that shares everything but its tensors, which are on the meta device."""
    if id(module) in done:
        return done[id(module)]
    twin = copy.copy(module)
    done[id(module)] = twin
    # Parameters that stand as plain attributes (of other stages of a pipeline) are tensors too.
    twin.__dict__ = {key: _empty(value) for key, value in module.__dict__.items()}
    twin._parameters = {name: None if p is None else _empty(p) for name, p in module._parameters.items()}
    twin._buffers = {name: None if b is None else _empty(b) for name, b in module._buffers.items()}
    twin._modules = {name: None if m is None else _emptied(m, done) for name, m in module._modules.items()}
    return twin


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer, past the checks of ``nn.Module``."""
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        is_parameter = isinstance(value, nn.Parameter)
        gradient = value.is_floating_point()
        owner._parameters[name] = value if is_parameter else nn.Parameter(value, requires_grad=gradient)  # type: ignore[assignment]
