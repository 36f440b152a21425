"""Initialization of a model built on the meta device.

Uses each module's ``reset_parameters()``, or ``_init_weights`` within a Hugging Face model.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign.hugging_face import is_pretrained_model, outermost_models
from trainwright.strategies.plan.names import within


def is_deferred(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``module`` is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True)
class Piece:
    """A submodule whose meta tensors are initialized together.

    Args:
        name: fully qualified name of the submodule.
        module: the submodule.
        meta: names of its meta tensors, relative to it, in order.
        initializer: of the Hugging Face model around it; ``None``: it has ``reset_parameters()``.
    """

    name: str
    module: nn.Module
    meta: tuple[str, ...]
    initializer: MetaInitializer | None = None

    def overlaps(self, name: str) -> bool:
        """Return whether this piece contains the module called ``name`` or lies within it."""
        return self.name == name or self.name.startswith(f"{name}.") or name.startswith(f"{self.name}.")

    def values(self, seed: int) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield full initial values on the CPU as ``(owner, name of the tensor in its owner, value)``.

        They depend only on ``seed`` and the name of the piece, not on the world size or other pieces.
        """
        key = f"{seed}/{self.name}"
        if self.initializer is not None:
            with _seeded(key):
                values = self.initializer.values(self.name, self.meta)
            yield from ((self.module, name, value) for name, value in values.items())
            return
        twin = _materialised(self.module, key)
        for path in self.meta:
            owner, _, name = path.rpartition(".")
            yield self.module.get_submodule(owner), name, getattr(twin.get_submodule(owner), name).detach()


def deferred_pieces(module: nn.Module) -> list[Piece]:
    """Return the pieces in which the meta tensors of ``module`` are initialized.

    A piece is a submodule that owns meta tensors directly; only one is fully in memory at a time. A piece with children
    but no list of blocks (such as ``nn.MultiheadAttention``) includes its children, whose values its reset may set;
    except within a Hugging Face model.

    Raises:
        ValueError: if a submodule that owns meta tensors has no ``reset_parameters()`` and is in no Hugging Face model.
    """
    pieces: list[Piece] = []
    whole: list[str] = []
    initializers = [MetaInitializer(name, model) for name, model in outermost_models(module)]
    for name, sub in module.named_modules():
        own = tuple(n for n, tensor in _own_tensors(sub) if tensor.is_meta)
        if not own or any(name.startswith(f"{outer}.") for outer in whole):
            continue
        initializer = next((each for each in initializers if each.holds(name)), None)
        if initializer is None and _takes_children(sub):
            whole.append(name)
            named = (*sub.named_parameters(remove_duplicate=False), *sub.named_buffers(remove_duplicate=False))
            own = tuple(n for n, tensor in named if tensor.is_meta)
        pieces.append(Piece(name, sub, own, initializer))
    missing = [
        f"{piece.name} ({type(piece.module).__name__})"
        for piece in pieces
        if piece.initializer is None and _reset_of(piece.module) is None
    ]
    if missing:
        raise ValueError(
            f"The model was built on the meta device, but {', '.join(missing)} cannot be initialised: "
            "define reset_parameters() on each module that owns parameters or buffers, "
            "or build the model in __init__ instead of configure_model."
        )
    return pieces


def _takes_children(module: nn.Module) -> bool:
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    return next(module.children(), None) is not None and not any(isinstance(sub, lists) for sub in module.modules())


def _materialised(piece: nn.Module, key: str) -> nn.Module:
    twin = copy.deepcopy(piece) if _takes_children(piece) else _childless(piece)
    twin.to_empty(device="cpu")
    with _seeded(key):
        for sub in reversed(list(twin.modules())):  # children first: an outer reset may override theirs
            reset = _reset_of(sub)
            if reset is not None:
                reset()
    return twin


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        yield


def _childless(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {}
    twin._parameters = {
        name: None if param is None else nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        for name, param in module._parameters.items()
    }
    twin._buffers = dict(module._buffers)
    return twin


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else getattr(module, "_reset_parameters", None)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def fill(
    pieces: Iterable[Piece],
    seed: int,
    real: dict[Tensor, Tensor],
    make: Callable[[nn.Module, str, Tensor, Tensor], Tensor],
) -> None:
    """Replace the meta tensors of ``pieces`` by real ones.

    Args:
        pieces: of the module.
        seed: of initial values, the same on all ranks.
        real: meta tensor -> its replacement, to preserve ties.
        make: returns the real tensor for a module, a name, the meta tensor and its initial value.
    """
    for piece in pieces:
        for owner, name, value in piece.values(seed):
            meta = getattr(owner, name)
            if meta not in real:
                real[meta] = make(owner, name, meta, value)
            holder = owner._parameters if name in owner._parameters else owner._buffers
            holder[name] = real[meta]  # type: ignore[assignment]


# ---- single submodules of a Hugging Face model ----------------------------------------------------------------------


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
        chain = self._chain(name.removeprefix(self._name).removeprefix("."))
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
