"""Replacements of modules' parameter dicts and optimizers' states while whole parameters are shown."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trainwright.strategies.base.whole.parts import Share
from trainwright.strategies.base.whole.tensors import WholeTensor


class _Table(dict[str, Any]):
    """The ``_parameters`` of a module while stand-ins are shown; refuses other parameters."""

    def __init__(self, items: Mapping[str, Any], refuse: Callable[[str, str], None]) -> None:
        super().__init__(items)
        self._refuse = refuse
        self.real: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if value is None and key not in self or self.get(key) is value:
            super().__setitem__(key, value)
            return
        shown = self.get(key)
        if isinstance(shown, WholeTensor) and isinstance(value, nn.Parameter) and value is shown.whole():
            return  # as in module.weight *= 0.9
        self._refuse(key, "a module gets another parameter (pruning, weight_norm, or assigning an nn.Parameter)")

    def __delitem__(self, key: str) -> None:
        self._refuse(key, "a parameter is removed from its module (pruning or weight_norm)")

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        """Copy the parameters alone, which refuse it by name."""
        return copy.deepcopy(dict(self), memo)

    def pop(self, key: str, *default: Any) -> Any:
        """Refuse to remove a parameter."""
        if key in self:
            del self[key]
        return super().pop(key, *default)


class UnreadableState(dict[Any, Any]):
    """Placeholder for an optimizer's state, which is not on this rank.

    Args:
        problem: the sentence that opens the error.
        remedy: what else the error advises.
    """

    def __init__(self, problem: str, remedy: str = ", clear it,") -> None:
        super().__init__()
        self._problem, self._remedy = problem, remedy
        self.is_cleared = False

    def give_back(self, state: Any, shown: Any) -> None:
        """Clear the real ``state`` if user code has cleared or replaced what it was shown.

        Raises:
            RuntimeError: if it has assigned another state.
        """
        if shown is not self and shown:
            self._refuse()
        if shown is not self or self.is_cleared:
            state.clear()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{self._problem} Read it from a checkpoint (trainer.save_checkpoint){self._remedy} or use strategy=ddp."
        )

    def clear(self) -> None:
        """Record that user code resets the state."""
        self.is_cleared = True

    def __bool__(self) -> bool:
        """Return ``True``, since nothing else is known."""
        return True

    __getitem__ = __iter__ = __len__ = items = keys = values = get = __contains__ = _refuse
    __setitem__ = __delitem__ = pop = popitem = update = setdefault = _refuse


def whole_tables(
    module: nn.Module, shares: Mapping[str, Share], stand_ins: Mapping[str, WholeTensor]
) -> list[tuple[nn.Module, _Table, dict[str, Any]]]:
    """Return each module with split parameters, its replacement table, and the names of placeholders in it."""
    shown: dict[nn.Module, dict[str, WholeTensor]] = {}
    name_in: dict[tuple[int, str], str] = {}
    for name, share in shares.items():
        for owner, key in share.slots:
            shown.setdefault(owner, {})[key] = stand_ins[name]
            name_in[id(owner), key] = name
    tables = []
    for owner in module.modules():
        if owner not in shown:
            continue
        held = owner._parameters
        # The module's own order, with placeholders where the unmodified module has the parameters.
        ghosts = dict.fromkeys(key for key in shown[owner] if key not in held)
        order = {**shown[owner], **held} if ghosts else held
        items = {key: shown[owner].get(key, held.get(key)) for key in order}

        def refuse(key: str, what: str, owner: nn.Module = owner) -> None:
            name = name_in.get((id(owner), key), key)
            next(iter(stand_ins.values())).wholes.refuse(name, what)

        tables.append((owner, _Table(items, refuse), ghosts))
    return tables
