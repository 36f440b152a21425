"""Follows, in one whole run of a step, what each piece of it is computed from, and so what each stage must be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.contract.randomness.state import random_state
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.first_step.block_values import FIRST_ONLY, READS_NUMBERS, READS_VALUES, SHAPE_ONLY
from trainwright.strategies.pipeline.form import tensors_in


class Source(NamedTuple):
    """What a value was computed from.

    Attributes:
        kind: ``batch``, ``state`` (an attribute of the module), ``parameter``, ``block`` (a tensor of its
            :class:`BlockValue`), ``hooked`` (given to a hook within a block, until the block has ended) or ``inside``
            (a tensor of a block that leaves it on another way).
        name: of the parameter or attribute.
        block: index of the block.
        leaf: index of the tensor in the block's value.
    """

    kind: str
    name: str = ""
    block: int = -1
    leaf: int = -1


Sources = frozenset[Source]
_NONE: Sources = frozenset()
_DATA = frozenset({"batch", "block", "hooked"})


def depends_on_data(sources: Sources) -> bool:
    """Whether the samples of a micro-batch had a part in a value."""
    return any(source.kind in _DATA for source in sources)


class Survey(TorchFunctionMode):
    """Notes what values are computed from, as long as it is entered.

    Args:
        cut: of the module.
        device: whose generator is looked at beside those of the host.
        batch: whose tensors are samples.

    Attributes:
        blocks: how many blocks have begun: 0 before the first.
        inside: index of the block that runs; ``None`` between blocks.
        needs: for each stage, what its blocks' arguments, or the step's results, were computed from.
        results: what the step's results and Python's decisions were computed from.
        problems: why the step cannot run in a pipeline.
        draws: whether code outside of the blocks drew random numbers.
        reads_numbers: whether Python was given numbers that depend on samples.
        mutated: block values that were changed in place: by what follows the block at once (``True``) or later on.
        used_by: parameter -> what used it first, for messages.
    """

    def __init__(self, cut: PipelineCut, device: torch.device, batch: Any = None) -> None:
        super().__init__()
        self._cut, self._device = cut, device
        self._random: Any = None
        self.draws = False
        self._listens = False
        self.problems: list[str] = []
        self._sources: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()  # of what blocks have left: before they did
        self._parameters: dict[int, str] = {}
        self._kept: list[Any] = []
        self._held: dict[int, Tensor] = {}
        self._values: list[tuple[Source, Tensor, int]] = []
        self._hooked: list[tuple[Source, Tensor]] = []
        self._known: dict[Source, Source] = {}
        self._block: int | None = None
        self.blocks, self.inside = 0, None  # type: int, int | None
        self.needs: list[set[Source]] = [set() for _ in range(cut.stages)]
        self.results: set[Source] = set()
        self.reads_numbers = False
        self.mutated: dict[Source, bool] = {}
        self.used_by: dict[str, str] = {}
        self.used_before: set[str] = set()
        for tensor in tensors_in(batch):
            self._sources[tensor] = frozenset({Source("batch")})
        self.refresh()

    def refresh(self) -> None:
        """Look up the parameters anew: ZeRO exchanges them while a step runs."""
        for name in self._cut.holders:
            for owner, key in self._cut.slots(name):
                tensor = owner._parameters.get(key)
                tensor = owner.__dict__.get(key) if tensor is None else tensor
                if isinstance(tensor, Tensor):
                    self._parameters[id(tensor)] = name
                    self._kept.append(tensor)  # its id must not be another's

    def name_state(self, module: nn.Module) -> None:
        """Follow the tensors that the module holds beside its parameters."""
        for path, sub in module.named_modules():
            for name, tensor in (*vars(sub).items(), *sub._buffers.items()):
                if isinstance(tensor, Tensor) and id(tensor) not in self._parameters:
                    self._held[id(tensor)] = tensor
                    self._sources[tensor] = frozenset({Source("state", f"{path}.{name}" if path else name)})

    def of(self, value: Any) -> Sources:
        """What the tensors in ``value`` were computed from."""
        return _NONE.union(*(self._of(tensor) for tensor in tensors_in(value)))

    def behind(self, value: Any) -> Sources:
        """What the tensors in ``value`` were computed from within the block that has left them, if one has."""
        return _NONE.union(*(self._made.get(tensor, self._of(tensor)) for tensor in tensors_in(value)))

    def _of(self, tensor: Tensor) -> Sources:
        name = self._parameters.get(id(tensor))
        found: Sources = self._sources.get(tensor, _NONE) if name is None else frozenset({Source("parameter", name)})
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what its results depend on."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        versions = [(tensor, tensor._version) for tensor in given if not tensor.is_inference()]
        # Kernels of normalisation write into running statistics without a new version.
        held = [(tensor, tensor.clone()) for tensor in given if id(tensor) in self._held]
        output = func(*args, **kwargs)
        if func in SHAPE_ONLY:
            return output
        used = tensors_in((args[:1], {})) if func in FIRST_ONLY else given
        sources = _NONE.union(*(self._of(tensor) for tensor in used))
        if self.inside is not None:
            sources |= {Source("inside", block=self.inside)}
        if not sources:
            return output
        changed = [tensor for tensor, version in versions if tensor._version != version]
        changed += [tensor for tensor, before in held if not torch.equal(tensor, before)]
        for tensor in (*tensors_in(output), *changed):
            if id(tensor) not in self._parameters:
                self._sources[tensor] = sources
        self._note_use(func, sources)
        return output

    def _note_use(self, func: Any, sources: Sources) -> None:
        if func in READS_NUMBERS and depends_on_data(sources):
            self.reads_numbers = True
        if self.inside is not None:
            return
        name = getattr(func, "__name__", str(func))
        for source in sources:
            if source.kind == "parameter":
                self.used_by.setdefault(source.name, name)
                if self.blocks == 0:
                    self.used_before.add(source.name)
        if func in READS_VALUES:
            self.results |= sources
            for stage, span in enumerate(self._cut.spans):
                if span.stop >= self.blocks:
                    self.needs[stage] |= sources

    # What the run of the step tells

    def enter_block(self, index: int, args: Any, kwargs: Any) -> None:
        """A block is called: its stage needs the arguments."""
        self.blocks = index + 1
        self.look_at_generators()
        self._note_changes(lambda source: source.block == index - 1)
        self.needs[self._cut.stage_of_block(index)] |= self.of((args, kwargs))

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Around the run of a block of this rank."""
        self.inside = index
        try:
            yield
        finally:
            self.inside = None

    @contextmanager
    def in_user_code(self) -> Iterator[None]:
        """Around the user's step."""
        self.refresh()
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what ranks tell each other of a block."""
        before, self._listens = self._listens, False
        try:
            yield
        finally:
            self._listens = before

    def hear(self, kind: str, ranks: set[int]) -> None:
        """A collective begins, of these ranks of the pipeline."""
        if self._listens and len(ranks) > 1:
            self.problems.append(
                f"training_step calls a collective ({kind}) in which ranks {sorted(ranks)} of one pipeline take part. "
                f"Each stage runs its own part of the step, at its own time, and the last one alone what follows the "
                f"blocks, so they would wait for each other for ever. Use self.log(..., sync_dist=True) or "
                f"self.all_gather, which go over the ranks with other samples, or pipeline=1."
            )

    def hooks_begin(self, args: Any, output: Any) -> None:
        """The user's hooks see these tensors, as they will where the block is skipped."""
        self._block, self.inside = self.inside, None
        for tensor in tensors_in((args, output)):
            # Its place in the block's value is known once the block has ended.
            self._hooked.append((Source("hooked", block=self._block or 0, leaf=len(self._hooked)), tensor))
            self._sources[tensor] = frozenset({self._hooked[-1][0]})

    def hooks_end(self) -> None:
        """The block goes on."""
        self.inside = self._block

    def leave_block(self, index: int, tensors: Sequence[Tensor]) -> None:
        """The tensors of a block's value are known from here on as its own."""
        for leaf, tensor in enumerate(tensors):
            if id(tensor) in self._parameters:
                continue
            source = Source("block", block=index, leaf=leaf)
            self._known.update({seen: source for seen, hooked in self._hooked if hooked is tensor})
            self._made[tensor] = self._of(tensor)
            self._sources[tensor] = frozenset({source})
            if not tensor.is_inference():
                self._values.append((source, tensor, tensor._version))
        self._hooked.clear()
        self._random = random_state(self._device)

    def look_at_generators(self) -> None:
        """Note whether one was used since this was called, or a block was left."""
        before, self._random = self._random, random_state(self._device)
        if before is not None and any(not torch.equal(before[name], self._random[name]) for name in before):
            self.draws = True

    def use_results(self, value: Any) -> None:
        """The step returns or logs ``value``: the last stage needs what it was computed from."""
        sources = self.of(value)
        self.results |= sources
        self.needs[-1] |= sources

    def finish(self) -> None:
        """Note what was changed in place since it was left, and what hooks were given as the block's."""
        self._note_changes(lambda source: True)
        self.needs = [{self._known.get(source, source) for source in found} for found in self.needs]
        self.results = {self._known.get(source, source) for source in self.results}

    def _note_changes(self, which: Callable[[Source], bool]) -> None:
        for source, tensor, version in self._values:
            if which(source) and source not in self.mutated and tensor._version != version:
                self.mutated[source] = source.block == self.blocks - 2


def explain(cut: PipelineCut, name: str, survey: Survey, stage: int) -> str:
    """Why a parameter that ``stage`` needs cannot be sent to it, and what to type."""
    given = " and ".join(
        part for part, holder in (("first", 0), ("last", cut.stages - 1)) if holder in cut.holders[name]
    )
    what = survey.used_by.get(name, "a block")
    return (
        f"The parameter {name!r} is held by the last stage of the pipeline (plan.{given or 'blocks'}), but stage "
        f"{stage} uses it too ({what}, {'before' if name in survey.used_before else 'between'} the blocks), and "
        f"parameters travel from earlier stages to later ones only. Hold it on the first stage: "
        f"plan.first=[{name!r}]."
    )
