"""Construction of a ``ModelPlan`` from configuration, model metadata and structure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from textwrap import shorten
from types import MappingProxyType
from typing import Any

from torch import nn

from trainwright.checkpoint.foreign.hugging_face import is_pretrained_model
from trainwright.core.layout import Layout
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.plan.blocks import COMPILE_BLOCKS, compiled_modules, count_parameters, find_blocks
from trainwright.strategies.plan.model_plan import ModelPlan, PlanConfig
from trainwright.strategies.plan.names import folded, matched, parent_of, starred, within
from trainwright.strategies.plan.proof.trace import trace
from trainwright.strategies.plan.stem_and_head import find_experts, split_stem_and_head, tied_groups
from trainwright.strategies.plan.structure import features_of
from trainwright.strategies.plan.tensor_rules import indivisible
from trainwright.strategies.tensor.plan import TensorDraft, sequence_problems

# A list of blocks counts as the model's trunk if it has this many times the parameters of any other list.
_CLEARLY_HEAVIER = 2
# Characters of a reason in a refusal.
_SHOWN = 160


def plan_for(module: nn.Module, layout: Layout, options: EngineOptions) -> ModelPlan:
    """Return the plan of ``module`` with all parts that ``layout`` needs.

    Raises:
        ValueError: if a part is not found; says what to type.
    """
    needed = {
        "blocks": layout.pipeline > 1 or layout.context > 1 or options.sequence_parallel,
        "tensor": layout.tensor > 1,
        "experts": layout.expert > 1,
    }
    config = dict(options.plan)
    if options.blocks is not None:
        config.setdefault("blocks", list(options.blocks))
    return make_plan(
        module,
        config,
        needs=[part for part, is_needed in needed.items() if is_needed],
        tensor_size=layout.tensor,
        sequence_parallel=layout.tensor > 1 and options.sequence_parallel,
    )


def make_plan(
    module: nn.Module,
    config: PlanConfig | Mapping[str, Any] | None = None,
    *,
    needs: Collection[str] = (),
    tensor_size: int | None = None,
    sequence_parallel: bool = False,
) -> ModelPlan:
    """Find where ``module`` can be split.

    Sources in order, for each part: ``config``; the mapping of the same form returned by a ``parallel_plan()`` method
    of the module or of a submodule (names relative to it; the outer one wins); Hugging Face metadata; structure.

    Args:
        module: the whole model, not yet partitioned; may be on the meta device.
        config: of the user, see ``PlanConfig``; ``None``: none.
        needs: parts that the layout requires: ``"blocks"``, ``"tensor"``, ``"experts"``.
        tensor_size: size of the tensor axis. Embeddings and heads that are not configured stay whole if it does not
            divide their length; ``None``: they are split anyway, and proofs use two ranks; 1: no proofs.
        sequence_parallel: require blocks to compute the same on slices of the sequence between split projections.

    Raises:
        ValueError: if a block does not compute the same on a slice though it must, if the configuration contradicts
            itself or names what does not exist, or if a needed part is not found; the message lists what was tried,
            with lines to start from, or the possible sizes of the tensor axis.
    """
    said = PlanConfig.of(config)
    own = own_plan(module)
    blocks, candidates, sources = _choose_blocks(module, said, own)
    experts, sources["experts"] = _choose_experts(module, said, own)
    seen = trace(module, candidates, tensor_size or 2)
    draft = TensorDraft(module, said, own, tuple(candidates), tuple(experts), tensor_size, seen)
    tensor, sources["tensor"] = draft.styles(), draft.source()
    heads = _merge_heads(module, {n: h for n, h in draft.heads.items() if n in tensor or _holds(tensor, n)}, own, said)
    first, last = split_stem_and_head(module, blocks, [*own.first, *said.first], [*own.last, *said.last], seen)
    asked = ", configuration" if said.first or said.last else ""
    sources["first"] = sources["last"] = (
        f"{'use in a forward' if seen.uses else 'order of registration, names'}{asked}" if blocks else "needs blocks"
    )
    choices = _whole_inputs(module, tensor, blocks, said, own)
    whole_inputs = _on_slices(choices, draft, blocks) if sequence_parallel else choices[0]
    plan = ModelPlan(
        blocks=blocks,
        tensor=MappingProxyType(tensor),
        heads=MappingProxyType(heads),
        narrow=tuple(n for n in draft.narrow if _holds(tensor, n)),
        gathered=tuple(n for n in draft.gathered if _holds(tensor, parent_of(n))),
        summed=tuple(dict.fromkeys(draft.summed)),
        whole_inputs=whole_inputs,
        first=first,
        last=last,
        tied=tied_groups(module),
        experts=MappingProxyType(experts),
        sources=MappingProxyType(sources),
    )
    if "tensor" in needs and tensor_size is not None and not _splits_weights(plan):
        _check_size(module, config, tensor_size)
    _check_needs(module, plan, needs)
    return plan


def own_plan(module: nn.Module) -> PlanConfig:
    """Merge the ``parallel_plan()`` of ``module`` and its submodules, with fully qualified names.

    Raises:
        ValueError: if one returns an invalid plan.
    """
    merged: dict[str, Any] = {}
    for name, sub in reversed(list(module.named_modules())):  # outer ones come last and win
        method = getattr(type(sub), "parallel_plan", None)
        if not callable(method):
            continue
        origin = f"{type(sub).__name__}.parallel_plan()" + (f" of {name}" if name else "")
        plan = PlanConfig.of(sub.parallel_plan(), origin)
        prefix = f"{name}." if name else ""
        for part in ("tensor", "heads", "experts"):
            said = {prefix + key: value for key, value in getattr(plan, part).items()}
            merged[part] = {**merged.get(part, {}), **said}
        for part in ("blocks", "whole_inputs"):
            if getattr(plan, part) is not None:
                merged[part] = [prefix + pattern for pattern in getattr(plan, part)]
        for part in ("first", "last"):
            merged[part] = [*merged.get(part, []), *(prefix + pattern for pattern in getattr(plan, part))]
    return PlanConfig(**merged)


# ---- blocks -------------------------------------------------------------------------------------------------------


def _choose_blocks(
    module: nn.Module, said: PlanConfig, own: PlanConfig
) -> tuple[tuple[str, ...], list[str], dict[str, str]]:
    """Return the blocks, the candidate blocks of all lists, and the source."""
    for source, patterns in (("configuration", said.blocks), ("parallel_plan()", own.blocks)):
        if patterns is not None:
            chosen = list(find_blocks(module, patterns))
            return tuple(chosen), chosen, {"blocks": source}
    lists = _block_lists(module)
    candidates = [name for names in lists.values() for name in names]
    ranked = _heaviest(module, lists)
    if len(ranked) > 1:
        # A frozen list is a teacher, a reference or an average of the trained one.
        ranked = [p for p in ranked if any(each.requires_grad for each in _parameters(module, lists[p]))] or ranked
    if len(ranked) > 1:
        spans = ", ".join(f"{_span(lists[p])} ({_weight(module, lists[p]):,} parameters)" for p in ranked)
        return (), candidates, {"blocks": f"ambiguous: {spans}"}
    from_metadata = any(getattr(sub, "_no_split_modules", None) for sub in module.modules())
    source = "Hugging Face's _no_split_modules" if from_metadata else "structure"
    return tuple(lists[ranked[0]]) if ranked else (), candidates, {"blocks": source if ranked else "not found"}


def _block_lists(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of blocks by the name of their list, longest chains only."""
    runs: dict[str, list[str]] = {}
    for name in find_blocks(module):
        runs.setdefault(parent_of(name), []).append(name)
    return {parent: names for parent, names in runs.items() if len(names) > 1} or runs


def _heaviest(module: nn.Module, lists: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the list with the most parameters and those that are not clearly lighter, heaviest first."""
    weights = {parent: _weight(module, names) for parent, names in lists.items()}
    most = max(weights.values(), default=0)
    return sorted((p for p in weights if most < _CLEARLY_HEAVIER * weights[p]), key=lambda parent: -weights[parent])


def _weight(module: nn.Module, names: Sequence[str]) -> int:
    return sum(count_parameters(module.get_submodule(name)) for name in names)


def _parameters(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Parameter]:
    for name in names:
        yield from module.get_submodule(name).parameters()


def _span(names: Sequence[str]) -> str:
    """Return ``layers.0..3`` for consecutive names."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"


# ---- experts, heads, whole inputs ---------------------------------------------------------------------------------


def _choose_experts(module: nn.Module, said: PlanConfig, own: PlanConfig) -> tuple[dict[str, str], str]:
    names = [name for name, _ in module.named_modules() if name]
    experts = find_experts(module)
    sources = ["structure"] if experts else []
    for source, patterns, option in (
        ("parallel_plan()", own.experts, "parallel_plan() experts"),
        ("configuration", said.experts, "plan.experts"),
    ):
        for pattern, kind in patterns.items():
            experts.update(dict.fromkeys(matched(names, [pattern], option), kind))
        sources += [source] if patterns else []
    return {name: kind for name, kind in experts.items() if kind != "none"}, ", ".join(sources) or "not found"


def _merge_heads(
    module: nn.Module, found: Mapping[str, tuple[str, ...]], own: PlanConfig, said: PlanConfig
) -> dict[str, tuple[str, ...]]:
    names = [name for name, _ in module.named_modules() if name]
    heads = dict(found)
    for patterns, option in ((own.heads, "parallel_plan() heads"), (said.heads, "plan.heads")):
        for pattern, attributes in patterns.items():
            for name in matched(names, [pattern], option):
                wrong = [a for a in attributes if not isinstance(getattr(module.get_submodule(name), a, None), int)]
                if wrong:
                    raise ValueError(
                        f"{option}: {name} ({type(module.get_submodule(name)).__name__}) has no integer attribute "
                        f"{', '.join(wrong)} (it has: {', '.join(_integers(module.get_submodule(name))) or 'none'})."
                    )
                heads[name] = tuple(attributes)
    return {name: attributes for name, attributes in heads.items() if attributes}


def _holds(tensor: Mapping[str, str], name: str) -> bool:
    return any(within(other, name) for other in tensor)


def _integers(sub: nn.Module) -> list[str]:
    return [name for name, value in vars(sub).items() if isinstance(value, int) and not isinstance(value, bool)]


def _whole_inputs(
    module: nn.Module, tensor: Mapping[str, str], blocks: Collection[str], said: PlanConfig, own: PlanConfig
) -> list[tuple[str, ...]]:
    """Return the choices of modules that take whole sequences, in the order in which they are tried."""
    names = [name for name, _ in module.named_modules() if name]
    for patterns, option in (
        (said.whole_inputs, "plan.whole_inputs"),
        (own.whole_inputs, "parallel_plan() whole_inputs"),
    ):
        if patterns is not None:
            return [tuple(matched(names, patterns, option))]
    split = [name for name, style in tensor.items() if style == "colwise" or style.startswith("packed_colwise")]
    holders = [
        name if isinstance(module.get_submodule(name), nn.MultiheadAttention) else parent_of(name) for name in split
    ]
    rows = [name for name, style in tensor.items() if style == "rowwise"]

    def with_rows(holder: str) -> str:  # an adapter holds columns only, and code around it reads the length
        while holder not in blocks and not any(within(row, holder) for row in rows):
            holder = parent_of(holder)
        return holder

    inside = [h for h in holders if any(h != block and within(h, block) for block in blocks)]
    choices = [{*inside}, {with_rows(holder) for holder in inside} - {*blocks}]
    return [tuple(name for name in names if name in choice) for choice in choices]


def _on_slices(choices: Sequence[tuple[str, ...]], draft: TensorDraft, blocks: Collection[str]) -> tuple[str, ...]:
    """Return the first choice with which blocks compute the same on slices of the sequence."""
    found = []
    for whole_inputs in choices:
        found.append(sequence_problems(draft, whole_inputs, blocks))
        if not found[-1]:
            return whole_inputs
    raise ValueError("; ".join(found[0]))


# ---- messages -----------------------------------------------------------------------------------------------------


def _check_needs(module: nn.Module, plan: ModelPlan, needs: Collection[str]) -> None:
    problems = []
    if "blocks" in needs and not plan.blocks:
        problems.append(
            f"this layout needs repeated blocks, and the model has several lists of them, {plan.sources['blocks']}"
            if plan.sources["blocks"].startswith("ambiguous")
            else "this layout needs repeated blocks, and none were found in the model"
        )
    if "tensor" in needs and not _splits_weights(plan):
        source, *left = plan.sources["tensor"].split("; left whole: ")
        first = f"; left whole: {shorten(left[0], _SHOWN)}" if left else ""
        more = f"; {len(left) - 1} more reasons" if left[1:] else ""
        problems.append(
            "strategy.tensor needs weights that can be split by columns and rows, and none were recognised "
            f"({source}{first}{more})"
        )
        if compiled_modules(module):
            problems.append(f"compiled modules hide theirs. {COMPILE_BLOCKS}")
    if "experts" in needs and not plan.experts:
        problems.append("strategy.expert needs experts, and none were found in the model")
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. Tried on {type(module).__name__}: {_tried(module)}. "
            f"To start from: {_example(module, plan, needs)}"
        )


def _splits_weights(plan: ModelPlan) -> bool:
    return any(style in ("colwise", "rowwise") or ":" in style for style in plan.tensor.values())


def _check_size(module: nn.Module, config: PlanConfig | Mapping[str, Any] | None, size: int) -> None:
    """Raise with the possible sizes if ``size`` ranks cannot split the module at all."""
    plan = make_plan(module, config)
    if _splits_weights(plan):
        problems = indivisible(module, plan, size)
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))


def _tried(module: nn.Module) -> str:
    has_own = any(callable(getattr(type(sub), "parallel_plan", None)) for sub in module.modules())
    has_metadata = any(is_pretrained_model(sub) or hasattr(sub, "_no_split_modules") for sub in module.modules())
    there_are = {"a parallel_plan() method": has_own, "Hugging Face metadata": has_metadata}
    tried = [f"{name} ({'there' if found else 'none'})" for name, found in there_are.items()]
    return ", ".join(["strategy.plan", *tried, "a search for computations that can be split"])


def _example(module: nn.Module, plan: ModelPlan, needs: Collection[str]) -> str:
    lines = []
    if "blocks" in needs:
        named = [name for name, sub in module.named_modules() if isinstance(sub, nn.ModuleList | nn.Sequential)]
        lists = _heaviest(module, _block_lists(module)) or named
        lines.append(f"'strategy.plan.blocks=[{f'{lists[0]}.*' if lists and lists[0] else '*'}]'")
    if "tensor" in needs:
        lines.append(f"'strategy.plan.tensor={{{', '.join(_tensor_lines(module, plan.blocks))}}}'")
    if "experts" in needs:
        lines.append("'strategy.plan.experts={<name of the module that holds the experts>: stacked}'")
    return " ".join(lines)


def _tensor_lines(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return plan lines for the first two linear layers side by side in a block: ``colwise``, then ``rowwise``."""
    scope = blocks[:1] or ("",)
    groups: dict[str, dict[str, None]] = {}
    for name, sub in module.named_modules():
        if features_of(sub) is not None and within(name, scope[0]):
            groups.setdefault(parent_of(name), {})[starred(name)] = None
    pairs = (list(names) for names in groups.values() if len(names) > 1)
    first, *_, last = next(pairs, ["<name of a linear layer>", "<the next one>"])
    return [f"{first}: colwise", f"{last}: rowwise"]


def describe_plan(plan: ModelPlan, module: nn.Module) -> str:
    """Return a short table of ``plan``: one line per part and name pattern, with the source of the part."""
    rows: list[tuple[str, str, str]] = []
    if plan.blocks:
        kinds = dict.fromkeys(type(module.get_submodule(name)).__name__ for name in plan.blocks)
        rows.append(("blocks", _span(plan.blocks), f"{len(plan.blocks)} x {' | '.join(kinds)}"))
    for part, styles in (("tensor", plan.tensor), ("experts", plan.experts)):
        rows += [(part, name, style) for name, style in dict.fromkeys((starred(n), s) for n, s in styles.items())]
    heads = dict.fromkeys((starred(n), ", ".join(a)) for n, a in plan.heads.items())
    rows += [("heads", name, attributes) for name, attributes in heads]
    for part, names in (("whole_inputs", plan.whole_inputs), ("first", plan.first), ("last", plan.last)):
        rows += [(part, name, "") for name in folded(names)]
    rows += [("tied", " = ".join(group), "") for group in plan.tied]
    rows += [("source", part, source) for part, source in plan.sources.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{part:<{widths[0]}}  {name:<{widths[1]}}  {what}".rstrip() for part, name, what in rows)
