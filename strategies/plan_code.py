"""What the source of a module's methods reads, where its structure alone does not tell enough."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

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


@cache
def reads_of(kind: type[nn.Module]) -> Reads:
    """What the methods of ``kind`` and of its bases outside of libraries read while it computes."""
    known, found = True, [set[str](), set[str](), set[str](), set[str]()]
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES or base is object:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            known = False
            continue
        for node in _computing(tree):
            for names, new in zip(found, (_own(node), _shaping(node), _config(node), _weights(node)), strict=True):
                names.update(new)
    return Reads(known, *(frozenset(names) for names in found))


def _computing(tree: ast.Module) -> Iterator[ast.AST]:
    for statement in [s for definition in tree.body if isinstance(definition, ast.ClassDef) for s in definition.body]:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if statement.name not in _BUILDING and not statement.name.startswith(_BUILDING_PREFIXES):
            yield from ast.walk(statement)


def _own(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield node.attr


def _shaping(node: ast.AST) -> Iterator[str]:
    """Attributes of ``self`` in the arguments of a call that shapes a tensor, or in a tuple (which may be a shape)."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
        parts = node.args
    elif isinstance(node, ast.Tuple):
        parts = node.elts
    for part in parts:
        for inner in ast.walk(part):
            yield from _own(inner)


def _config(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "config":
        yield node.attr


def _weights(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
        yield node.value.attr
