"""Rules for splitting parameters over the tensor axis, and their checks, from shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from trainwright.strategies.plan.model_plan import ModelPlan, base_style
from trainwright.strategies.plan.names import parent_of, starred
from trainwright.strategies.plan.stem_and_head import tied_groups

# Names of attributes for the width of a head in common libraries.
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "dim_per_head", "d_kv")
# Names of attributes for the number of heads.
COUNTS_OF_HEADS = (
    "num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_q_heads", "n_q_heads",
    "num_query_heads", "kv_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads", "n_local_heads",
    "n_local_kv_heads", "num_local_heads",
)  # fmt: skip
_ATTENDS = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class WeightSplit:
    """Split of one parameter: along ``dim``, within each of ``sections`` (``None``: one)."""

    dim: int
    sections: tuple[int, ...] | None = None


def is_attention(module: nn.Module) -> bool:
    """Return whether it is an ``nn.MultiheadAttention``."""
    return isinstance(module, nn.MultiheadAttention)


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is a Hugging Face ``Conv1D``, whose weight is ``(in, out)``."""
    return any(base.__name__ == "Conv1D" and "pytorch_utils" in base.__module__ for base in type(module).__mro__)


def is_projection(module: nn.Module) -> bool:
    """Return whether it is an ``nn.Linear`` or a ``Conv1D``."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_splittable(module: nn.Module) -> bool:
    """Return whether a projection has only a weight and an optional bias, without parametrizations."""
    return not hasattr(module, "parametrizations") and {"weight"} <= module._parameters.keys() <= {"weight", "bias"}


def features(module: nn.Module) -> tuple[int, int]:
    """Return ``(in, out)`` of an unsplit projection."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(module) else (columns, rows)


def splits(module: nn.Module, style: str) -> dict[str, WeightSplit]:
    """Return the parameters, by name relative to ``module``, that ``style`` splits.

    Args:
        module: unsplit; its parameters may be real, on the meta device, or plain attributes of the right shape.
        style: of a plan.

    Raises:
        ValueError: if the style does not apply to this kind of module.
    """
    kind, _, numbers = style.partition(":")
    if is_attention(module) and kind in ("colwise", "packed_colwise"):
        return _attention_splits(module)
    if isinstance(module, nn.Embedding) and kind == "vocabulary":
        return {"weight": WeightSplit(0)}
    if not is_projection(module) or kind == "vocabulary":
        raise ValueError(
            f"tensor style {style!r} is not for a {type(module).__name__}; nn.Linear and Conv1D take "
            "colwise, rowwise, colwise_gather and packed_colwise:3, nn.Embedding takes vocabulary, "
            "nn.MultiheadAttention takes packed_colwise:3 (its out_proj follows by itself)"
        )
    out_dim, in_dim = (1, 0) if is_transposed(module) else (0, 1)
    if kind == "rowwise":
        return {"weight": WeightSplit(in_dim)}
    sections = _sections(features(module)[1], tuple(map(int, numbers.split(",")))) if kind == "packed_colwise" else None
    found = {"weight": WeightSplit(out_dim, sections)}
    if getattr(module, "bias", None) is not None:
        found["bias"] = WeightSplit(0, sections)
    return found


def plan_splits(module: nn.Module, plan: ModelPlan) -> dict[str, WeightSplit]:
    """Return all parameters that the plan splits, by fully qualified name. See :func:`splits`."""
    found: dict[str, WeightSplit] = {}
    attentions = {name for name in plan.tensor if is_attention(module.get_submodule(name))}
    for name, style in plan.tensor.items():
        if parent_of(name) in attentions:
            continue  # the attention includes its output projection
        found |= {f"{name}.{key}": split for key, split in splits(module.get_submodule(name), style).items()}
    return found


def _attention_splits(module: nn.Module) -> dict[str, WeightSplit]:
    width = module.embed_dim
    packed = WeightSplit(0, (width, width, width))  # type: ignore[arg-type]
    names = {"in_proj_weight": packed, "in_proj_bias": packed, "out_proj.weight": WeightSplit(1)}
    names |= {f"{letter}_proj_weight": WeightSplit(0) for letter in "qkv"}
    out = module.out_proj
    own = {name: getattr(module, name, None) for name in names if "." not in name}
    own["out_proj.weight"] = out.weight  # type: ignore[union-attr]
    return {name: split for name, split in names.items() if own[name] is not None}


def _sections(length: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(numbers) == 1:
        count = numbers[0]
        if count == 0 or length % count:
            raise ValueError(f"packed_colwise:{count} of {length} outputs: they do not divide into {count} projections")
        return (length // count,) * count
    if sum(numbers) != length:
        raise ValueError(f"packed_colwise sections {numbers} sum to {sum(numbers)}, the module has {length} outputs")
    return numbers


def site_name(module: nn.Module, name: str) -> str:
    """Return the nearest ancestor of ``name`` that is called: no ``ModuleList`` or ``ModuleDict``."""
    parent = parent_of(name)
    while parent and isinstance(module.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent_of(parent)
    return parent


def validate_tensor(module: nn.Module, plan: ModelPlan, size: int, *, loss_parallel: bool) -> list[str]:
    """Return the problems of splitting a module over ``size`` ranks.

    Args:
        module: unsplit, real or on the meta device. No process group is needed.
        plan: of the module.
        size: of the tensor axis.
        loss_parallel: whether logits stay split.

    Returns:
        One sentence per problem; repeated blocks are named once, with a star.
    """
    problems = [*_shape_problems(module, plan, size)]
    if not problems:  # the checks below read shapes
        problems += [*_head_problems(module, plan, size), *_tie_problems(module, plan)]
    if loss_parallel and "colwise_gather" not in plan.tensor.values():
        problems.append(
            "loss_parallel=true: the plan splits no output head; give one the style colwise_gather in "
            "strategy.plan.tensor, or set loss_parallel=false"
        )
    return list(dict.fromkeys(problems))


def _sizes(lengths: Iterable[int]) -> str:
    common = math.gcd(*lengths)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0 and n <= 128)


def _shape_problems(module: nn.Module, plan: ModelPlan, size: int) -> Iterator[str]:
    for name, style in plan.tensor.items():
        where = f"tensor plan of {starred(name)}: "
        part = module.get_submodule(name)
        try:
            found = splits(part, style)
        except ValueError as error:
            yield f"{where}{error}"
            continue
        yield from (where + problem for problem in _module_problems(part, found, style))
        yield from _length_problems(part, name, found, size)


def _length_problems(part: nn.Module, name: str, found: dict[str, WeightSplit], size: int) -> Iterator[str]:
    for key, split in found.items():
        parameter = part.get_parameter(key)
        lengths = split.sections or (parameter.shape[split.dim],)
        if any(length % size for length in lengths):
            yield (
                f"tensor plan of {starred(name)}: {key} of shape {tuple(parameter.shape)} cannot be split into {size} "
                f"along dim {split.dim}{f' in sections of {lengths}' if split.sections else ''}; possible sizes of the "
                f"tensor axis: {_sizes(lengths)}"
            )


def indivisible(module: nn.Module, plan: ModelPlan, size: int) -> list[str]:
    """Return lengths, or else heads, that ``size`` does not divide. Styles must be valid for their modules."""
    parts = ((name, module.get_submodule(name), style) for name, style in plan.tensor.items())
    problems = [p for name, part, style in parts for p in _length_problems(part, name, splits(part, style), size)]
    return problems or list(_head_problems(module, plan, size))


def _module_problems(part: nn.Module, found: dict[str, WeightSplit], style: str) -> Iterator[str]:
    own = {name for name, _ in part.named_parameters()}
    own |= {"bias"} if getattr(part, "bias", None) is not None else set()
    unknown = own - {"weight", "bias"} if not is_attention(part) else set()
    if unknown or hasattr(part, "parametrizations"):
        yield f"a {type(part).__name__} with parameters {sorted(own)} is more than a projection; leave it whole (none)"
    if isinstance(part, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(part, option):
                yield f"nn.Embedding({option}={getattr(part, option)}) cannot be split; leave it whole (none)"
        if part.padding_idx is not None and has_own_forward(part):
            yield f"a {type(part).__name__} with padding_idx and a forward of its own cannot be split; use none"
    if isinstance(part, nn.MultiheadAttention):
        if part.bias_k is not None or part.bias_v is not None or part.add_zero_attn:
            yield "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot be split; leave it whole (none)"
    elif style == "rowwise" and "bias" in own and has_own_forward(part):
        yield f"a rowwise {type(part).__name__} with a bias and a forward of its own would add the bias on every rank"


def has_own_forward(part: nn.Module) -> bool:
    """Return whether a subclass overrides ``forward`` of its kind of module."""
    known = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
    if is_transposed(part):
        return False
    return not any(type(part).forward is kind.forward for kind in known)


def _head_problems(module: nn.Module, plan: ModelPlan, size: int) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = {
        (starred(name), attribute): getattr(module.get_submodule(name), attribute)
        for name, attributes in plan.heads.items()
        for attribute in attributes
    }
    counts |= dict(_implied_heads(module, plan))
    if bad := {key: count for key, count in counts.items() if count % size}:
        listed = ", ".join(f"{name}.{attribute} = {count}" for (name, attribute), count in bad.items())
        yield (f"tensor={size} does not divide {listed}; possible sizes of the tensor axis: {_sizes(counts.values())}")


def _implied_heads(module: nn.Module, plan: ModelPlan) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield numbers of heads without an attribute: a model may reshape by the width of a head alone."""
    for name, style in plan.tensor.items():
        part = module.get_submodule(name)
        if isinstance(part, nn.MultiheadAttention):
            yield (starred(name), "num_heads"), part.num_heads
        elif base_style(style) in ("colwise", "packed_colwise") and is_projection(part):
            parent = module.get_submodule(site_name(module, name))
            width = next((w for key in HEAD_WIDTHS if isinstance(w := getattr(parent, key, None), int) and w > 0), 1)
            for length in splits(part, style)["weight"].sections or (features(part)[1],):
                if width > 1 and length % width == 0:
                    yield (starred(name), f"outputs/{width}"), length // width


def head_counts(module: nn.Module, plan: ModelPlan) -> dict[str, tuple[int, int]]:
    """Return the numbers of query heads and key-value heads of each attention, by name pattern, where known."""
    counts: dict[str, set[int]] = {}
    for name, attributes in plan.heads.items():
        part = module.get_submodule(name)
        values = {getattr(part, attribute, None) for attribute in attributes if attribute in COUNTS_OF_HEADS}
        counts.setdefault(starred(name), set()).update(value for value in values if isinstance(value, int))
    for (name, attribute), count in _implied_heads(module, plan):
        # A block with a head width may contain a feed-forward network as well.
        owner = name if attribute == "num_heads" else parent_of(name)
        if attribute == "num_heads" or _ATTENDS.search(owner.rpartition(".")[2]):
            counts.setdefault(owner, set()).add(count)
    return {name: (max(values), min(values)) for name, values in counts.items() if values}


def _tie_problems(module: nn.Module, plan: ModelPlan) -> Iterator[str]:
    def place(name: str) -> tuple[int, str]:  # a module may have several names
        return id(module.get_submodule(parent_of(name))), name.rpartition(".")[2]

    found = {place(name): split for name, split in plan_splits(module, plan).items()}
    for names in (*plan.tied, *tied_groups(module)):
        if len({found.get(place(name)) for name in names}) > 1:
            styles = ", ".join(f"{name}: {plan.tensor.get(name.rpartition('.')[0], 'none')}" for name in sorted(names))
            yield (
                f"the tied parameters {styles} are split differently; a tied embedding and head take vocabulary and "
                "colwise_gather, or both none"
            )
