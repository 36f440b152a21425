"""Parameter objects that user code has kept: each stands for the one that the module has in its place now."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree


class KeptParameter(nn.Parameter):
    """A parameter that its module no longer has, as in a list of user code.

    Functions of torch get the module's present one: this rank's part, the whole in a hook, a stand-in.
    """

    kept_place: tuple[Callable[[], nn.Module | None], str]
    is_elsewhere: bool

    def now(self) -> Tensor:
        """Return what the module has in its place.

        Raises:
            RuntimeError: if that is on another pipeline stage, whose ranks need no such collective.
        """
        owner, key = self.kept_place
        found: Tensor = getattr(owner(), key)
        if self.is_elsewhere and (found.is_meta or type(found) is not nn.Parameter):
            raise RuntimeError(
                "A parameter that was kept from before training, as in a list, is used, and another pipeline stage "
                "holds it. Get it from the module where it is used, for example by self.parameters()."
            )
        if found is self:  # the module has it again
            self.__class__ = nn.Parameter  # type: ignore[assignment]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the present one."""
        return copy.deepcopy(self.now(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the present one."""
        return self.now().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with present parameters."""
        args, kwargs = present((args, kwargs or {}))
        return func(*args, **kwargs)


def present(value: Any) -> Any:
    """Return ``value`` with every kept parameter replaced by the module's present one."""
    return pytree.tree_map_only(KeptParameter, KeptParameter.now, value)


def redirect(parameter: Any, owner: nn.Module, key: str, is_elsewhere: bool = False) -> None:
    """Make ``parameter`` stand for what ``owner`` has under ``key``.

    Args:
        parameter: a plain one.
        owner: module, not kept alive.
        key: name in it.
        is_elsewhere: whether another pipeline stage holds the present one.
    """
    parameter.__class__ = KeptParameter
    # A reference from a tensor may be invisible to the garbage collector.
    parameter.kept_place, parameter.is_elsewhere = (weakref.ref(owner), key), is_elsewhere


@contextmanager
def redirected(parameters: Iterable[tuple[Tensor, nn.Module, str]]) -> Iterator[None]:
    """Redirect plain parameters in a ``with`` block in which their module has others.

    Args:
        parameters: each with its module and its name there.
    """
    # Once each: tied ones have several places.
    chosen = {id(each[0]): each for each in parameters if type(each[0]) is nn.Parameter}.values()
    for parameter, owner, key in chosen:
        redirect(parameter, owner, key)
    try:
        yield
    finally:
        for parameter, _, _ in chosen:
            parameter.__class__ = nn.Parameter
            del parameter.kept_place, parameter.is_elsewhere  # type: ignore[attr-defined]
