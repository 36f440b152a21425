"""Base class of the dispatch modes of a trial."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from trainwright.core.torch_internals import TorchDispatchMode


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
        has_compiler = "torch._dynamo" in sys.modules  # nothing is compiled without it, and importing it takes seconds
        stance = torch.compiler.set_stance("force_eager") if has_compiler else nullcontext()
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        super().__exit__(*error)
        self._stances.pop().__exit__(*error)
