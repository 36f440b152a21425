"""Tensor part of a plan: styles from all sources, proven by running modules, and made consistent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from trainwright.checkpoint.foreign.hugging_face import outermost_models
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.plan import structure
from trainwright.strategies.plan.hugging_face import tensor_metadata
from trainwright.strategies.plan.model_plan import ModelPlan, PlanConfig, base_style
from trainwright.strategies.plan.names import folded, joined, matched, matching, parent_of, starred, within
from trainwright.strategies.plan.proof.proof import UNIT, Proof, Split
from trainwright.strategies.plan.proof.trace import BlockCall, Trace, calls_for, kinds_of, variants_of
from trainwright.strategies.plan.stem_and_head import tied_groups, used_functionally
from trainwright.strategies.plan.structure import Guess
from trainwright.strategies.plan.tensor_rules import COUNTS_OF_HEADS
from trainwright.strategies.tensor.engine import TensorParallel

_COLUMNS = ("colwise", "packed_colwise")


class TensorDraft:
    """Collection of the tensor styles of a model, proven where its modules can be run.

    Args:
        module: the whole model.
        config: the user's configuration.
        own: from the model's ``parallel_plan()``.
        blocks: names of all blocks of all lists: pairs stay within a block, and no outputs are gathered in one.
        experts: names of modules of experts.
        size: of the tensor axis, or ``None`` if unknown.
        trace: calls of blocks.

    Attributes:
        heads: name of a module -> attributes that count split heads or features.
        narrow: names of modules that read the width of split features from their input.
        gathered: names of modules before which split features are gathered.
        summed: names of replicated parameters whose gradients are summed over ranks.
        proofs: names of modules of one kind, their proof, and the plan of one of them as a unit.

    Raises:
        ValueError: if the configuration names missing modules, splits columns without rows, or changes results.
    """

    def __init__(
        self,
        module: nn.Module,
        config: PlanConfig,
        own: PlanConfig,
        blocks: tuple[str, ...],
        experts: tuple[str, ...],
        size: int | None,
        trace: Trace,
    ) -> None:
        self._module = module
        self._blocks = blocks
        self._size = size
        self._trace = trace
        self._names = [name for name, _ in module.named_modules() if name]
        self._canonical = {id(sub): name for name, sub in module.named_modules()}
        self._styles: dict[str, str] = {}
        self._explicit: set[str] = set()
        self._sources: list[str] = []
        self._whole: dict[str, str] = {}
        self.heads: dict[str, tuple[str, ...]] = {}
        self.narrow: list[str] = []
        self.gathered: list[str] = []
        self._together: list[set[str]] = []  # split as one
        self.summed: list[str] = []
        self.proofs: list[tuple[list[str], Proof, ModelPlan]] = []
        self._take_metadata()
        self._take_patterns(own.tensor, "parallel_plan()", "parallel_plan() tensor")
        self._take_patterns(config.tensor, "configuration", "plan.tensor")
        self._configured_heads = {
            name: tuple(attributes)
            for heads in (own.heads, config.heads)
            for pattern, attributes in heads.items()
            for name in matching(self._names, pattern)
        }
        self._check_pairs()
        self._routed = tuple(parent_of(name) for name in experts if parent_of(name))
        if size != 1:
            self._prove()
        self._take_vocabulary()
        self._drop_unsplittable()
        self._follow_ties()

    def styles(self) -> dict[str, str]:
        """Return name of a module -> style, in the order of ``named_modules``."""
        return {n: self._styles[n] for n in self._names if self._styles.get(n, "none") != "none"}

    def source(self) -> str:
        """Describe where the styles come from, which modules are not split, why, and at what cost."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self._whole.items():
            reasons.setdefault(reason, []).append(name)
        left = [f"{', '.join(folded(names))}: {reason}{self._cost(names)}" for reason, names in reasons.items()]
        return "; left whole: ".join([", ".join(self._sources) or "not found", *left])

    def _cost(self, names: Iterable[str]) -> str:
        """Describe the additional memory per rank for the unsplit ``names``."""
        found = {id(p): p.numel() * p.element_size() for n in names for p in self._of(n).parameters()}
        more = sum(found.values()) * (1 - 1 / (self._size or 2))
        return f" ({more / 2**20:.1f} MiB more per rank)" if more >= 2**16 else ""

    # ---- sources --------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> nn.Module:
        return self._module.get_submodule(name)

    def _take_metadata(self) -> None:
        styles, self._whole = tensor_metadata(self._module)
        adapted = (structure.with_adapters(self._module, name, style) for name, style in styles.items())
        for name, style in [pair for each in adapted for pair in each.items()]:
            if structure.features_of(self._of(name)) is None and style != "vocabulary":
                continue  # stacked experts, or more than a projection
            if style == "colwise_gather" and self._block_of(name):
                self._whole[parent_of(name)] = "outputs are gathered within a block"
            else:
                self._styles[name] = style
        self._drop(n for n in list(self._styles) if parent_of(n) in self._whole)
        if self._styles:
            models = dict.fromkeys(type(model).__name__ for _, model in outermost_models(self._module))
            self._sources.append(f"Hugging Face metadata of {', '.join(models)}")

    def _take_patterns(self, patterns: Mapping[str, str], source: str, option: str) -> None:
        for pattern, style in patterns.items():
            names = matched(self._names, [pattern], option)
            self._styles.update(dict.fromkeys(names, style))
            self._explicit.update(names)
        if patterns:
            self._sources.insert(0, source)

    # ---- proof ----------------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Keep proven splits and add further ones, once for each kind of block."""
        units = [name for name in self._blocks if structure.owners(self._of(name), [])]
        units += structure.owners(self._module, [*units, *self._routed])
        while units:
            deeper: list[str] = []
            for kind in kinds_of(self._module, units):
                proof = self._proof_of(kind[0])
                if proof is None:
                    deeper += [inner for name in kind for inner in self._without_proof(name)]
                else:
                    self._prove_kind(kind, proof)
            units = deeper
        split = [n for n, style in self._styles.items() if style != "none"]
        self._whole = {n: why for n, why in self._whole.items() if not any(within(other, n) for other in split)}

    def _proof_of(self, name: str) -> Proof | None:
        sub = self._of(name)
        if isinstance(sub, nn.MultiheadAttention):
            return None
        traced = [self._trace.calls[name]] if name in self._trace.calls else []
        for call in (*traced, *calls_for(sub, self._ranks)):
            with suppress(Exception):  # the call does not fit
                return self._with_branches(Proof(sub, [call], self._ranks), sub, call)
        return None

    def _with_branches(self, proof: Proof, sub: nn.Module, call: BlockCall) -> Proof:
        """Add calls with optional arguments that use parameters which no other call uses."""
        calls = [call]
        for variant in variants_of(sub, call) if proof.unused else ():
            with suppress(Exception):  # the call does not fit
                further = Proof(sub, [variant, *calls], self._ranks)
                if further.unused < proof.unused:
                    proof, calls = further, [variant, *calls]
        return proof

    def _without_proof(self, name: str) -> list[str]:
        """Return the inner units of a unit that cannot run alone; ``nn.MultiheadAttention`` needs no proof."""
        sub, holder = self._of(name), parent_of(name)
        if isinstance(sub, nn.MultiheadAttention):
            if name not in self._styles:
                for guess in structure.attention_guess(self._of(holder), name.rpartition(".")[2], self._ranks):
                    self._accept(guess, [holder])
            return []
        inner = [joined(name, n) for n in structure.owners(sub, [])]
        if inner == [name] or not inner:
            self._whole |= dict.fromkeys(self._projections(name), "it cannot be run by itself, so nothing is proven")
        return [n for n in inner if n != name and not self._is_routed(n)]

    def _prove_kind(self, kind: list[str], proof: Proof) -> None:
        unit, prefix = self._of(kind[0]), f"{kind[0]}." if kind[0] else ""
        given = {n[len(prefix) :]: s for n, s in self._styles.items() if n.startswith(prefix)}
        accepted: list[Guess] = []
        for styles in _groups({n: s for n, s in given.items() if s != "none"}):
            holders, widths = dict.fromkeys(map(parent_of, styles)), self._widths(unit, styles)
            heads = structure.heads_of(holders, proof.reads, widths, self._ranks)
            found = self._first_proven(proof, prefix, accepted, [Guess(styles, chosen) for chosen in heads])
            if isinstance(found, Guess):
                accepted.append(found)
                continue
            names = [prefix + n for n in styles]
            if not self._explicit.isdisjoint(names):
                raise ValueError(
                    f"plan.tensor splits {', '.join(f'{n}: {self._styles[n]}' for n in names[:4])} over {self._ranks} "
                    f"ranks, and {kind[0] or 'the module'} does not compute the same then: {found}. Leave them whole "
                    "(none), name the attributes that count heads in plan.heads, or use tensor=1."
                )
            self._drop(joined(name, n) for name in kind for n in styles)
            given = {n: s for n, s in given.items() if n not in styles}
            self._whole |= dict.fromkeys(names, found)
        self._add_structure(kind, proof, accepted, set(given))
        for guess in accepted:
            self._accept(guess, kind)
        self.proofs.append((kind, proof, _plan_of(accepted)))
        for name, _ in structure.outer_calls(unit, dict(proof.projections)):
            if not self._is_routed(prefix + name) and not any(within(n, name) for g in accepted for n in g.styles):
                self._whole.setdefault(prefix + name, "nothing shows how it could be split")

    def _add_structure(self, kind: list[str], proof: Proof, accepted: list[Guess], taken: set[str]) -> None:
        prefix = f"{kind[0]}." if kind[0] else ""
        calls = [call for call in proof.projections if not self._is_routed(prefix + call[0])]
        for ways in structure.guesses(self._of(kind[0]), calls, proof.reads, self._ranks):
            if not self._block_of(kind[0]):  # a head with a norm is split along the vocabulary
                ways = [way for way in ways if not way.gathered]
            names = {name for guess in ways[:1] for name in guess.styles}
            if not names or not taken.isdisjoint(names):
                continue
            unproven = self._unproven(self._of(kind[0]), proof, ways[0].styles)
            found = unproven or self._first_proven(proof, prefix, accepted, ways)
            if isinstance(found, Guess):
                accepted.append(found)
                taken |= names
                self._sources += ["structure"] if "structure" not in self._sources else []
            elif too_few := self._indivisible(proof, ways[0].styles):
                accepted.append(too_few)
                taken |= names
            else:
                for name in names:
                    self._whole.setdefault(prefix + name, found)

    def _unproven(self, unit: nn.Module, proof: Proof, styles: Mapping[str, str]) -> str | None:
        """Return why a split is not proven: parameters beside it, of its width, that no call uses."""
        widths = {
            w for n, s in styles.items() if s == "rowwise" for w in structure.features_of(unit.get_submodule(n)) or ()
        }
        beside = [n for n in sorted(proof.unused) if any(within(n, parent_of(each)) for each in styles)]
        beside = [n for n in beside if not widths.isdisjoint(unit.get_parameter(n).shape)]
        return f"no run by itself uses {', '.join(beside[:4])}, which may need all features" if beside else None

    def _indivisible(self, proof: Proof, styles: Mapping[str, str]) -> Guess | None:
        """Return a split into more parts than heads, which validation refuses with the possible sizes."""
        owned = {owner: proof.reads.get(owner, {}) for owner in dict.fromkeys(map(parent_of, styles))}
        heads = {owner: {n: v for n, v in reads.items() if n in COUNTS_OF_HEADS} for owner, reads in owned.items()}
        bad = {owner: tuple(counts) for owner, counts in heads.items() if any(v % self._ranks for v in counts.values())}
        return Guess(styles, bad) if bad else None

    def _first_proven(self, proof: Proof, prefix: str, accepted: list[Guess], ways: list[Guess]) -> Guess | str:
        """Return the first of ``ways`` that is proven together with the accepted ones, else its problem."""
        problem = "nothing to split"
        for way in ways:
            way = self._with_configured_heads(way, prefix)
            verdict = proof.of(_splitting(_plan_of([*accepted, way])))
            if verdict.problem is None:
                return replace(way, summed=verdict.summed)
            problem = verdict.problem if way is ways[0] or problem == "nothing to split" else problem
        return problem

    def _with_configured_heads(self, way: Guess, prefix: str) -> Guess:
        given = {n[len(prefix) :]: heads for n, heads in self._configured_heads.items() if n.startswith(prefix)}
        mine = {n: heads for n, heads in given.items() if any(within(other, n) for other in way.styles)}
        return replace(way, heads={**way.heads, **mine})

    def _accept(self, guess: Guess, kind: list[str]) -> None:
        for name in kind:
            self._styles |= {joined(name, n): style for n, style in guess.styles.items()}
            self._together.append({joined(name, n) for n in guess.styles})
            self.heads |= {joined(name, n): heads for n, heads in guess.heads.items() if heads}
            self.narrow += [joined(name, n) for n in guess.narrow]
            self.gathered += [joined(name, n) for n in guess.gathered]
            self.summed += [joined(name, n) for n in guess.summed]

    @property
    def _ranks(self) -> int:
        return self._size or 2

    def _is_routed(self, name: str) -> bool:
        return any(within(name, outer) for outer in self._routed)

    def _projections(self, name: str) -> list[str]:
        found = [joined(name, n) for n, sub in self._of(name).named_modules() if structure.features_of(sub) is not None]
        return [n for n in found if n not in self._styles]

    def _widths(self, unit: nn.Module, styles: Mapping[str, str]) -> set[int]:
        shapes = [structure.features_of(unit.get_submodule(name)) for name in styles]
        return {width for shape in filter(None, shapes) for width in shape}

    def _take_vocabulary(self) -> None:
        """Split an embedding and the output head of the same vocabulary, if neither has a style."""
        if not any(base_style(style) in _COLUMNS for style in self._styles.values()):
            return
        free = [n for n in self._names if n not in self._styles and not self._block_of(n)]
        embeddings = [n for n in free if isinstance(self._of(n), nn.Embedding)]
        for head in [n for n in free if isinstance(self._of(n), nn.Linear)]:
            weight = self._of(head).weight
            alike = [n for n in embeddings if len(self._of(n).weight) == len(weight)]  # type: ignore[arg-type]
            if alike:
                tied = [n for n in alike if self._of(n).weight is weight]
                self._styles.update(dict.fromkeys(tied or alike[:1], "vocabulary") | {head: "colwise_gather"})
                return

    # ---- consistency ----------------------------------------------------------------------------------------------

    def _block_of(self, name: str) -> str | None:
        return next((block for block in self._blocks if within(name, block)), None)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._styles.pop(name, None)

    def _check_pairs(self) -> None:
        """Check that columns have rows, and rows have columns, in the same module or its parent."""
        unpaired = self._unpaired()
        configured = [name for name in unpaired if name in self._explicit]
        beside = [n for n in unpaired if any(self._block_of(n) == self._block_of(e) for e in self._explicit)]
        if configured or (beside and self._explicit):
            names = ", ".join(f"{n}: {self._styles[n]}" for n in (configured or beside)[:4])
            raise ValueError(
                f"plan.tensor cuts {names} without its counterpart: colwise modules need a rowwise one that takes "
                "their outputs, and a rowwise module needs colwise ones before it, in the same block. "
                "Give the counterpart its style, or leave all of them whole: none."
            )
        self._drop(unpaired)
        self._whole.update(dict.fromkeys(unpaired, "columns without rows"))

    def _unpaired(self) -> list[str]:
        holders: dict[str, list[str]] = {}
        for name, style in self._styles.items():
            if base_style(style) in (*_COLUMNS, "rowwise"):
                is_whole_attention = isinstance(self._of(name), nn.MultiheadAttention)
                holders.setdefault(name if is_whole_attention else parent_of(name), []).append(name)
        while lonely := [h for h, names in holders.items() if h and h not in self._blocks and not self._paired(names)]:
            deepest = max(lonely, key=lambda holder: holder.count("."))
            names = holders.pop(deepest)
            holders.setdefault(parent_of(deepest), []).extend(names)
        return [name for names in holders.values() if not self._paired(names) for name in names]

    def _paired(self, names: Collection[str]) -> bool:
        kinds = {base_style(self._styles[name]) == "rowwise" for name in names}
        return len(kinds) == 2

    def _drop_unsplittable(self) -> None:
        for name, style in list(self._styles.items()):
            reason = self._reason_against(name, style)
            if reason and name not in self._explicit:
                self._drop_together([name], reason)

    def _reason_against(self, name: str, style: str) -> str | None:
        if style not in ("vocabulary", "colwise_gather"):
            return None
        sub = self._of(name)
        length = len(sub.weight)  # type: ignore[arg-type]
        if isinstance(sub, nn.Embedding):
            if sub.max_norm is not None or sub.scale_grad_by_freq or sub.sparse:
                return "it has max_norm, scale_grad_by_freq or sparse"
            if type(sub).forward is not nn.Embedding.forward:
                return "it has a forward of its own"
            if used_functionally(self._module, name, self._blocks, self._trace):
                return "other code reads its weight"
        if self._size is not None and length % self._size:
            return f"its length {length} does not divide by {self._size}"
        return None

    def _follow_ties(self) -> None:
        """Drop the styles of tied parameters that are not all split, transitively."""
        while inconsistent := {name for group in tied_groups(self._module) for name in self._partly_split(group)}:
            self._drop_together(inconsistent, "it shares a parameter with what stays whole")

    def _drop_together(self, names: Collection[str], reason: str) -> None:
        for group in [{*names}, *(each for each in self._together if not each.isdisjoint(names))]:
            dropped = [name for name in group if name in self._styles and name not in self._explicit]
            self._drop(dropped)
            self._whole.update(dict.fromkeys(dropped, reason))

    def _partly_split(self, group: Collection[str]) -> list[str]:
        # A module registered several times counts once.
        owners = list(dict.fromkeys(self._canonical.get(id(self._of(parent_of(n))), "") for n in group))
        cut = [name for name in owners if self._styles.get(name, "none") != "none"]
        return [name for name in cut if name not in self._explicit] if len(cut) < len(owners) else []


def sequence_problems(draft: TensorDraft, whole_inputs: Collection[str], blocks: Collection[str]) -> list[str]:
    """Return the ``blocks`` that compute something different on a slice of the sequence, as problems."""
    problems = []
    for (first, *_), proof, plan in draft.proofs:
        if first not in blocks:
            continue
        inner = tuple(joined(UNIT, name[len(first) + 1 :]) for name in whole_inputs if within(name, first))
        verdict = proof.of(_splitting(replace(plan, blocks=(UNIT,), whole_inputs=inner), sequence_parallel=True))
        if verdict.problem is not None:
            problems.append(
                f"sequence_parallel=true: {starred(joined(first, verdict.mixing or ''))} does not compute the same on "
                f"a slice of the sequence ({verdict.problem}); split it in strategy.plan.tensor, or set "
                "sequence_parallel=false"
            )
    return list(dict.fromkeys(problems))


def _splitting(plan: ModelPlan, *, sequence_parallel: bool = False) -> Split:
    """Return a split of a proof's unit by :class:`TensorParallel`."""

    def split(module: nn.Module, group: dist.ProcessGroup) -> Mapping[str, Cut]:
        engine = TensorParallel(module, plan, group, sequence_parallel=sequence_parallel)
        parts: dict[int, nn.Parameter] = {}
        for name, cut in engine.cuts.items():
            owner = module.get_submodule(parent_of(name))
            own = name.rpartition(".")[2]
            whole = owner.get_parameter(own)
            owner._parameters[own] = parts.setdefault(id(whole), nn.Parameter(cut.part(whole.detach())))
        unit = module.get_submodule(UNIT)
        engine.apply(unit, unit)
        return engine.cuts

    return split


def _groups(styles: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield styles that belong together: those of a module with columns and rows, then all others."""
    holders: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        holders.setdefault(parent_of(name), {})[name] = style
    rest: dict[str, str] = {}
    for group in holders.values():
        if {base_style(style) == "rowwise" for style in group.values()} == {True, False}:
            yield group
        else:
            rest |= group
    if rest:
        yield rest


def _plan_of(accepted: list[Guess]) -> ModelPlan:
    def named(names: Mapping[str, Any]) -> dict[str, Any]:
        return {joined(UNIT, name): value for name, value in names.items()}

    return ModelPlan(
        tensor={n: s for guess in accepted for n, s in named(guess.styles).items()},
        heads={n: h for guess in accepted for n, h in named(guess.heads).items()},
        narrow=tuple(n for guess in accepted for n in named(dict.fromkeys(guess.narrow))),
        gathered=tuple(n for guess in accepted for n in named(dict.fromkeys(guess.gathered))),
    )
