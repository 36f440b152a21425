"""Finds, in the first step, results that were computed from parameters of another stage and would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.pipeline.cut import PipelineCut

# Results of these do not depend on the values of any tensor.
_SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
# Of these, only the first argument's values count.
_FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


class Watch(TorchFunctionMode):
    """Follows what is computed from ghosts, as long as it is entered.

    Args:
        ghosts: id of each ghost -> name of the parameter.
        own: id of each parameter of an own block -> name; they may be used inside of their blocks only.
        phase: tells whether the run is ``before``, ``between`` or ``after`` the blocks.
        explain: makes the message for the wrong use of a parameter: ``explain(name, what, used_before)``.
        blocks: their names.
    """

    def __init__(
        self,
        ghosts: Mapping[int, str],
        own: Mapping[int, str],
        phase: Callable[[], str],
        explain: Callable[[str, str, bool], str],
        blocks: Sequence[str],
    ) -> None:
        super().__init__()
        self._ghosts, self._own, self._phase, self._explain = ghosts, own, phase, explain
        self._blocks = blocks
        self._tainted: Any = WeakIdKeyDictionary()
        self._used_before: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note whether its result depends on a ghost."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _SHAPE_ONLY:
            return output
        used = _tensors((args[:1], {}) if func in _FIRST_ONLY else (args, kwargs))
        source = next((name for tensor in used if (name := self._source(tensor)) is not None), None)
        results = _tensors(output)
        if func is Tensor.__setitem__ or "out" in kwargs:
            results += [tensor for tensor in (*args[:1], kwargs.get("out")) if isinstance(tensor, Tensor)]
        if source is None:
            self._check_own(used, results, func)
        elif results:
            self._taint(results, source, func)
        return output

    def enter_block(self, index: int, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Refuse arguments of an own block that were computed from ghosts; the context is that of its run.

        Raises:
            RuntimeError: with the name of the parameter.
        """
        block = self._blocks[index]
        for tensor in _tensors((args, kwargs)):
            source = self._source(tensor)
            if source is not None:
                what = f"what is computed from it is given to the block {block!r}"
                raise RuntimeError(self._explain(source, what, source in self._used_before))
        return self._suspended()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """Not watching, and not on torch's stack either, so that compiled code does not see it."""
        stack = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]
        for mode in stack:
            if mode is not self:
                torch._C._push_on_torch_function_stack(mode)
        try:
            yield
        finally:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in stack:
                torch._C._push_on_torch_function_stack(mode)

    def _source(self, tensor: Tensor) -> str | None:
        found: str | None = self._ghosts.get(id(tensor)) or self._tainted.get(tensor)
        return found

    def _taint(self, results: list[Tensor], source: str, func: Any) -> None:
        phase = self._phase()
        if phase == "before":
            self._used_before.add(source)
        if phase == "after":
            what = f"{getattr(func, '__name__', func)} uses it, or what is computed from it, after the blocks"
            raise RuntimeError(self._explain(source, what, source in self._used_before))
        for tensor in results:
            self._tainted[tensor] = source

    def _check_own(self, used: list[Tensor], results: list[Tensor], func: Any) -> None:
        name = next((self._own[id(tensor)] for tensor in used if id(tensor) in self._own), None)
        if name is None or not any(result.is_floating_point() for result in results):
            return
        raise RuntimeError(
            f"The parameter {name!r} of a block is used outside of it ({getattr(func, '__name__', func)}). A stage of "
            f"a pipeline has the parameters of its own blocks only, so the result would leave out the others (a "
            f"penalty over self.parameters(), say): use the optimizer's weight_decay, or pipeline=1."
        )


def make_watch(cut: PipelineCut, phase: Callable[[], str]) -> Watch:
    """A watch over the ghosts that stand in a cut module now.

    Args:
        cut: the cut of the module.
        phase: see :class:`Watch`.
    """
    ghosts, own = {}, {}
    inside = {id(module) for block in cut.blocks for module in block.modules()}
    for name in cut.holders:
        ghost = cut.ghosts.get(name)
        for owner, key in cut.slots(name):
            here = owner._parameters.get(key)
            # Not by its size: in an evaluation a parameter of one element stands here, as small as a ghost.
            if ghost is not None and owner.__dict__.get(key) is ghost:
                ghosts[id(ghost)] = name
            elif here is not None and all(id(module) in inside for module, _ in cut.slots(name)):
                own[id(here)] = name
    return Watch(ghosts, own, phase, lambda name, what, before: _explain(cut, name, what, before), cut.names)


def _explain(cut: PipelineCut, name: str, what: str, before: bool) -> str:
    stages = cut.holders[name]
    if name not in cut.outside:
        return (
            f"The parameter {name!r} of a block on stage {stages[0]} is used outside of its block: {what}. Another "
            f"stage does not have it. Use pipeline=1 for this model."
        )
    if stages == (0,) and "after" in what and not before:
        remedy = f"If it is used only there, move it from plan.first to plan.last: plan.last=[{name!r}]."
    elif "after" in what:
        remedy = (
            f"This model uses it before and after the blocks: name it in both, plan.first=[{name!r}] and "
            f"plan.last=[{name!r}], if it is used itself; a tensor computed before the blocks must not be used after "
            f"them, compute it anew."
        )
    elif 0 not in stages:
        remedy = f"It is used before the blocks: plan.first=[{name!r}]."
    else:
        remedy = (
            "Only the first stage has it. Blocks of other stages may get what is computed from the batch and from "
            "buffers, or what the block before returns; use pipeline=1 for this model."
        )
    given = " and ".join(part for part, stage in (("first", 0), ("last", cut.stages - 1)) if stage in stages)
    return f"The parameter {name!r} (of plan.{given}) is not on this stage of the pipeline, but {what}. {remedy}"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(item, Tensor) for item in value):
        return list(value)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
