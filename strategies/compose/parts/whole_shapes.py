"""Shapes of whole parameters in ``configure_optimizers``, such as for learning rates by fan-in."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.contract.attributes import with_attributes

_SHAPE: Any = Tensor.shape
_OF_SHAPE = {_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}


class WholeShapes(TorchFunctionMode):
    """Function mode that answers for parameters as if they were whole.

    Args:
        shapes: of the whole, by ``id`` of this rank's part.
    """

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, on an empty whole if it asks for the shape of a part."""
        if func in _OF_SHAPE and id(args[0]) in self._shapes:
            args = (torch.empty(self._shapes[id(args[0])], device="meta"), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def configured_by_whole_shapes(module: nn.Module, shapes: Mapping[int, torch.Size]) -> Iterator[None]:
    """Show whole shapes to the module's ``configure_optimizers`` in a ``with`` block."""
    configure: Any = module.configure_optimizers

    @functools.wraps(configure)
    def run() -> Any:
        with WholeShapes(shapes):
            return configure()

    with with_attributes(module, configure_optimizers=run):
        yield
