"""Positions that a block counts itself, from the length of its input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.context.order import SequenceOrder

_OF_MODULES = frozenset(vars(nn.Module()))


class Positions(TorchFunctionMode):
    """Function mode in which a block that counts the positions of its input gets those of this rank.

    ``torch.arange(held)``, and the first ``held`` rows of a table that the block keeps, are those of the positions that
    this rank holds. Of a table indexed so along two dims, a mask, the block gets all rows and columns. Lines of code
    that count in the first call count in later ones; in others, ``held`` may happen to be another number.

    Args:
        block: on a part of the sequence.
        name: of the block.
        order: of the split.

    Attributes:
        held: number of positions of the block's input.
        is_counting: whether the block has counted positions in its first call.
    """

    def __init__(self, block: nn.Module, name: str, order: SequenceOrder) -> None:
        super().__init__()
        self._block, self._name, self._order = block, name, order
        self.held = 0
        self.is_counting = False
        self._is_active = self._is_first = self._reads_tables = False
        self._lines: set[tuple[str, int]] = set()
        self._tables: dict[int, str] = {}
        self._kept: dict[tuple[str, str], tuple[int, int]] = {}

    def watched(self) -> Self:
        """Return the mode for the first call of the block, to be followed by :meth:`check`."""
        self._kept, self._is_first = self._state(), True
        return self

    def counted(self) -> AbstractContextManager[Any]:
        """Return the mode for a later call; off if the block counts nothing."""
        return self if self.is_counting and not self._is_active else nullcontext()

    def __enter__(self) -> Self:
        """Enter the mode."""
        if self._is_first or self._reads_tables:  # FSDP and casts exchange them
            self._tables = {id(value): name for name, value in self._tensors()}
        self._is_active = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        super().__exit__(*error)
        self._is_active = False
        self._tables = {}

    def check(self) -> None:
        """Refuse a block that keeps what it has computed from the positions of one pass, after its first call.

        Raises:
            RuntimeError: if it does, or is compiled.
        """
        self._is_first = False
        if not self.is_counting:
            return
        after = self._state()
        kept = next((name for name, value in after.items() if self._kept.get(name) != value), None)
        if kept is not None or self._block._compiled_call_impl is not None:
            where = (
                "is compiled" if kept is None else f"keeps what it computes from them ({'.'.join(filter(None, kept))})"
            )
            raise RuntimeError(
                f"Block {self._name} counts positions itself and {where}, so they could be those of another pass. "
                "Compute them before the blocks and pass them in, or use context=1."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace positions counted from 0 by those of this rank."""
        kwargs = kwargs or {}
        end = _end_of(args, kwargs) if func is torch.arange and "out" not in kwargs else None
        if end == self.held and self._counts():
            others = {key: value for key, value in kwargs.items() if key not in ("start", "end", "step")}
            return self._order.part(func(0, end * self._order.size, **others), 0)
        if func is Tensor.__getitem__ and id(args[0]) in self._tables:
            return self._rows(args[0], args[1])
        return func(*args, **kwargs)

    def _counts(self) -> bool:
        """Return whether the calling line of user code counts positions."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        line = frame.f_code.co_filename, frame.f_lineno
        if self._is_first:
            self.is_counting = True
            self._lines.add(line)
        return line in self._lines

    def _rows(self, table: Tensor, index: Any) -> Tensor:
        entries = list(index) if isinstance(index, tuple) else [index]
        for at, entry in enumerate(entries):
            if entry is Ellipsis:
                entries[at : at + 1] = [slice(None)] * (table.ndim - len(entries) + 1)
                break
        total = self.held * self._order.size
        counted = [at for at, entry in enumerate(entries) if self._is_beginning(entry) and table.size(at) > self.held]
        if not counted or not all(isinstance(entry, slice | int) for entry in entries) or not self._counts():
            return table[index]
        self._reads_tables = True
        if any(table.size(at) < total for at in counted):
            raise RuntimeError(
                f"Block {self._name} reads the first {self.held} of {table.size(counted[0])} rows of "
                f"{self._tables[id(table)]}, which has none for {total} positions, of which this rank holds "
                f"{self.held}. Give it more rows, or use context=1."
            )
        for at in counted:
            entries[at] = slice(total)
        rows = table[tuple(entries)]
        if len(counted) > 1:
            return rows
        return self._order.part(rows, sum(isinstance(entry, slice) for entry in entries[: counted[0]]))

    def _is_beginning(self, entry: Any) -> bool:
        return (
            isinstance(entry, slice)
            and entry.start in (None, 0)
            and entry.step in (None, 1)
            and isinstance(entry.stop, int)
            and entry.stop == self.held
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._block.named_parameters()
        yield from self._block.named_buffers()
        for name, sub in self._block.named_modules():
            yield from ((f"{name}.{key}", value) for key, value in vars(sub).items() if isinstance(value, Tensor))

    def _state(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the identity and length of each tensor and container that the block keeps in attributes."""
        return {
            (name, key): (id(value), 0 if isinstance(value, Tensor) else len(value))
            for name, sub in self._block.named_modules()
            for key, value in (*vars(sub).items(), *sub._buffers.items())
            if isinstance(value, Tensor | list | dict | set) and key not in _OF_MODULES
        }


def _end_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the end of a range from 0 with step 1; ``None`` for other ranges."""
    bounds = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    if len(bounds) == 1:
        return bounds[0]
    return bounds[1] if bounds[0] == 0 and bounds[2:] in ([], [1]) else None
