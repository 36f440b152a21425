"""Initialization of single submodules of a Hugging Face model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign.hugging_face import is_pretrained_model
from trainwright.strategies.plan.names import within


class MetaInitializer:
    """Copy of a model on the meta device that initializes one submodule at a time.

    Hugging Face calls the model's ``_init_weights(module)`` for every submodule, children first; the call for a parent
    may set tensors of its children (GPT-2 scales residual projections). Here the tensors of one submodule are real
    during its own call and those of its ancestors. Other tensors stay on the meta device and draw no random numbers, so
    values depend only on the initial state of the generator.

    Args:
        name: fully qualified name of the model.
        model: a ``PreTrainedModel``; not modified.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self._name = name
        self._model = _emptied(model, {})

    def holds(self, name: str) -> bool:
        """Return whether the module called ``name`` is the model or lies in it."""
        return within(name, self._name)

    def values(self, name: str, tensors: tuple[str, ...]) -> dict[str, Tensor]:
        """Return initial values of ``tensors``, owned by the module called ``name``, on the CPU.

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
        """Return the submodule and its ancestors, innermost first."""
        parts = path.split(".") if path else []
        return [self._model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]

    def _initialised(
        self, owner: nn.Module, tensors: tuple[str, ...], chain: list[nn.Module], *, resets: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return values, and the names of tensors that were not set."""
        found: dict[str, Tensor] = {}
        missing: set[str] = set()
        # NaN marks floats that were not set. Integers have no NaN: they are unset if two runs from different fill
        # values differ.
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
            # Contiguous, since a buffer expanded from one row cannot be written.
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
    """Return ``_init_weights`` of the innermost Hugging Face model in ``chain``."""
    model = next(module for module in chain if is_pretrained_model(module))
    return cast(Callable[[nn.Module], Any], model._init_weights)


def _emptied(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of ``module`` that shares everything except its tensors, which are on the meta device."""
    if id(module) in done:
        return done[id(module)]
    twin = copy.copy(module)
    done[id(module)] = twin
    # Pipeline stages keep parameters of other stages as plain attributes.
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
    """Set a parameter or buffer, bypassing the checks of ``nn.Module``."""
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        is_parameter = isinstance(value, nn.Parameter)
        gradient = value.is_floating_point()
        owner._parameters[name] = value if is_parameter else nn.Parameter(value, requires_grad=gradient)  # type: ignore[assignment]
