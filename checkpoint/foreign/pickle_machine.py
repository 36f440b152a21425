"""Pickles as data: an interpreter of their opcodes that looks up no name, calls no function of theirs and sets no
attribute.

Python's own unpickler imports what a pickle names and calls it. This one keeps the name: a call becomes an
:class:`Inert` that remembers its arguments, unless the name stands in a table of makers, functions of this package that
build plain values.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn


class UnreadablePickleError(ValueError):
    """A pickle that ends early, is not well formed, or asks for what no plain value needs."""


class Inert:
    """What a pickle names, or would have made by calling it; nothing of it was looked up or called.

    Attributes:
        name: module and name, such as ``deepspeed.runtime.zero.config.ZeroStageEnum``.
        args: positional arguments of the call, ``None`` for the mere name.
        kwargs: keyword arguments of the call.
        state: what the object would have been given as state, ``None`` if nothing.
        items: what would have been appended or added to it.
        entries: what would have been set by key.
    """

    __slots__ = ("args", "entries", "items", "kwargs", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs or {}
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>" if self.args is None else f"<object of {self.name}, not loaded>"


Maker = Callable[..., Any]
Builder = Callable[[Any, Any], Any]


class PickleMachine:
    """Reads one pickle.

    Args:
        constants: values that stand for a name.
        makers: called with the arguments of a call, by the name that is called.
        builders: by type, called with a value and its state; what they return takes the value's place.
        persistent: called with a persistent id; ``None``: a pickle with one is refused.
    """

    def __init__(
        self,
        constants: Mapping[str, Any],
        makers: Mapping[str, Maker],
        builders: Mapping[type, Builder],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self._constants = constants
        self._makers = makers
        self._builders = builders
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.names: set[str] = set()

    def load(self, file: BinaryIO) -> Any:
        """The value of the pickle at the position of ``file``, which is left after it.

        Raises:
            UnreadablePickleError: if it is not well formed.
        """
        try:
            for opcode, argument, _ in pickletools.genops(file):
                _STEPS.get(opcode.name, _refuse)(self, opcode.name, argument)
            (value,) = self._stack
        except UnreadablePickleError:
            raise
        except Exception as error:  # whatever a malformed pickle makes the makers raise
            raise UnreadablePickleError(f"not a well-formed pickle ({type(error).__name__}: {error})") from error
        return value

    # ---- names and calls ---------------------------------------------------------------------------------------------

    def _name(self, module: Any, name: Any) -> Any:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise UnreadablePickleError("a name that is no text")
        full = f"{_RENAMED.get(module, module)}.{name}"
        self.names.add(full)
        return self._constants[full] if full in self._constants else Inert(full)

    def _call(self, callee: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        if not (isinstance(callee, Inert) and isinstance(args, tuple)):
            raise UnreadablePickleError(f"a call of {type(callee).__name__}")
        if callee.args is not None:
            return Inert(f"{callee.name}()", args, kwargs)
        if callee.name in FORWARDING:
            return self._forward(callee.name, args)
        maker = self._makers.get(callee.name)
        return Inert(callee.name, args, kwargs) if maker is None or kwargs else maker(*args)

    def _forward(self, name: str, args: tuple[Any, ...]) -> Any:
        """The functions of ``copyreg`` and torch that only call what they are given."""
        if name == "torch._tensor._rebuild_from_type_v2":
            function, kind, its_args, _ = args
            value = self._call(function, its_args)
            plain = isinstance(kind, Inert) and kind.name in PLAIN_TENSORS
            return value if plain else Inert(getattr(kind, "name", "?"), args)
        if name == "copyreg._reconstructor":
            cls, base, state = args
            return self._call(cls, () if isinstance(base, Inert) and base.name == "builtins.object" else (state,))
        return self._call(args[0], tuple(args[1:]))

    def _build(self) -> None:
        state = self._stack.pop()
        value = self._stack[-1]
        if isinstance(value, Inert):
            value.state = state
            return
        builder = self._builders.get(type(value))
        if builder is None:
            raise UnreadablePickleError(f"a state for a {type(value).__name__}")
        built = builder(value, state)
        if built is not value:
            self._stack[-1] = built
            for index in [index for index, kept in self._memo.items() if kept is value]:
                self._memo[index] = built

    # ---- the stack ---------------------------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _pop(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise UnreadablePickleError("an empty stack")
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def _pop_one(self) -> None:
        # POP ends a mark that has nothing above it.
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _keep(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    # ---- containers --------------------------------------------------------------------------------------------------

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(values)
        elif isinstance(target, Inert):
            target.items.extend(values)
        else:
            raise UnreadablePickleError(f"items for a {type(target).__name__}")

    def _add(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is set:
            target.update(plain_keys(values))
        else:
            self._extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Inert) else target
        if type(entries) not in (dict, OrderedDict):
            raise UnreadablePickleError(f"entries for a {type(target).__name__}")
        entries.update(zip(plain_keys(values[::2]), values[1::2], strict=True))

    def _dict(self) -> None:
        values = self._since_mark()
        self._push({})
        self._set(values)

    def _persist(self, identity: Any) -> None:
        if self._persistent is None:
            raise UnreadablePickleError("a reference out of the pickle")
        self._push(self._persistent(identity))

    def _object(self) -> None:
        cls, *args = self._since_mark()
        self._push(self._call(cls, tuple(args)))

    def _instance(self, pair: str) -> None:
        args = tuple(self._since_mark())
        self._push(self._call(self._name(*pair.rsplit(" ", 1)), args))


# Protocols before 3 write the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
FORWARDING = {"torch._tensor._rebuild_from_type_v2", "copyreg._reconstructor", "copyreg.__newobj__"}
_LARGEST_KEY = 1000
PLAIN_TENSORS = {"torch.Tensor", "torch.nn.parameter.Parameter"}


def plain_keys(values: list[Any]) -> list[Any]:
    """Values that may be keys or members of a set: what is nested could be so deep that hashing it ends the process, or
    share its parts so that hashing it never ends.

    Raises:
        UnreadablePickleError: for any other value.
    """
    for value in values:
        left, count = [value], 0
        while left:
            item = left.pop()
            count += 1
            if type(item) is tuple and count < _LARGEST_KEY:
                left.extend(item)
            elif item is not None and not isinstance(item, str | int | float | bytes | Inert):
                raise UnreadablePickleError(f"a key that is a {type(value).__name__}")
    return values


def _refuse(machine: PickleMachine, name: str, argument: Any) -> NoReturn:
    raise UnreadablePickleError(f"the instruction {name}, which no plain value needs")


Step = Callable[[PickleMachine, str, Any], Any]


def _steps() -> dict[str, Step]:
    """What each instruction does, by the name that :mod:`pickletools` gives it."""
    steps: dict[str, Step] = {}
    for names, step in _GROUPS:
        steps.update(dict.fromkeys(names.split(), step))
    return steps


_GROUPS: list[tuple[str, Step]] = [
    ("PROTO FRAME STOP", lambda m, name, argument: None),
    (
        "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE "
        "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8",
        lambda m, name, argument: m._push(argument),
    ),
    ("NONE", lambda m, name, argument: m._push(None)),
    ("NEWTRUE", lambda m, name, argument: m._push(True)),
    ("NEWFALSE", lambda m, name, argument: m._push(False)),
    ("EMPTY_LIST", lambda m, name, argument: m._push([])),
    ("EMPTY_DICT", lambda m, name, argument: m._push({})),
    ("EMPTY_SET", lambda m, name, argument: m._push(set())),
    ("EMPTY_TUPLE", lambda m, name, argument: m._push(())),
    ("TUPLE1 TUPLE2 TUPLE3", lambda m, name, argument: m._push(tuple(m._pop(int(name[-1]))))),
    ("TUPLE", lambda m, name, argument: m._push(tuple(m._since_mark()))),
    ("LIST", lambda m, name, argument: m._push(m._since_mark())),
    ("DICT", lambda m, name, argument: m._dict()),
    ("FROZENSET", lambda m, name, argument: m._push(frozenset(plain_keys(m._since_mark())))),
    ("MARK", lambda m, name, argument: m._mark()),
    ("POP", lambda m, name, argument: m._pop_one()),
    ("POP_MARK", lambda m, name, argument: m._since_mark()),
    ("DUP", lambda m, name, argument: m._push(m._stack[-1])),
    ("GET BINGET LONG_BINGET", lambda m, name, argument: m._push(m._memo[int(argument)])),
    ("PUT BINPUT LONG_BINPUT", lambda m, name, argument: m._keep(int(argument))),
    ("MEMOIZE", lambda m, name, argument: m._keep(None)),
    ("APPEND", lambda m, name, argument: m._extend(m._pop(1))),
    ("APPENDS", lambda m, name, argument: m._extend(m._since_mark())),
    ("ADDITEMS", lambda m, name, argument: m._add(m._since_mark())),
    ("SETITEM", lambda m, name, argument: m._set(m._pop(2))),
    ("SETITEMS", lambda m, name, argument: m._set(m._since_mark())),
    ("GLOBAL", lambda m, name, argument: m._push(m._name(*argument.rsplit(" ", 1)))),
    ("STACK_GLOBAL", lambda m, name, argument: m._push(m._name(*m._pop(2)))),
    ("REDUCE NEWOBJ", lambda m, name, argument: m._push(m._call(*m._pop(2)))),
    ("NEWOBJ_EX", lambda m, name, argument: m._push(m._call(*m._pop(3)))),
    ("OBJ", lambda m, name, argument: m._object()),
    ("INST", lambda m, name, argument: m._instance(argument)),
    ("BUILD", lambda m, name, argument: m._build()),
    ("PERSID", lambda m, name, argument: m._persist(argument)),
    ("BINPERSID", lambda m, name, argument: m._persist(m._pop(1)[0])),
]
_STEPS = _steps()
