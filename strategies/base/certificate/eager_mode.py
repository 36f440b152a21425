"""Base class of the dispatch modes of a trial."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

from trainwright.core.torch_internals import TorchDispatchMode
from trainwright.strategies.plan.blocks import uncompiled


class EagerMode(TorchDispatchMode):
    """Base class of dispatch modes, in which compiled modules run as written.

    Dynamo does not compile under a dispatch mode, and remembers that for the code it met: without this, one such pass
    would leave the module uncompiled to the end of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stances: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        """Enter the mode."""
        stance = uncompiled()
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        super().__exit__(*error)
        self._stances.pop().__exit__(*error)
