"""Bounds on a pickle that torch's safe reader does not have.

``torch.load(weights_only=True)`` runs nothing that a file names, but a few bytes of nested pairs that share halves
keep it busy for ever, and so does a set of the items of a huge tensor. This module goes through the instructions of a
pickle without following any, and measures what each value would be.
"""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from typing import Any, BinaryIO

from trainwright.core.text.bounded import DEPTH, MOST_VALUES, ContentError

# Values that all instructions of one pickle may take together, each counted as often as it is referred to.
_MOST_TAKEN = 10 * MOST_VALUES
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS"}
_CALLS = {"REDUCE", "NEWOBJ", "BINPERSID"}
_NEWEST = 2  # the protocol that torch writes, and the last one whose instructions its safe reader knows
_MADE = object()
# Calls that go through their argument, or take its bytes.
_PLAIN_CALLS = {"OrderedDict", "Counter", "set", "complex", "Size", "bytearray", "encode"}
_TEXT_CALLS = {"bytearray", "encode"}
_CODECS = {"latin1", "latin-1", "utf-8", "ascii"}


class NewerPickleError(ValueError):
    """A pickle of a protocol that torch's safe reader does not know."""


class _Value:
    """Measures of a value.

    Attributes:
        count: values that it unfolds to.
        depth: containers within each other.
        made: containers around the outermost object in it that a call makes.
        plain: the value, where it is a tuple of, or is itself, a number, text or name.
        held: whether it lies in another value, whose measures would not change with its own.
    """

    __slots__ = ("count", "depth", "held", "made", "plain")

    def __init__(self, plain: Any, parts: Sequence[_Value] = ()) -> None:
        self.plain = plain
        self.held = False
        self.count, self.depth, self.made = 1, 0, DEPTH
        self.take(parts)

    def take(self, parts: Sequence[_Value]) -> None:
        """Put ``parts`` into it."""
        for part in parts:
            part.held = True
            self.count += part.count
            self.depth = max(self.depth, part.depth + 1)
            self.made = min(self.made, part.made + 1)
        if self.count > MOST_VALUES or self.depth > DEPTH:
            raise ContentError(f"its values nest {self.depth} levels deep, or stand for {self.count} values")


def check_pickle(file: BinaryIO) -> None:
    """Refuse a pickle that would keep torch's safe reader, or a reader of its values, busy without bound.

    Takes time in proportion to the length of the pickle. What it says of instructions that torch's safe reader refuses
    does not matter.

    Args:
        file: at the beginning of the pickle; left after it.

    Raises:
        NewerPickleError: if it has instructions of protocol 3 or newer.
        ContentError: if a value contains itself, nests deeper than
            :data:`~trainwright.core.text.bounded.DEPTH`, unfolds to more than
            :data:`~trainwright.core.text.bounded.MOST_VALUES`, or is made by iterating over a tensor.
        Exception: of other kinds if it is not well formed.
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
                raise ContentError(f"its instructions take more than {_MOST_TAKEN} values")
            if opcode.stack_after:
                stack.append(_result(opcode.name, argument, parts))


def _popped(stack: list[_Value], marks: list[int], before: Sequence[Any]) -> list[_Value]:
    """Values that an instruction takes from the stack."""
    marked = pickletools.markobject in before
    start = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
    values = stack[start:]
    del stack[start:]
    return values


def _result(name: str, argument: Any, parts: Sequence[_Value]) -> _Value:
    """What an instruction leaves on the stack."""
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
    # It would go through a tensor, as its argument or as a pair of key and value.
    if arguments.made <= (2 if name == "OrderedDict" else 1):
        raise ContentError(f"a {name} of the items of another object")
    if name in _TEXT_CALLS:
        text, *codec = arguments.plain or ("",)
        if not isinstance(text, str | bytes) or codec and codec[0] not in _CODECS:
            raise ContentError(f"a call of {name} with {len(arguments.plain)} arguments that are no text")
