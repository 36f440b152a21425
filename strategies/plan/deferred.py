"""Initialization of a model built on the meta device.

Uses each module's ``reset_parameters()``, or ``_init_weights`` within a Hugging Face model.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign.hugging_face import outermost_models
from trainwright.strategies.plan.meta_initializer import MetaInitializer


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
