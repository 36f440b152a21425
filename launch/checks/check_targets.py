"""Checks of classes that the configuration names, by their source: hooks that a verb calls, and arguments."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import Definition, resolution_order, targets_in, top_level_nodes
from trainwright.core.problems import did_you_mean

# Verb -> what it calls of the module, and of the data module, or of a module that has its own data.
_CALLED = {
    "fit": (("training_step", "configure_optimizers"), "train_dataloader"),
    "validate": (("validation_step",), "val_dataloader"),
    "test": (("test_step",), "test_dataloader"),
    "predict": ((), "predict_dataloader"),
}
# Lightning's classes define every hook: without effect, or raising an error.
_STUBS = ("lightning.pytorch.core.", "pytorch_lightning.core.")


def hook_problems(cfg: DictConfig, verb: str) -> Iterator[str]:
    """Yield the hooks that a verb needs and neither module nor data module defines."""
    steps, loader = _CALLED[verb]
    module = str(cfg.module.get("_target_"))
    owners = {key: str(cfg[key]["_target_"]) for key in ("data", "module") if "_target_" in cfg[key]}
    for step in steps:
        if _lacks(module, step):
            yield f"module._target_={module}: has no {step}, which {verb} calls; define it, or type another class"
    if owners and all(_lacks(target, loader) for target in owners.values()):
        key, target = next(iter(owners.items()))
        yield f"{key}._target_={target}: has no {loader}, which {verb} calls; define it, or type another class"


def _lacks(target: str, hook: str) -> bool:
    """Return whether a class surely has only Lightning's own definition of a hook."""
    for found in resolution_order(target):
        if found is None or isinstance(found.node, ast.FunctionDef):
            return False
        if found.path.startswith(_STUBS):
            if _definitions(found, hook):
                return True
        elif _definitions(found, hook) or any(_assigns(node, hook) for node in ast.walk(found.tree)):
            return False
    return False


def _definitions(found: Definition, name: str) -> list[ast.AST]:
    """Return what binds a name in the body of a class, in order."""
    named = ((node, getattr(node, "name", getattr(node, "id", None))) for node in top_level_nodes(found.node))
    return [node for node, bound in named if bound == name]


def _assigns(node: ast.AST, name: str) -> bool:
    """Return whether a node may set a method on an instance or a finished class."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
    return is_set or (isinstance(node, ast.Constant) and node.value == name)


def argument_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield misspelled and missing arguments of every `_target_`, as far as signatures can be read."""
    # A group that another refers to is found twice; the shorter key is the one to type.
    nodes = sorted(targets_in(OmegaConf.to_container(cfg)), key=lambda item: item[0].count("."))
    # User code builds what lies below these, perhaps with more arguments.
    closed = [each for _, node in nodes if node.get("_recursive_") is False for _, each in list(targets_in(node))[1:]]
    seen: list[Any] = []
    for key, node in nodes:
        if node not in closed and node not in seen:
            seen.append(node)
            yield from _argument_problems(key, node)


def _argument_problems(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    target, arguments = node["_target_"], _signature(node["_target_"])
    if arguments is None:
        return
    given = {str(name) for name in node if not (str(name).startswith("_") and str(name).endswith("_"))}
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    keywords = [each.arg for each in arguments.kwonlyargs]
    if arguments.kwarg is None and key != "strategy":  # its own options say more
        names = [*positional, *keywords]
        for name in sorted(given.difference(names)):
            yield f"{key}.{name}: {target} has no such argument; {did_you_mean(name, names, 'its arguments')}"
    required = positional[len(node.get("_args_", ())) : len(positional) - len(arguments.defaults)]
    required += [name for name, default in zip(keywords, arguments.kw_defaults, strict=True) if default is None]
    missing = [name for name in required if name not in given]
    if missing and not node.get("_partial_"):
        typed = " ".join(f"+{key}.{name}=..." for name in missing)
        yield f"{key}: {target} needs the argument {', '.join(missing)}; type {typed}, or set it in the recipe"


def _signature(target: str) -> ast.arguments | None:
    """Return the arguments of a function, or of a class without `self`; None if source does not determine them."""
    for found in resolution_order(target):
        if found is None:
            return None
        if isinstance(found.node, ast.FunctionDef):
            return found.node.args
        made = [*_definitions(found, "__new__"), *_definitions(found, "__init__")]
        if made:
            last = made[-1]
            if isinstance(last, ast.FunctionDef) and not last.decorator_list and last.name == "__init__":
                return _without_self(last.args)
            return None
    return None


def _without_self(given: ast.arguments) -> ast.arguments:
    names = [*given.posonlyargs, *given.args][1:]
    return ast.arguments([], names, given.vararg, given.kwonlyargs, given.kw_defaults, given.kwarg, given.defaults)
