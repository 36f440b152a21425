"""What the source of a module's methods reads, where its structure alone does not tell enough."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
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
    bases = [
        _read_class(base)
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in _LIBRARIES and base is not object
    ]
    known = [reads for reads in bases if reads is not None]
    return Reads(
        len(known) == len(bases),
        frozenset[str]().union(*(reads.attributes for reads in known)),
        frozenset[str]().union(*(reads.shaping for reads in known)),
        frozenset[str]().union(*(reads.config for reads in known)),
        frozenset[str]().union(*(reads.weights for reads in known)),
    )


def _read_class(kind: type) -> Reads | None:
    """What the methods of ``kind`` itself read; None where there is no source."""
    try:
        file = inspect.getsourcefile(kind)
        if file is None:
            return None
        linecache.lazycache(file, vars(sys.modules[kind.__module__]))  # for a package in an archive
        classes = _classes_of(file)
    except (OSError, TypeError, KeyError, SyntaxError):
        return None
    found = classes.get(kind.__qualname__)
    if not found:
        return None
    # Python 3.13 tells where a class stands; one that is defined twice is taken to be the first before that.
    return found.get(getattr(kind, "__firstlineno__", None), next(iter(found.values())))


@cache
def _classes_of(file: str) -> dict[str, dict[int | None, Reads]]:
    """All classes of a file: qualified name -> line of the definition -> what its methods read.

    A file is parsed once: ``inspect.getsource`` parses it anew for every class, which takes a quarter of a second for
    the larger ones of Hugging Face.
    """
    found: dict[str, dict[int | None, Reads]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = f"{prefix}{child.name}"
                line = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.setdefault(name, {})[line] = _reads_in(child)
                visit(child, f"{name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                visit(child, prefix)

    visit(ast.parse("".join(linecache.getlines(file))), "")
    return found


def _reads_in(definition: ast.ClassDef) -> Reads:
    found = set[str](), set[str](), set[str](), set[str]()
    attributes, shaping, config, weights = found
    for method in _computing(definition):
        own = method.args.args[0].arg if method.args.args else "self"
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute):
                attributes.update(_own(node, own))
                config.update(_config(node))
                weights.update(_weights(node))
            elif isinstance(node, ast.Call | ast.Tuple):
                shaping.update(_shaping(node, own))
    return Reads(True, *(frozenset(names) for names in found))


def _computing(definition: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in definition.body:
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
