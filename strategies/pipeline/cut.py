"""Ownership of parameters by pipeline stages, and placeholders for those of other stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright.strategies.pipeline.tracing.absent import AbsentParameter
from trainwright.strategies.pipeline.tracing.block_values import HookRange, placeholder
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import within
from trainwright.strategies.plan.slots import Slot, find_slots


class PipelineCut:
    """Assignment of a module's parameters to pipeline stages. No communication.

    Parameters of a block belong to its stage, those of ``plan.first`` to the first stage and those of ``plan.last`` to
    the last; others to the first. Of two matching entries, the longer one wins; a parameter matched by both, or tied,
    has several holders, each of which computes a part of its gradient. Buffers stay on all stages.

    Args:
        module: the whole module; may be on the meta device.
        plan: provides ``blocks``, ``first`` and ``last``.
        spans: blocks of each stage, contiguous from 0 to the number of blocks.
        mine: stages of this rank.

    Attributes:
        blocks: in order.
        names: of the blocks.
        owned: names of this rank's parameters.
        holders: parameter name -> its stages, ascending.
        outside: names of parameters outside of the blocks.
        used_outside: names of parameters of blocks that code outside of them uses.
        ghosts: name of each parameter that this rank does not own -> its placeholder, once applied.
        buffer_stages: name of each buffer in a block, ``plan.first`` or ``plan.last`` -> the stage whose copy is valid
            (running statistics elsewhere are meaningless).
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, spans: Sequence[range], mine: Sequence[int]) -> None:
        self.module = module
        self.spans = list(spans)
        self.mine = sorted(mine)
        self.names = plan.blocks
        self.blocks = [module.get_submodule(name) for name in plan.blocks]
        self._plan = plan
        self._stage_of_block = [stage for stage, span in enumerate(self.spans) for _ in span]
        slots = find_slots(module)
        self._slots: dict[str, list[Slot]] = {name: slots[id(p)] for name, p in module.named_parameters()}
        self.holders = self._deal_out()
        own = set(self.mine)
        self.owned = frozenset(name for name, stages in self.holders.items() if own & set(stages))
        self.ghosts: dict[str, Tensor] = {}
        self._gaps: list[tuple[nn.Module, tuple[str, ...], dict[str, Any]]] | None = None
        self._names = {(id(owner), key): name for name, slots in self._slots.items() for owner, key in slots}
        self._order = [(sub, tuple(sub._parameters)) for sub in module.modules() if sub._parameters]
        self._trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self.used_outside: set[str] = set()
        self._first_engine_hook = RemovableHandle.next_id
        self.buffer_stages: Mapping[str, int] = {
            name: stages[0] for name, _ in module.named_buffers() if (stages := sorted(self._stages_of(name)))
        }

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.spans)

    def stage_of_block(self, index: int) -> int:
        """Return the stage that runs a block."""
        return self._stage_of_block[index]

    def owns_block(self, index: int) -> bool:
        """Return whether this rank runs a block."""
        return self._stage_of_block[index] in self.mine

    def slots(self, name: str) -> list[Slot]:
        """Return where a parameter is, or was, registered; several slots if tied."""
        return self._slots[name]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Return the trainable parameters of a stage of this rank, as registered now."""
        found = []
        for name, stages in self.holders.items():
            if stage in stages:
                owner, key = self._slots[name][0]
                parameter = owner._parameters.get(key)
                if parameter is not None and parameter.requires_grad:
                    found.append(parameter)
        return found

    def hold_also(self, name: str, stage: int) -> None:
        """Add a holder: another stage of a rank that holds the parameter; on all ranks alike."""
        self.holders[name] = tuple(sorted({*self.holders[name], stage}))

    def apply(self, device: torch.device | None = None) -> None:
        """Replace other ranks' parameters by ghosts, and forbid the forward of their blocks.

        A ghost is a tensor of zeros with the parameter's shape and dtype that takes no memory, in the module's
        ``__dict__``.

        Args:
            device: of ghosts of meta parameters; ``None``: the CPU.
        """
        self._first_engine_hook = RemovableHandle.next_id
        for name in self.holders:
            if name not in self.owned:
                owner, key = self._slots[name][0]
                parameter = getattr(owner, key)
                place = (device or torch.device("cpu")) if parameter.is_meta else parameter.device
                self._put_ghost(name, placeholder(parameter.shape, parameter.dtype, place))
        for index, block in enumerate(self.blocks):
            if not self.owns_block(index):
                block.forward = partial(_forbidden, self.names[index], self._stage_of_block[index])

    @cached_property
    def engine_hooks(self) -> HookRange:
        """Forward hooks registered since the cut was applied; read it after all engines have registered theirs."""
        return HookRange(self._first_engine_hook, RemovableHandle.next_id)

    def place_ghosts(self, device: torch.device, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        """Set the device and dtype of all ghosts."""
        for name, ghost in list(self.ghosts.items()):
            self._put_ghost(name, placeholder(ghost.shape, dtype_of(ghost), device))

    def put_ghost_back(self, name: str) -> None:
        """Restore the ghost of a parameter after a temporary value."""
        put(self._slots[name], self.ghosts[name])

    @contextmanager
    def registered_ghosts(self) -> Iterator[set[nn.Parameter]]:
        """Register ghosts as parameters, in the order of the whole module, inside.

        ``configure_optimizers`` may select parameters by position (``list(self.parameters())[::2]``), or find none to
        train on this stage.
        """
        made = {}
        for name, ghost in self.ghosts.items():
            zeros = torch.zeros((), dtype=ghost.dtype, device=ghost.device).expand(ghost.shape)
            made[name] = nn.Parameter(zeros, requires_grad=self._trained[name])
            for owner, key in self._slots[name]:
                owner.__dict__.pop(key, None)
                owner._parameters[key] = made[name]
        for owner, keys in self._order:
            _sort(owner, keys)
        try:
            yield set(made.values())
        finally:
            for name in made:
                self.put_ghost_back(name)

    @contextmanager
    def listed_ghosts(self) -> Iterator[None]:
        """Let code inside that iterates over parameters find those of other stages, in their order, without values.

        Else it would pair (``zip(a.parameters(), b.parameters())``) or add up what does not belong together.
        """
        if self._gaps is None:
            self._gaps = [(*each, gap) for each in self._order if (gap := self._gap(*each))]
        gaps = self._gaps
        for owner, keys, gap in gaps:
            is_partial = any(value is not None for value in owner._parameters.values())
            owner._parameters.update(gap)
            if is_partial:
                _sort(owner, keys)
        try:
            yield
        finally:
            for owner, _, gap in gaps:
                for key in gap:
                    owner._parameters.pop(key, None)

    def _gap(self, owner: nn.Module, keys: Iterable[str]) -> dict[str, Any]:
        """Return what stands for the absent parameters of a module, by their names in it."""
        names = {key: name for key in keys if (name := self._names.get((id(owner), key), "")) in self.ghosts}
        return {key: AbsentParameter.of(self.ghosts[name], name, self._trained[name]) for key, name in names.items()}

    def _put_ghost(self, name: str, ghost: Tensor) -> None:
        self.ghosts[name], self._gaps = ghost, None
        self.put_ghost_back(name)

    @property
    def outside(self) -> list[str]:
        """Names of parameters that are registered or used outside of the blocks."""
        inside = {id(module) for block in self.blocks for module in block.modules()}
        return [
            name
            for name in self.holders
            if name in self.used_outside or any(id(owner) not in inside for owner, _ in self._slots[name])
        ]

    def _deal_out(self) -> dict[str, tuple[int, ...]]:
        canonical = {id(parameter): name for name, parameter in self.module.named_parameters()}
        stages: dict[str, set[int]] = {name: set() for name in canonical.values()}
        for alias, parameter in self.module.named_parameters(remove_duplicate=False):
            stages[canonical[id(parameter)]] |= self._stages_of(alias)
        # Parameters without a rule are held by the first stage, from which they can be sent to any user.
        return {name: tuple(sorted(found or {0})) for name, found in stages.items()}

    def _stages_of(self, name: str) -> set[int]:
        for index, block in enumerate(self.names):
            if name.startswith(block + "."):
                return {self._stage_of_block[index]}
        first, last = (_longest_match(name, names) for names in (self._plan.first, self._plan.last))
        found = set()
        if first is not None and (last is None or first >= last):
            found.add(0)
        if last is not None and (first is None or last >= first):
            found.add(len(self.spans) - 1)
        return found


def _forbidden(name: str, stage: int, *_: Any, **__: Any) -> NoReturn:
    """Forward of a block owned by another stage, which the engine's gates never reach."""
    raise RuntimeError(
        f"The block {name!r} belongs to stage {stage} of the pipeline and cannot run on this rank. Call blocks as "
        "modules (block(x), not block.forward(x)), and only in training_step, validation_step, test_step or "
        "predict_step."
    )


def put(slots: Iterable[Slot], tensor: Tensor) -> None:
    """Set ``tensor`` as a plain attribute in place of a parameter."""
    for owner, key in slots:
        owner._parameters.pop(key, None)
        owner.__dict__[key] = tensor
        refresh_recurrent(owner)


def _sort(owner: nn.Module, keys: Iterable[str]) -> None:
    """Sort the parameters of a module as ``keys`` are; others follow."""
    ordered = {key: owner._parameters[key] for key in keys if key in owner._parameters} | owner._parameters
    owner._parameters.clear()
    owner._parameters.update(ordered)


def refresh_recurrent(owner: nn.Module) -> None:
    """Refresh the weight list of a recurrent layer, which would take other weights for new ones and move them."""
    names = getattr(owner, "_flat_weights_names", None)
    if names is not None:
        weights = [getattr(owner, name, None) for name in names]
        references = [None if each is None else weakref.ref(each) for each in weights]
        owner.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)


def _longest_match(name: str, prefixes: Iterable[str]) -> int | None:
    return max((len(prefix) for prefix in prefixes if within(name, prefix)), default=None)


class StageParameters(nn.Module):
    """Module for torch's stage that registers the parameters of one stage only.

    Looked up at every call, since other engines replace parameters.

    Args:
        cut: of the module.
        stage: of this rank.
    """

    def __init__(self, cut: PipelineCut, stage: int) -> None:
        super().__init__()
        self._find: Callable[[], list[nn.Parameter]] = lambda: cut.parameters_of(stage)

    def parameters(self, recurse: bool = True) -> Any:
        """Return the stage's trainable parameters."""
        return iter(self._find())
