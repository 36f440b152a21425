"""Dependency trace of one full run of a step, which shows what each stage must receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.randomness.state import random_state
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.tracing.block_values import FIRST_ONLY, READS_NUMBERS, READS_VALUES, SHAPE_ONLY
from trainwright.strategies.pipeline.value_spec import tensors_in


class Source(NamedTuple):
    """Origin of a value.

    Attributes:
        kind: ``batch``, ``state`` (an attribute of the module), ``parameter``, ``block`` (a tensor of its
            :class:`BlockValue`), ``hooked`` (an argument of a hook within a running block) or ``inside`` (another
            tensor computed within a block).
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
    """Return whether a value depends on the samples of a micro-batch."""
    return any(source.kind in _DATA for source in sources)


class DependencyTrace(TorchFunctionMode):
    """Traces the sources of values while entered.

    Args:
        cut: of the module.
        device: whose generator is checked beside those of the host.
        batch: whose tensors are samples.

    Attributes:
        blocks: number of blocks started: 0 before the first.
        inside: index of the running block; ``None`` between blocks.
        needs: for each stage, the sources of its blocks' arguments, or of the step's results.
        results: sources of the step's results and of Python's decisions.
        problems: why the step cannot run in a pipeline.
        draws: whether code outside of the blocks drew random numbers.
        joins: whether code after the blocks must run once per batch, since it keeps statistics of its samples.
        reads_numbers: whether Python read numbers that depend on samples.
        changed_objects: path and name of the lists and the like that the step changes.
        mutated: block values changed in place: right after the block (``True``) or later.
        used_by: parameter -> its first user, for messages.
    """

    def __init__(self, cut: PipelineCut, device: torch.device, batch: Any = None) -> None:
        super().__init__()
        self._cut, self._device = cut, device
        self._random: Any = None
        self.draws = self.joins = False
        self._listens = False
        self.problems: list[str] = []
        self._sources: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()  # sources of block values within the block
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
        self.changed_objects: list[tuple[str, str]] = []
        self.mutated: dict[Source, bool] = {}
        self.used_by: dict[str, str] = {}
        self.used_before: set[str] = set()
        for tensor in tensors_in(batch):
            self._sources[tensor] = frozenset({Source("batch")})
        self.refresh()

    def refresh(self) -> None:
        """Look up the parameters again: ZeRO replaces them during a step."""
        for name in self._cut.holders:
            for owner, key in self._cut.slots(name):
                for tensor in (owner._parameters.get(key), owner.__dict__.get(key)):
                    if isinstance(tensor, Tensor):
                        self._parameters[id(tensor)] = name
                        self._kept.append(tensor)  # so that its id is not reused

    def name_state(self, module: nn.Module) -> None:
        """Track the module's tensors beside its parameters."""
        for path, sub in module.named_modules():
            for name, tensor in (*vars(sub).items(), *sub._buffers.items()):
                if isinstance(tensor, Tensor) and id(tensor) not in self._parameters:
                    self._held[id(tensor)] = tensor
                    self._sources[tensor] = frozenset({Source("state", f"{path}.{name}" if path else name)})

    def of(self, value: Any) -> Sources:
        """Return the sources of the tensors in ``value``."""
        return _NONE.union(*(self._of(tensor) for tensor in tensors_in(value)))

    def inner_sources(self, value: Any) -> Sources:
        """Return the sources of the tensors in ``value`` within the block that computed them, if any."""
        return _NONE.union(*(self._made.get(tensor, self._of(tensor)) for tensor in tensors_in(value)))

    def _of(self, tensor: Tensor) -> Sources:
        name = self._parameters.get(id(tensor))
        found: Sources = self._sources.get(tensor, _NONE) if name is None else frozenset({Source("parameter", name)})
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and record the sources of its results."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        versions = [(tensor, tensor._version) for tensor in given if not tensor.is_inference()]
        # Normalization kernels write running statistics without a new version.
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
        self._record_use(func, sources)
        return output

    def _record_use(self, func: Any, sources: Sources) -> None:
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

    # Events of the traced step

    def enter_block(self, index: int, args: Any, kwargs: Any) -> None:
        """Record the call of a block, whose stage needs the arguments."""
        self.blocks = index + 1
        self.check_generators()
        self._record_mutations(lambda source: source.block == index - 1)
        self.needs[self._cut.stage_of_block(index)] |= self.of((args, kwargs))

    def running(self, index: int) -> AbstractContextManager[None]:
        """Mark a block of this rank as running inside."""
        return with_attributes(self, inside=index)

    def in_user_code(self) -> AbstractContextManager[None]:
        """Trace collectives of the user's step inside."""
        self.refresh()
        return with_attributes(self, _listens=True)

    def paused(self) -> AbstractContextManager[None]:
        """Ignore collectives inside, which exchange block values."""
        return with_attributes(self, _listens=False)

    def record_collective(self, kind: str, ranks: set[int]) -> None:
        """Record a problem if user code starts a collective between ranks of the pipeline."""
        if self._listens and len(ranks) > 1:
            self.problems.append(
                f"training_step calls a collective ({kind}) of ranks {sorted(ranks)} of one pipeline. Each stage runs "
                "its own part of the step, at its own time, and only the last one the code after the blocks, so they "
                "would deadlock. Use self.log(..., sync_dist=True) or self.all_gather, which use data-parallel ranks, "
                "or pipeline=1."
            )

    def hooks_begin(self, args: Any, output: Any) -> None:
        """Record the arguments of user hooks, to be replayed where the block is skipped."""
        self._block, self.inside = self.inside, None
        for tensor in tensors_in((args, output)):
            # The index in the block's value is known after the block.
            self._hooked.append((Source("hooked", block=self._block or 0, leaf=len(self._hooked)), tensor))
            self._sources[tensor] = frozenset({self._hooked[-1][0]})

    def hooks_end(self) -> None:
        """Resume the block after user hooks."""
        self.inside = self._block

    def leave_block(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Record the tensors of a block's value as its own from now on."""
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

    def check_generators(self) -> None:
        """Record whether a generator was used since the last check, or the last block."""
        before, self._random = self._random, random_state(self._device)
        if before is not None and any(not torch.equal(before[name], self._random[name]) for name in before):
            self.draws = True

    def use_results(self, value: Any) -> None:
        """Record a returned or logged value, which the last stage needs."""
        sources = self.of(value)
        self.results |= sources
        self.needs[-1] |= sources

    def finish(self) -> None:
        """Complete the trace: in-place changes, and hook arguments as block values."""
        self._record_mutations(lambda source: True)
        self.needs = [{self._known.get(source, source) for source in found} for found in self.needs]
        self.results = {self._known.get(source, source) for source in self.results}

    def _record_mutations(self, which: Callable[[Source], bool]) -> None:
        for source, tensor, version in self._values:
            if which(source) and source not in self.mutated and tensor._version != version:
                self.mutated[source] = source.block == self.blocks - 2


def explain(cut: PipelineCut, name: str, trace: DependencyTrace, stage: int) -> str:
    """Return the error of a parameter that cannot be sent to ``stage``."""
    given = " and ".join(
        part for part, holder in (("first", 0), ("last", cut.stages - 1)) if holder in cut.holders[name]
    )
    what = trace.used_by.get(name, "a block")
    return (
        f"The parameter {name!r} is held by the last stage of the pipeline (plan.{given or 'blocks'}), but stage "
        f"{stage} uses it too ({what}, {'before' if name in trace.used_before else 'between'} the blocks), and "
        f"parameters are sent from earlier to later stages only. Hold it on the first stage: plan.first=[{name!r}]."
    )
