"""Hyper-parameters of an optimizer's groups as a vector, sent with every push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]


class GroupHyperParameters:
    """Reads and writes options of parameter groups that are numbers or tuples of numbers.

    Schedulers on a worker may change them; the server's optimizer uses those of the push.

    Args:
        groups: at the start of training, when numeric options are detected.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = len(groups)
        self._kinds = [
            (index, key, kind)
            for index, group in enumerate(groups)
            for key, value in sorted(group.items())
            if key != "params" and (kind := _kind(value))
        ]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(len(kind) for _, _, kind in self._kinds)

    def read(self, groups: Groups) -> Tensor:
        """Return the options of ``groups``, float64 ``(size,)``.

        Raises:
            ValueError: if groups or kinds of options changed since the start.
        """
        if len(groups) != self._groups:
            raise ValueError(
                f"The optimizer has {len(groups)} parameter groups, {self._groups} when training began. Servers do not "
                "support new groups: create all in configure_optimizers, including frozen ones (requires_grad=False)."
            )
        values: list[float] = []
        for index, key, kind in self._kinds:
            value = groups[index].get(key)
            if len(_kind(value)) != len(kind):
                raise ValueError(
                    f"Option {key!r} of parameter group {index} is {value!r}, another kind of value than when training "
                    "began. Servers support changes of numbers only."
                )
            values += [float(each) for each in (value if isinstance(value, tuple | list) else (value,))]
        return torch.tensor(values, dtype=torch.float64)

    def write(self, groups: Sequence[dict[str, Any]], vector: Tensor) -> None:
        """Set the options of ``groups`` in place."""
        values = iter(vector.tolist())
        for index, key, kind in self._kinds:
            numbers = [cast(next(values)) for cast in kind]
            old = groups[index].get(key)
            groups[index][key] = type(old)(numbers) if isinstance(old, tuple | list) else numbers[0]


def _kind(value: Any) -> tuple[type, ...]:
    """Return the types of an option's numbers; empty if it is not numeric."""
    if isinstance(value, bool | int | float):
        return (type(value),)
    if isinstance(value, Tensor) and value.dim() == 0:
        return (float,)
    if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
        return tuple(float if isinstance(each, float) else type(each) for each in value)
    return ()


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options without parameters; scalar tensors (such as a learning rate) as numbers."""
    return {
        key: float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
