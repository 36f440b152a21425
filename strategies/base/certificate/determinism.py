"""Random numbers that do not depend on how a batch or a computation is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from trainwright.core.torch_internals import TorchDispatchMode
from trainwright.strategies.contract.randomness.state import (
    draw_counts,
    kept_random_state,
    restore_draw_counts,
    seed_all,
)
from trainwright.strategies.plan.blocks import uncompiled

_SEED = 20_260_101
_IDENTITY = {torch.ops.aten.native_dropout, torch.ops.aten._fused_dropout}
# Names of dropout arguments of fused operators.
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")


class EagerMode(TorchDispatchMode):
    """Base class of dispatch modes, in which compiled modules run as written.

    Dynamo does not compile under a dispatch mode, and remembers that for the code it met: without this, one such pass
    would leave the module uncompiled to the end of the run.
    """

    _stance: AbstractContextManager[Any]

    def __enter__(self) -> Self:
        """Enter the mode."""
        self._stance = uncompiled()
        self._stance.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        super().__exit__(*error)
        self._stance.__exit__(*error)


class Deterministic(EagerMode):
    """Dispatch mode that disables dropout and draws the same random numbers for every sample.

    A pipeline draws per micro-batch, and ranks that split activations draw their own masks, so compared runs cannot use
    regular random numbers. Here a Bernoulli draw returns its probability, which makes dropout the identity. Any other
    draw is made for one sample and repeated along dim 0, with a seed from the operator, the shape of a sample and the
    number of earlier such draws.
    """

    def __enter__(self) -> Self:
        """Enter the mode, without earlier draws."""
        draw_counts.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run ``func``, or its replacement if it draws random numbers."""
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if func.overloadpacket in _IDENTITY:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("bernoulli"):
            return _probability(func, args, kwargs)
        if any(argument.name in _DROPOUT_ARGUMENTS for argument in func._schema.arguments):
            args, kwargs = _without_dropout(func, args, kwargs)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn_once(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _drawn_once(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if "generator" in kwargs:  # a user's generator would advance
            kwargs["generator"] = None
        target = args[0] if args else None
        if isinstance(target, Tensor) and name.endswith("_"):
            with self._seeded(name, target.shape[1:]):
                if not target.dim() or not target.numel():
                    return func(*args, **kwargs)
                row = func(torch.empty_like(target[:1]).copy_(target[:1]), *args[1:], **kwargs)
            target.copy_(row.expand_as(target))
            return target
        place = next((i for i, each in enumerate(func._schema.arguments[: len(args)]) if each.name == "size"), None)
        if place is not None:
            size = tuple(args[place])
            if size and size[0] > 0:
                with self._seeded(name, size[1:]):
                    one = func(*args[:place], [1, *size[1:]], *args[place + 1 :], **kwargs)
                return one.repeat(size[0], *[1] * (len(size) - 1))
        if isinstance(target, Tensor) and name.endswith("_like") and target.dim() and target.numel():
            with self._seeded(name, target.shape[1:]):
                row = func(target[:1], *args[1:], **kwargs)
            return row.repeat(target.shape[0], *[1] * (target.dim() - 1))
        with self._seeded(name, ()):
            return func(*args, **kwargs)

    def drawn(self) -> Counter[tuple[str, tuple[int, ...]]]:
        """Return the counts of draws so far."""
        return draw_counts.copy()

    @contextmanager
    def replaying_from(self, drawn: Counter[tuple[str, tuple[int, ...]]]) -> Iterator[None]:
        """Continue after ``drawn``, so that recomputation in backward repeats the draws of forward."""
        later = draw_counts.copy()
        restore_draw_counts(drawn)
        try:
            yield
        finally:
            restore_draw_counts(draw_counts | later)

    @contextmanager
    def _seeded(self, name: str, shape: tuple[int, ...]) -> Iterator[None]:
        key = (name.removesuffix("_like"), tuple(shape))
        count = draw_counts[key]
        draw_counts[key] += 1
        torch.manual_seed((_SEED + 1_000_003 * count + hash(key[1]) + sum(map(ord, key[0]))) % 2**62)
        yield


def _probability(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the mean of a Bernoulli draw."""
    target: Tensor = args[0]
    given = next((v for v in (*args[1:], kwargs.get("p")) if isinstance(v, float | int | Tensor)), None)
    if func._schema.name.endswith("_"):
        if isinstance(given, Tensor):
            target.copy_(given)
        else:
            target.fill_(0.5 if given is None else given)
        return target
    return target.clone() if given is None else torch.full_like(target, float(given))


def _without_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a fused operator (attention, a recurrent layer) with dropout 0."""
    args = list(args)
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _DROPOUT_ARGUMENTS and isinstance(argument.default_value, float | type(None)):
            if place < len(args) and isinstance(args[place], float):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    return tuple(args), kwargs


@contextmanager
def fixed_seed(device: torch.device) -> Iterator[None]:
    """Seed the generators of torch, Python and NumPy, and restore them afterwards."""
    with kept_random_state(device):
        seed_all(_SEED)
        yield
