"""What the source of a module's methods reads, where its structure alone does not tell enough."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import nn

# Methods that run while a module is built, not while it computes.
_BUILDING = ("__init__", "extra_repr", "reset_parameters", "configure_model", "setup")
_BUILDING_PREFIXES = ("_init", "init_", "_reset", "tie_", "_tie", "set_", "get_", "resize_", "_resize")
_SHAPING = ("view", "reshape", "split", "split_with_sizes", "unflatten", "expand", "new_zeros", "new_empty")
_LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")


@dataclass(frozen=True)
class Reads:
    """What the methods of a class read.

    Args:
        known: whether the source could be read at all.
        attributes: names of attributes of ``self``.
        shaping: those among them that are part of a shape or of the arguments of ``view``, ``split`` and the like.
        config: names of attributes of ``self.config``.
        weights: names of attributes of whatever object whose ``.weight`` is read.
    """

    known: bool
    attributes: frozenset[str] = frozenset()
    shaping: frozenset[str] = frozenset()
    config: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()


def reads_of(kind: type[nn.Module]) -> Reads:
    """What the methods of ``kind`` and of its bases outside of libraries read while it computes."""
    return _read(cast(Hashable, kind))


@cache
def _read(kind: Any) -> Reads:
    known, found = True, [set[str](), set[str](), set[str](), set[str]()]
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES or base is object:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            known = False
            continue
        for method in _computing(tree):
            own = method.args.args[0].arg if method.args.args else "self"
            for node in ast.walk(method):
                read = (_own(node, own), _shaping(node, own), _config(node), _weights(node))
                for names, new in zip(found, read, strict=True):
                    names.update(new)
    return Reads(known, *(frozenset(names) for names in found))


def _computing(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in [s for definition in tree.body if isinstance(definition, ast.ClassDef) for s in definition.body]:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if statement.name not in _BUILDING and not statement.name.startswith(_BUILDING_PREFIXES):
            yield statement


def _own(node: ast.AST, own: str) -> Iterator[str]:
    """The attribute of the object itself, which the method calls ``own``, that ``node`` is."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
        yield node.attr


def _shaping(node: ast.AST, own: str) -> Iterator[str]:
    """Own attributes in the arguments of a call that shapes a tensor, or in a tuple (which may be a shape)."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
        parts = node.args
    elif isinstance(node, ast.Tuple):
        parts = node.elts
    for part in parts:
        for inner in ast.walk(part):
            yield from _own(inner, own)


def _config(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "config":
        yield node.attr


def _weights(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
        yield node.value.attr
