"""Candidate tensor-parallel splits of a module, from the order in which it calls its projections.

The pattern is that of Megatron-LM (arXiv:1909.08053): projections into heads or the wide feed-forward space are split
by columns, the projection back by rows. A candidate is accepted if its proof succeeds, independent of names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import nn

from trainwright.strategies.plan import tensor_rules as rules
from trainwright.strategies.plan.names import joined, parent_of

# Column-wise projections per row-wise one: queries, keys, values and a gate.
_MOST_COLUMNS = 4
# Combinations of divided attributes tried per group.
_MOST_HEADS = 16


@dataclass(frozen=True)
class Guess:
    """Candidate split of a group of weights.

    Args:
        styles: name of a module -> its style.
        heads: name of a module -> attributes that count split heads or features.
        narrow: names of modules that read the width of split features from their input.
        gathered: names of modules that compute on all features between the split projections.
        summed: names of replicated parameters whose gradients are summed over ranks.
    """

    styles: Mapping[str, str]
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    summed: frozenset[str] = frozenset()


def features_of(module: nn.Module | None) -> tuple[int, int] | None:
    """Return ``(inputs, outputs)`` of an ``nn.Linear`` or Hugging Face ``Conv1D``; ``None`` for other modules."""
    if module is None or not rules.is_projection(module) or not rules.is_splittable(module):
        return None
    return rules.features(module)


def base_of(module: nn.Module) -> str | None:
    """Return the name of the projection in ``module`` to which all others are low-rank (LoRA) adapters, else ``None``.

    Adapters come in pairs: from the projection's inputs to a few features, and from these to its outputs.
    """
    inner = [(name, sub) for name, sub in module.named_modules() if name and rules.is_projection(sub)]
    if len(inner) < 3:
        return None
    (base, first), *others = inner
    inputs, outputs = rules.features(first)
    down = [rules.features(sub)[1] for _, sub in others if rules.features(sub)[0] == inputs]
    up = [rules.features(sub)[0] for _, sub in others if rules.features(sub)[1] == outputs]
    is_low = all(rank < min(inputs, outputs) for rank in down)
    return base if is_low and sorted(down) == sorted(up) and len(down) + len(up) == len(others) else None


def with_adapters(module: nn.Module, name: str, style: str) -> dict[str, str]:
    """Return ``{name: style}``, or the styles of a projection's base and adapters."""
    sub = module.get_submodule(name)
    base = base_of(sub) if not rules.is_projection(sub) else None
    if base is None:
        return {name: style}
    side = 0 if style == "rowwise" else 1
    width = rules.features(sub.get_submodule(base))[side]
    inner = [(n, part) for n, part in sub.named_modules() if rules.is_projection(part)]
    return {f"{name}.{n}": style for n, part in inner if n == base or rules.features(part)[side] == width}


def owners(module: nn.Module, excluded: Sequence[str]) -> list[str]:
    """Return names of the innermost modules with several projections, and attentions; none within ``excluded``."""
    found: list[str] = []

    def visit(sub: nn.Module, name: str) -> bool:
        if name in excluded:
            return False
        if rules.is_attention(sub):
            found.append(name)
            return True
        inner = [visit(child, f"{name}.{key}" if name else key) for key, child in sub.named_children()]
        own = sum(rules.is_projection(child) or base_of(child) is not None for _, child in _called(sub))
        if own > 1 and not isinstance(sub, nn.ModuleList | nn.ModuleDict) and base_of(sub) is None:
            found.append(name)
            return True
        return any(inner)

    visit(module, "")
    return found


def _called(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield children of ``module`` and of its lists."""
    for name, child in module.named_children():
        yield name, child
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)


def guesses(
    unit: nn.Module, calls: Sequence[tuple[str, object]], reads: Mapping[str, Mapping[str, int]], size: int
) -> Iterator[list[Guess]]:
    """Yield candidates for each group of weights, likelier ones first; the caller skips groups that overlap.

    Args:
        unit: the module.
        calls: names of its projections and attentions in the order of calls, each with an identifier of its input.
        reads: name of a submodule -> integer attributes that it read.
        size: of the tensor axis.
    """
    called = outer_calls(unit, dict(calls))
    for start, (name, _) in enumerate(called):
        if rules.is_attention(unit.get_submodule(name)):
            yield list(attention_guess(unit, name, size))
            continue
        for count in range(1, _MOST_COLUMNS + 1):
            columns, rest = called[start : start + count], called[start + count :]
            if not rest or any(rules.is_attention(unit.get_submodule(n)) for n, _ in (*columns, rest[0])):
                break
            if rest[0][1] not in [given for _, given in columns]:
                yield list(_pairs(unit, [n for n, _ in columns], rest[0][0], reads, size))


def attention_guess(unit: nn.Module, name: str, size: int) -> Iterator[Guess]:
    """Yield the split of an ``nn.MultiheadAttention``, if supported."""
    part = unit.get_submodule(name)
    assert isinstance(part, nn.MultiheadAttention)
    if part._qkv_same_embed_dim and part.bias_k is None and not part.add_zero_attn and part.num_heads % size == 0:
        styles = {name: "packed_colwise:3", joined(name, "out_proj"): "rowwise"}
        yield Guess(styles, {name: ("num_heads", "embed_dim")})


def outer_calls(unit: nn.Module, calls: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the calls without those of adapters."""
    wrappers = {name: base for name, sub in unit.named_modules() if (base := base_of(sub)) is not None}
    found = []
    for name, given in calls.items():
        outer = next((w for w in wrappers if name.startswith(f"{w}.")), None)
        if outer is None:
            found.append((name, given))
        elif name == f"{outer}.{wrappers[outer]}":
            found.append((outer, given))
    return found


def _shape(unit: nn.Module, name: str) -> tuple[int, int] | None:
    sub = unit.get_submodule(name)
    base = None if rules.is_projection(sub) else base_of(sub)
    return features_of(sub if base is None else sub.get_submodule(base))


def _pairs(
    unit: nn.Module, columns: Sequence[str], back: str, reads: Mapping[str, Mapping[str, int]], size: int
) -> Iterator[Guess]:
    shapes, shape = [_shape(unit, name) for name in columns], _shape(unit, back)
    if shape is None or shape[0] % size or None in shapes:
        return
    width, widths = shape[0], [outputs for _, outputs in filter(None, shapes)]
    options = [_styles(outputs, width, size) for outputs in widths]
    if not any(outputs >= width for outputs in widths):
        return
    for styles in product(*options):
        split = dict(zip(columns, styles, strict=True))
        expanded = {n: s for name, style in split.items() for n, s in with_adapters(unit, name, style).items()}
        expanded |= with_adapters(unit, back, "rowwise")
        owners = dict.fromkeys(parent_of(name) for name in columns)
        heads = list(heads_of(owners, reads, {*widths, width}, size))
        for narrow in ((), tuple(owners)):
            yield from (Guess(expanded, chosen, narrow) for chosen in heads)
        gathered = tuple(_of_full_width(unit, owners, widths))
        if gathered:
            yield from (Guess(expanded, chosen, gathered=gathered) for chosen in heads)


def _of_full_width(unit: nn.Module, owners: Iterable[str], widths: Collection[int]) -> Iterator[str]:
    """Yield the modules in ``owners`` with a number per output of a projection, such as norms over all heads."""
    for owner in owners:
        for name, sub in unit.get_submodule(owner).named_modules():
            shapes = {tuple(parameter.shape) for parameter in sub.parameters()}
            hooked = sub._forward_hooks or sub._forward_pre_hooks  # they would see parts
            if shapes and not hooked and not any(sub.children()) and shapes <= {(width,) for width in widths}:
                yield joined(owner, name)


def _styles(outputs: int, width: int, size: int) -> list[str]:
    """Return candidate styles of a projection to ``outputs`` features, followed by one from ``width`` features."""
    if outputs % size:
        return []
    if outputs <= width:
        return ["colwise"] if width % outputs == 0 else []
    if outputs % width == 0:  # several projections in one matrix, or interleaved by head
        return [f"packed_colwise:{outputs // width}", "colwise"]
    rest = (outputs - width) // 2  # grouped-query attention: fewer keys and values
    packed = rest > 0 and 2 * rest == outputs - width and rest % size == 0
    return [f"packed_colwise:{width},{rest},{rest}", "colwise"] if packed else ["colwise"]


def heads_of(
    owners: Mapping[str, object] | Sequence[str], reads: Mapping[str, Mapping[str, int]], widths: set[int], size: int
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield choices of attributes of ``owners`` that may count split heads or features, likelier ones first."""
    numbers = [
        (owner, name, value)
        for owner in owners
        for name, value in reads.get(owner, {}).items()
        if value > 1 and value % size == 0 and any(width % value == 0 for width in widths)
    ]
    likely = [name in rules.COUNTS_OF_HEADS or value in widths for _, name, value in numbers]
    ways = sorted(
        product((True, False), repeat=len(numbers)),
        key=lambda way: sum(a != b for a, b in zip(way, likely, strict=True)),
    )
    for way in ways[:_MOST_HEADS]:
        found: dict[str, tuple[str, ...]] = {}
        for (owner, name, _), is_divided in zip(numbers, way, strict=True):
            if is_divided:
                found[owner] = (*found.get(owner, ()), name)
        yield found
