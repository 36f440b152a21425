"""Checks of the classes that a configuration names, by their source: hooks that a verb calls, and arguments."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import definition, lineage, targets_in
from trainwright.core.problems import did_you_mean

# Verb -> what it calls of the module, and of the data module, or of a module that has its own data.
_CALLED = {
    "fit": (("training_step", "configure_optimizers"), "train_dataloader"),
    "validate": (("validation_step",), "val_dataloader"),
    "test": (("test_step",), "test_dataloader"),
    "predict": ((), "predict_dataloader"),
}
# Their classes define hooks only without effect; modules of Lightning's other packages, such as its demos, have some.
_STUBS = ("lightning.pytorch.core.", "lightning.fabric.", "torch.")


def hook_problems(cfg: DictConfig, verb: str) -> Iterator[str]:
    """Yield the hooks that a verb calls and neither the module nor the data module defines."""
    steps, loader = _CALLED[verb]
    owners = {key: str(cfg[key]["_target_"]) for key in ("data", "module") if "_target_" in cfg[key]}
    absent = [("module", step) for step in steps if "module" in owners and _lacks(owners["module"], step)]
    if owners and all(_lacks(target, loader) for target in owners.values()):
        absent.append((next(iter(owners)), loader))
    for key, hook in absent:
        yield f"{key}._target_={owners[key]}: has no {hook}, which {verb} calls; define it, or type another class"


def _lacks(target: str, hook: str) -> bool:
    """Return whether no class of a lineage defines or sets a hook; False if source does not determine it."""
    for path in lineage(target):
        node, bases = definition(path)
        if path.startswith(_STUBS) or (node is None and bases):
            continue
        if not isinstance(node, ast.ClassDef) or not _is_plain(node):
            return False
        bound = (each for each in ast.walk(node) if not isinstance(getattr(each, "ctx", None), ast.Load))
        if any(hook == getattr(each, name, None) for each in bound for name in ("name", "id", "attr", "value")):
            return False
    return True


def _is_plain(node: Any) -> bool:
    """Return whether source shows a class or function as it is, without decorators and metaclasses."""
    return node is not None and not node.decorator_list and not getattr(node, "keywords", ())


def argument_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield misspelled and missing arguments of every `_target_`, as far as signatures can be read."""
    # A group that another refers to is found twice; the shorter key is the one to type.
    nodes = sorted(targets_in(OmegaConf.to_container(cfg)), key=lambda item: item[0].count("."))
    # User code builds what lies below `_recursive_: false`, perhaps with more arguments.
    seen = [each for _, node in nodes if node.get("_recursive_") is False for _, each in list(targets_in(node))[1:]]
    for key, node in nodes:
        if node not in seen and key != "strategy":  # its options say what they allow
            yield from _argument_problems(key, node)
        seen.append(node)


def _argument_problems(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    target, made = node["_target_"], _constructor(node["_target_"])
    if made is None:
        return
    taken = len(node.get("_args_", ())) + (made.name == "__init__")
    positional = [each.arg for each in (*made.args.posonlyargs, *made.args.args)]
    names = positional[taken:] + [each.arg for each in made.args.kwonlyargs]
    optional = positional[len(positional) - len(made.args.defaults) :]
    optional += [each.arg for each, default in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True) if default]
    for name in (str(name) for name in node if made.args.kwarg is None and name not in names):
        if not name.startswith("_"):
            yield f"{key}.{name}: {target} has no such argument; {did_you_mean(name, names, 'its arguments')}"
    missing = [name for name in names if name not in optional and name not in node and not node.get("_partial_")]
    if missing:
        words = " ".join(f"+{key}.{name}=..." for name in missing)
        yield f"{key}: {target} needs {', '.join(missing)}; type {words}, or set it in the recipe"


def _constructor(target: str) -> ast.FunctionDef | None:
    """Return a function, or the `__init__` of a class; None if source does not determine it."""
    for path in lineage(target):
        node, bases = definition(path)
        if node is None and bases:
            continue  # imported
        inits = [each for each in getattr(node, "body", ()) if getattr(each, "name", "") in ("__init__", "__new__")]
        found = node if isinstance(node, ast.FunctionDef) else inits[-1] if inits else None
        if found is not None or not _is_plain(node) or len(bases) != 1:
            is_known = isinstance(found, ast.FunctionDef) and found.name != "__new__"
            return found if is_known and _is_plain(node) and _is_plain(found) else None
    return None
