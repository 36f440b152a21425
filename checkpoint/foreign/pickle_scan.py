"""Bounds on pickles that torch's safe reader lacks.

``torch.load(weights_only=True)`` runs no code of a file, but a few bytes of nested pairs with shared halves, or a set
of the items of a huge tensor, keep it busy forever. This module simulates the opcodes of a pickle and measures each
value.
"""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from typing import Any, BinaryIO

from trainwright.core.text.bounded import DEPTH, MOST_VALUES, ContentError

# Most values that all opcodes of one pickle consume together, counted per reference.
_MOST_TAKEN = 10 * MOST_VALUES
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS"}
_CALLS = {"REDUCE", "NEWOBJ", "BINPERSID"}
_NEWEST = 2  # the protocol that torch writes, and the newest that its safe reader supports
_MADE = object()
# Calls that iterate over their argument, or copy its bytes.
_PLAIN_CALLS = {"OrderedDict", "Counter", "set", "complex", "Size", "bytearray", "encode"}
_TEXT_CALLS = {"bytearray", "encode"}
_CODECS = {"latin1", "latin-1", "utf-8", "ascii"}


class NewerPickleError(ValueError):
    """A pickle protocol that torch's safe reader does not support."""


class _Value:
    """Measures of a value.

    Attributes:
        count: values that it unfolds to.
        depth: nesting of containers.
        made: containers around the outermost object in it that a call creates.
        plain: the value, if it is, or is a tuple of, numbers, texts or names.
        held: whether it is in another value, whose measures would not change with its own.
    """

    __slots__ = ("count", "depth", "held", "made", "plain")

    def __init__(self, plain: Any, parts: Sequence[_Value] = ()) -> None:
        self.plain = plain
        self.held = False
        self.count, self.depth, self.made = 1, 0, DEPTH
        self.take(parts)

    def take(self, parts: Sequence[_Value]) -> None:
        """Add ``parts`` to it."""
        for part in parts:
            part.held = True
            self.count += part.count
            self.depth = max(self.depth, part.depth + 1)
            self.made = min(self.made, part.made + 1)
        if self.count > MOST_VALUES or self.depth > DEPTH:
            raise ContentError(f"its values nest {self.depth} levels deep, or unfold to {self.count} values")


def check_pickle(file: BinaryIO) -> None:
    """Raise for a pickle that would keep torch's safe reader, or a reader of its values, busy without bound.

    Takes linear time. Opcodes that torch's safe reader refuses need not be handled.

    Args:
        file: at the beginning of the pickle; left after it.

    Raises:
        NewerPickleError: if it has opcodes of protocol 3 or newer.
        ContentError: if a value contains itself, nests deeper than :data:`~trainwright.core.text.bounded.DEPTH`,
            unfolds to more than :data:`~trainwright.core.text.bounded.MOST_VALUES`, or is made by iterating over a
            tensor.
        Exception: of other types if it is malformed.
    """
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[Any, _Value] = {}
    taken = 0
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.proto > _NEWEST:
            raise NewerPickleError(opcode.name)
        if opcode.name in _PUTS:
            memo[argument] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo[argument])
        elif opcode.name == "MARK":
            marks.append(len(stack))
        else:
            parts = _popped(stack, marks, opcode.stack_before)
            taken += sum(part.count for part in parts)
            if taken > _MOST_TAKEN:
                raise ContentError(f"its opcodes take more than {_MOST_TAKEN} values")
            if opcode.stack_after:
                stack.append(_result(opcode.name, argument, parts))


def _popped(stack: list[_Value], marks: list[int], before: Sequence[Any]) -> list[_Value]:
    """Pop the operands of an opcode from the stack."""
    marked = pickletools.markobject in before
    start = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
    values = stack[start:]
    del stack[start:]
    return values


def _result(name: str, argument: Any, parts: Sequence[_Value]) -> _Value:
    """Return the result of an opcode."""
    if name == "BUILD":
        return parts[0]
    if name in _FILLS:
        target, *values = parts
        target.take(values)
        if target.held:
            raise ContentError("a value contains itself")
        return target
    if name in _CALLS:
        if name == "REDUCE":
            _check_call(*parts)
        if parts[0].plain == "_codecs encode":
            return _Value(b"", parts)
        made = _Value(_MADE, parts)
        made.made = 0
        return made
    return _Value(tuple(part.plain for part in parts) if parts or name == "EMPTY_TUPLE" else argument, parts)


def _check_call(function: _Value, arguments: _Value) -> None:
    module, _, name = str(function.plain).rpartition(" ")
    if name == "_rebuild_from_type_v2" and not str(arguments.plain[0]).startswith("torch._utils "):
        raise ContentError(f"a tensor made by {arguments.plain[0]}")
    if module.startswith("torch.") or name not in _PLAIN_CALLS:
        return
    # It would iterate over a tensor, as its argument or as a pair of key and value.
    if arguments.made <= (2 if name == "OrderedDict" else 1):
        raise ContentError(f"a {name} of the items of another object")
    if name in _TEXT_CALLS:
        text, *codec = arguments.plain or ("",)
        if not isinstance(text, str | bytes) or codec and codec[0] not in _CODECS:
            raise ContentError(f"a call of {name} with {len(arguments.plain)} arguments that are not text")
