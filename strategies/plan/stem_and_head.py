"""Modules and parameters before (stem) and after (head) the blocks of a model; tied parameters; experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from trainwright.strategies.plan.names import matching, within
from trainwright.strategies.plan.proof.trace import Trace

# Names that belong to the head, wherever they are registered.
_ENDS = ("head", "lm_head", "classifier", "score", "ln_f", "norm_f")


def tied_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return groups of names that share one parameter, in the order of ``named_parameters``."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def used_functionally(module: nn.Module, name: str, blocks: Collection[str], trace: Trace) -> bool:
    """Return whether the embedding ``name`` serves as output head, as in ``F.linear(x, self.embedding.weight)``.

    A tied head does not count. Without a trace, assume so if there is no linear layer of the same length outside of the
    ``blocks``.
    """
    weight = module.get_submodule(name).weight
    heads = [
        sub
        for other, sub in module.named_modules()
        if isinstance(sub, nn.Linear) and not any(within(other, block) for block in blocks)
    ]
    if any(head.weight is weight for head in heads):
        return False
    if f"{name}.weight" in trace.uses:
        return f"{name}.weight" in trace.functional
    return not any(head.out_features == weight.shape[0] for head in heads)  # type: ignore[index]


def find_experts(module: nn.Module) -> dict[str, str]:
    """Return modules of experts: ``stacked`` with one row per expert in each parameter, or ``listed``."""
    found: dict[str, str] = {}
    for name, sub in module.named_modules():
        last = name.rpartition(".")[2]
        if "experts" not in last or any(within(name, outer) for outer in found):
            continue
        if isinstance(sub, nn.ModuleList):
            if len(sub) > 1:
                found[name] = "listed"
        elif _is_stacked(sub):
            found[name] = "stacked"
    return found


def _is_stacked(sub: nn.Module) -> bool:
    shapes = [tuple(p.shape) for p in sub._parameters.values() if p is not None]
    if not shapes or any(len(shape) < 2 for shape in shapes):
        return False
    count = getattr(sub, "num_experts", None)
    return {shape[0] for shape in shapes} == {count if isinstance(count, int) else shapes[0][0]} and shapes[0][0] > 1


def split_stem_and_head(
    module: nn.Module, blocks: Sequence[str], first: Sequence[str], last: Sequence[str], trace: Trace
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of what runs before the blocks and of what runs after them.

    The trace of a forward decides. Without one, registration before the first or after the last block decides, except
    that embeddings and parameters of modules around the blocks run before, and ``head``, ``classifier``, ``score``,
    ``ln_f``, ``norm_f`` or ``final_...`` run after. An embedding that may serve as a functional tied head is in both.

    Args:
        module: the whole model.
        blocks: names of the blocks; if empty, so are the results.
        first: patterns of modules or parameters that run before, overriding the rules.
        last: patterns of those that run after; matches of both run in both places.
        trace: where a forward used parameters.

    Returns:
        Names of outermost modules and of parameters: before, after. Those between blocks are in neither.

    Raises:
        ValueError: if a pattern matches nothing outside of the blocks.
    """
    if not blocks:
        return (), ()
    sides = {name: _default_sides(module, name, side, blocks, trace) for name, side in _units(module, blocks)}
    chosen: dict[str, set[str]] = {}
    for option, patterns in (("first", first), ("last", last)):
        for pattern in patterns:
            hits = _hits(module, sides, pattern, option)
            for name in hits:
                chosen.setdefault(name, set()).add(option)
    result = {name: chosen.get(name, side) for name, side in sides.items()}
    return tuple(n for n, s in result.items() if "first" in s), tuple(n for n, s in result.items() if "last" in s)


def _units(module: nn.Module, blocks: Sequence[str]) -> list[tuple[str, str]]:
    """Return outermost modules and parameters outside of the blocks, with ``first``, ``between`` or ``last``."""
    seen = 0
    units: list[tuple[str, str]] = []

    def visit(owner: nn.Module, prefix: str) -> None:
        nonlocal seen
        units.extend((prefix + name, "first") for name, p in owner._parameters.items() if p is not None)
        for name, child in owner._modules.items():
            full = prefix + name
            if child is None:
                continue
            if full in blocks:
                seen += 1
            elif any(block.startswith(f"{full}.") for block in blocks):
                visit(child, f"{full}.")
            elif next(child.parameters(), None) is not None:
                units.append((full, "first" if not seen else "last" if seen == len(blocks) else "between"))

    visit(module, "")
    return units


def _default_sides(module: nn.Module, name: str, side: str, blocks: Sequence[str], trace: Trace) -> set[str]:
    owner = dict(module.named_modules(remove_duplicate=False)).get(name)
    own = [name] if owner is None else [f"{name}.{n}" for n, _ in owner.named_parameters()]
    tied = {n for group in tied_groups(module) for n in group}
    if tied.isdisjoint(own) and all(n in trace.uses for n in own):
        return {place for n in own for place in trace.uses[n]}
    inner = [] if owner is None else [n for n, sub in owner.named_modules() if isinstance(sub, nn.Embedding)]
    if not inner:
        last = name.rpartition(".")[2]
        return {"last"} if last in _ENDS or last.startswith("final_") else {side}
    embeddings = [f"{name}.{n}" if n else name for n in inner]
    return {"first", "last"} if any(used_functionally(module, n, blocks, trace) for n in embeddings) else {"first"}


def _hits(module: nn.Module, sides: dict[str, set[str]], pattern: str, option: str) -> list[str]:
    """Return names among ``sides`` that match ``pattern``; containers of a match are replaced by their parts."""
    names = {name for name, _ in module.named_modules(remove_duplicate=False) if name}
    names |= {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found: list[str] = []
    for match in matching(sorted(names), pattern):
        for unit in [unit for unit in sides if match != unit and within(match, unit)]:
            _refine(module, sides, unit, match)
        found += [unit for unit in sides if within(unit, match)]
    if not found:
        outside = ", ".join(sides) or "nothing"
        raise ValueError(
            f"plan.{option}: nothing with parameters outside of the blocks is called {pattern!r}. "
            f"Outside of the blocks are: {outside}."
        )
    return found


def _refine(module: nn.Module, sides: dict[str, set[str]], unit: str, match: str) -> None:
    """Replace ``unit`` by its parts, down to ``match``, in order."""
    while unit != match:
        parts = _parts(module, unit)
        expanded: dict[str, set[str]] = {}
        for name, side in sides.items():
            expanded.update(dict.fromkeys(parts, side) if name == unit else {name: side})
        sides.clear()
        sides.update(expanded)
        deeper = [part for part in parts if within(match, part)]
        if not deeper:
            return
        unit = deeper[0]


def _parts(module: nn.Module, unit: str) -> list[str]:
    owner = module.get_submodule(unit)
    own = [f"{unit}.{name}" for name, p in owner._parameters.items() if p is not None]
    children = [(name, child) for name, child in owner._modules.items() if child is not None]
    return own + [f"{unit}.{name}" for name, child in children if next(child.parameters(), None) is not None]
