"""The tensor part of a plan: styles from all sources, made consistent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from trainwright.checkpoint.hugging_face import outermost_models
from trainwright.strategies.hugging_face import tensor_metadata
from trainwright.strategies.plan import PlanConfig, base_style
from trainwright.strategies.plan_names import folded, matched, parent_of, within
from trainwright.strategies.plan_outside import tied_groups, used_functionally
from trainwright.strategies.plan_structure import features_of, find_groups

_COLUMNS = ("colwise", "packed_colwise")


class TensorDraft:
    """Puts the tensor styles of a model together.

    Args:
        module: the whole model.
        said: the user's configuration.
        own: what the model's ``parallel_plan()`` says.
        blocks: names of all blocks, of whatever list: nothing is paired beyond one, no outputs are gathered in one.
        experts: names of the modules that hold experts.
        size: size of the tensor axis, or ``None`` if it is not known.

    Raises:
        ValueError: if the configuration names what does not exist, or splits columns without the rows that follow.
    """

    def __init__(
        self,
        module: nn.Module,
        said: PlanConfig,
        own: PlanConfig,
        blocks: tuple[str, ...],
        experts: tuple[str, ...],
        size: int | None,
    ) -> None:
        self._module = module
        self._blocks = blocks
        self._size = size
        self._names = [name for name, _ in module.named_modules() if name]
        self._canonical = {id(sub): name for name, sub in module.named_modules()}
        self._styles: dict[str, str] = {}
        self._explicit: set[str] = set()
        self._sources: list[str] = []
        self._whole: dict[str, str] = {}
        self._take_metadata()
        self._take_patterns(own.tensor, "parallel_plan()", "parallel_plan() tensor")
        self._take_patterns(said.tensor, "configuration", "plan.tensor")
        self._take_structure(tuple(parent_of(name) for name in experts if parent_of(name)))
        self._check_pairs()
        self._take_vocabulary()
        self._leave_whole()
        self._follow_ties()

    def styles(self) -> dict[str, str]:
        """Name of a module -> style, in the order of ``named_modules``."""
        return {n: self._styles[n] for n in self._names if self._styles.get(n, "none") != "none"}

    def fixed_heads(self) -> dict[str, tuple[str, ...]]:
        """Attributes that count heads in modules of torch's own that are split."""
        return {n: ("num_heads", "embed_dim") for n in self.styles() if isinstance(self._of(n), nn.MultiheadAttention)}

    def source(self) -> str:
        """Where the styles came from, and what stays whole and why."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self._whole.items():
            reasons.setdefault(reason, []).append(name)
        left = [f"{', '.join(folded(names))}: {reason}" for reason, names in reasons.items()]
        return "; left whole: ".join([", ".join(self._sources) or "not found", *left])

    # ---- sources --------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> nn.Module:
        return self._module.get_submodule(name)

    def _take_metadata(self) -> None:
        styles, self._whole = tensor_metadata(self._module)
        for name, style in styles.items():
            if features_of(self._of(name)) is None and style != "vocabulary":
                continue  # said of stacked experts
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

    def _take_structure(self, routed: tuple[str, ...]) -> None:
        added = False
        groups = find_groups(self._module, routed)
        found = {name for group in groups for name in group.styles}
        for group in groups:
            if not self._styles.keys().isdisjoint(group.styles):
                continue
            if any(not self._is_alike_in_all_blocks(name, found) for name in group.styles):
                self._whole.update(dict.fromkeys(group.styles, "it cannot be split in another block of its kind"))
                continue
            self._styles.update(group.styles)
            self._whole = {n: r for n, r in self._whole.items() if not any(parent_of(g) == n for g in group.styles)}
            added = True
        self._sources += ["structure"] if added else []

    def _is_alike_in_all_blocks(self, name: str, found: Collection[str]) -> bool:
        """Whether the same module of the other blocks was found too, unless what holds it there is something else.

        Blocks may hand on what depends on the split (T5's first one computes the position bias of all).
        """
        block = self._block_of(name)
        if block is None:
            return True
        inner = name[len(block) :]
        for other in self._blocks:
            holder = parent_of(other + inner)
            if parent_of(other) != parent_of(block) or other + inner in found or holder not in self._names:
                continue
            if type(self._of(holder)) is type(self._of(parent_of(name))) and other + inner in self._names:
                return False
        return True

    def _take_vocabulary(self) -> None:
        """An embedding and the output head of the same vocabulary, if both are there and nobody spoke of them."""
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
        """Columns need rows and rows need columns in the same module, or in the next one around both."""
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

    def _leave_whole(self) -> None:
        for name, style in list(self._styles.items()):
            reason = self._reason_against(name, style)
            if reason and name not in self._explicit:
                self._drop([name])
                self._whole[name] = reason

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
            if used_functionally(self._module, name, self._blocks):
                return "other code reads its weight"
        if self._size is not None and length % self._size:
            return f"its length {length} does not divide by {self._size}"
        return None

    def _follow_ties(self) -> None:
        """Names of one parameter are cut all or not at all; one that is left whole may be tied to the next."""
        while loose := {name for group in tied_groups(self._module) for name in self._loose(group)}:
            self._drop(loose)
            self._whole.update(dict.fromkeys(loose, "it shares a parameter with what stays whole"))

    def _loose(self, group: Collection[str]) -> list[str]:
        # A module that is registered in several places has one name here.
        owners = list(dict.fromkeys(self._canonical.get(id(self._of(parent_of(n))), "") for n in group))
        cut = [name for name in owners if self._styles.get(name, "none") != "none"]
        return [name for name in cut if name not in self._explicit] if len(cut) < len(owners) else []
