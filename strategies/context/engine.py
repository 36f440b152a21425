"""Context parallelism: within the blocks, each rank of a group holds some positions of every sequence.

Hidden states are split before the first block and gathered after the last. Within a block everything except attention
works on each position alone; attention is replaced by one over the whole sequence
(:mod:`trainwright.strategies.context.attention`). Code between two blocks sees whole tensors of which each rank holds
its positions (:mod:`trainwright.strategies.context.slices`), except in pipelines, beside tensor parallelism and between
compiled blocks. Outside of the blocks all ranks of the group compute the same.

Gradients: the gathered output is used identically on every rank, so its gradient is this rank's rows times the number
of ranks; the input's gradient is zero in other ranks' rows. Averaged over the group, gradients of parameters inside and
outside of the blocks are those of one process.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.context.attention import DistributedAttention, Method, heads_problem
from trainwright.strategies.context.collectives import make_whole
from trainwright.strategies.context.documents import ATTENTION, document_attention
from trainwright.strategies.context.order import SequenceOrder
from trainwright.strategies.context.positions import Positions
from trainwright.strategies.context.slices import SequenceRows, SequenceSlice
from trainwright.strategies.contract.randomness.split import SplitRandomness, draws_randomly
from trainwright.strategies.plan.arguments import Arguments, arguments, call_of, first_tensor
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.tensor_rules import head_counts


def validate_context(module: nn.Module, plan: ModelPlan, size: int, method: str, tensor: int = 1) -> list[str]:
    """Return the problems of splitting the sequences of ``module`` over ``size`` ranks.

    Args:
        module: the whole model, possibly on the meta device.
        plan: its blocks.
        size: of the context axis.
        method: of attention.
        tensor: size of the tensor axis, which divides heads first; 1: off. Only known head counts are checked
            (:func:`~trainwright.strategies.plan.tensor_rules.head_counts`).
    """
    problems: list[str] = []
    if method == "ulysses":
        for heads, kv_heads in sorted(set(head_counts(module, plan).values())):
            problems += filter(None, [heads_problem(heads // tensor, max(kv_heads // tensor, 1), size)])
    for name, submodule in module.named_modules():
        config = getattr(submodule, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen not in (None, "sdpa", document_attention.__name__):
            problems.append(
                f"attn_implementation={chosen!r} of {name or type(module).__name__} with context={size} (allowed: "
                "'sdpa'; build the model with attn_implementation='sdpa')"
            )
        dropout = getattr(config, "attention_dropout", None)
        if method == "ring" and isinstance(dropout, float) and dropout > 0:
            problems.append(
                f"attention_dropout={dropout} of {name or type(module).__name__} with the context method 'ring' "
                "(allowed: 0; or use the method 'gather' or 'ulysses')"
            )
    return list(dict.fromkeys(problems))


class ContextParallel:
    """Context parallelism of a model over a process group.

    Block arguments of the whole sequence's length are split like hidden states: tables of positions ``(T, d)`` or
    ``(1 | B, T, d)``, ids ``(B, T)`` or ``(T,)``, other states ``(B, T, ...)``, also within tuples, lists and mappings.
    Square masks ``(..., T, T)`` and column masks ``(B, 1, 1, T)`` stay whole, since attention needs all columns. A
    square tensor is a mask if it is boolean, has four dims or its argument's name contains ``mask`` or ``bias``.

    Passes without gradient (validation, prediction, generation) run whole on every rank if their length cannot be split
    or if they fill a key-value cache. In training, blocks with dropout draw different random numbers on each rank,
    which also differ from those of one process.

    Args:
        module: the whole model.
        blocks: of this rank, in execution order.
        group: the ranks that share sequences.
        method: of attention.
        balance: balance the work of causal attention over ranks; lengths must then be a multiple of ``2 x size``, else
            of ``size``.
        enters: whether this rank has the model's first block, which receives whole hidden states.
        leaves: whether this rank has the model's last block, after which they are gathered. Other pipeline stages send
            split hidden states.
        split_outputs: keep outputs of blocks split up to the next block, and in training those of the last up to the
            loss, where that is exact; see :mod:`trainwright.strategies.context.slices`.
        further: returns the number of ranks of another axis that slice hidden states further (sequence parallelism);
            ``None``: 1.
        first: the model's first block if this rank does not have it (a pipeline stage), to get the length of passes
            without gradient; ``None``: these must be divisible.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        method: Method = "ring",
        balance: bool = True,
        enters: bool,
        leaves: bool,
        split_outputs: bool = False,
        first: nn.Module | None = None,
        further: Callable[[], int] | None = None,
    ) -> None:
        self.group = group
        self.order = SequenceOrder.of(group, balance)
        self.attention = DistributedAttention(group, self.order, method)
        self.split_outputs = split_outputs
        self._blocks, self._first = list(blocks), blocks[0] if enters else first
        self.enters, self._leaves = enters, leaves
        self._further = further or (lambda: 1)
        self._names = {id(submodule): name for name, submodule in module.named_modules()}
        self._whole_pass = False
        self.exchange = Exchange(self.attention, self._blocks)
        self.randomness = SplitRandomness(self.order.rank)
        self._cuts: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._slices_between = False
        # Block -> places of the arguments of its last call that were slices.
        self._sliced: dict[nn.Module, frozenset[int | str]] = {}

    def apply(self) -> None:
        """Replace ``forward`` of the blocks, and register the hooks that split and gather hidden states."""
        for block in self._blocks:
            positions = Positions(block, self._names[id(block)], self.order)
            for submodule in block.modules():
                if submodule is not block and _may_attend(submodule):
                    submodule.forward = _AttendingForward(self, submodule.forward, positions)
            block.forward = _BlockForward(self, block, self._names[id(block)], positions)
            # Before hooks of user code.
            block.register_forward_hook(self._leave, with_kwargs=True, prepend=True)
        if self._first is not None:
            self._first.register_forward_pre_hook(self._enter, with_kwargs=True)

    def slice_between(self) -> None:
        """Show slices to code between two blocks, where possible; once, after all other hooks are on the blocks.

        Hooks of FSDP do not take slices.
        """
        is_compiled = any(block._compiled_call_impl is not None for block in self._blocks)
        if self._slices_between or is_compiled or not (self.split_outputs and self.enters and self._leaves):
            return
        self._slices_between = True
        for block in self._blocks[1:]:
            block.register_forward_pre_hook(self._take, with_kwargs=True, prepend=True)

    @property
    def splits(self) -> bool:
        """True if sequences are split in the current pass."""
        return torch.is_grad_enabled() or not self._whole_pass

    def cut_others(self, block: nn.Module, names: Sequence[str], given: Arguments) -> Arguments:
        """Return the arguments, with all except the hidden states split to the positions of this rank.

        Args:
            block, names, given: of a block's call.
        """
        hidden, held = hidden_states(given), self.held_by(block, given)
        split = {hidden} | self._sliced.get(block, frozenset())
        return {
            place: value if place in split else self._cut(_name_at(names, place), value, held)
            for place, value in given.items()
        }

    def held_by(self, block: nn.Module, given: Arguments) -> int:
        """Return the number of positions of this rank, given the split hidden states of a block."""
        is_first = self.enters and block is self._first  # which slices hidden states further itself
        return int(given[hidden_states(given)].size(1)) * (1 if is_first else self._further())

    def forget_cuts(self) -> None:
        """Release tensors that were split for several blocks."""
        self._cuts.clear()

    def _cut(self, name: str, value: Any, held: int) -> Any:
        if not isinstance(value, Tensor | tuple | list | dict):
            return value
        return pytree.tree_map_only(Tensor, lambda tensor: self._cut_tensor(name, tensor, held), value)

    def _cut_tensor(self, name: str, tensor: Tensor, held: int) -> Tensor:
        length = held * self.order.size
        dim = sequence_dim(tensor, length, name)
        if dim is None:
            is_other_states = tensor.ndim == 3 and tensor.is_floating_point() and tensor.shape[1:] != (length,) * 2
            if is_other_states and tensor.size(1) == held:  # attention could not distinguish them from a part
                raise ValueError(
                    f"The argument {name!r} of a block, of shape {tuple(tensor.shape)}, has as many positions as a "
                    f"rank's part of the sequence, {held}, but is not a part of it. Pad it to another length, or use "
                    "another context size."
                )
            return tensor
        if tensor.requires_grad:
            return self.order.part(tensor, dim)
        key = (id(tensor), tensor._version, dim)
        if key not in self._cuts:
            self._cuts[key] = (tensor, self.order.part(tensor, dim))  # a reference, so that the id is not reused
        return self._cuts[key][1]

    @torch.compiler.disable
    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide whether to split this pass, and split its hidden states."""
        given = arguments(args, kwargs)
        states = given[hidden_states(given)]
        cached = _cached_positions(given)
        if torch.is_grad_enabled():
            self.order.check(states.size(1))
            if cached:
                raise ValueError(
                    "A block was given keys and values of earlier positions, which a split sequence cannot use in "
                    "training. Pass use_cache=False."
                )
        self._whole_pass = cached is not None or not self.order.divides(states.size(1))
        return self._take(block, args, kwargs) if self.enters else None

    @torch.compiler.disable
    def _take(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split hidden states that code between two blocks has made whole, and take this rank's part of slices."""
        if not self.splits:
            return None
        given = arguments(args, kwargs)
        place = hidden_states(given)
        slices = [at for at, value in given.items() if isinstance(value, SequenceSlice) and value.has_all_positions]
        self._sliced[block] = frozenset(slices)
        given |= {at: given[at].local for at in slices}
        given = pytree.tree_map_only(SequenceSlice, SequenceSlice.whole, given)
        return call_of(given if place in slices else {**given, place: self.order.part(given[place], 1)})

    @torch.compiler.disable
    def _leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Show outputs of blocks as slices; gather those of the last block where a slice is not exact."""
        is_last = self._leaves and block is self._blocks[-1]
        if not self.splits or not (is_last or self._slices_between):
            return None
        is_slice = not is_last or (self.split_outputs and block.training and torch.is_grad_enabled())
        show = partial(self._slice, not is_last) if is_slice else self._gather
        if isinstance(output, Tensor):
            return show(output)
        given = arguments(args, kwargs)
        held = given[hidden_states(given)].size(1)
        return pytree.tree_map_only(Tensor, lambda t: show(t) if t.ndim > 1 and t.size(1) == held else t, output)

    def _slice(self, re_enters: bool, part: Tensor) -> Tensor:
        length = part.size(1) * self.order.size
        return SequenceSlice(part, SequenceRows(self.group, self.order, length, 0, length, re_enters=re_enters))

    def _gather(self, part: Tensor) -> Tensor:
        return make_whole(part, self.group, self.order, 1)


def hidden_states(given: Arguments) -> int | str:
    """Return the place of the hidden states, the first tensor argument, whose positions are dim 1.

    Raises:
        TypeError: if there is no tensor.
    """
    return first_tensor(given, "A block was called without a tensor, so there are no hidden states to cut.")


def sequence_dim(tensor: Tensor, length: int, name: str) -> int | None:
    """Return the dim along which to split a block argument, by its shape; ``None``: leave it whole.

    Args:
        tensor: the argument, or a tensor within it.
        length: of the whole sequence.
        name: of the argument.
    """
    shape = tuple(tensor.shape)
    if len(shape) < 2:
        return 0 if shape == (length,) else None
    if shape[-2:] == (length, length):
        if tensor.dtype is torch.bool or len(shape) > 3 or "mask" in name or "bias" in name:
            return None
        is_table = tensor.is_floating_point() or tensor.is_complex()
        return 0 if len(shape) == 2 and is_table else 1
    if shape[1] == length:
        return 1
    if len(shape) == 2 and shape[0] == length:
        return 0
    return 2 if len(shape) == 4 and shape[2] == length else None


def _name_at(names: Sequence[str], place: int | str) -> str:
    """Return the name of a block argument; ``""`` if it is one of ``*args``."""
    if isinstance(place, str):
        return place
    return names[place] if place < len(names) else ""


def _cached_positions(given: Arguments) -> int | None:
    """Return the number of cached positions; ``None`` without a cache."""
    for value in given.values():
        if callable(getattr(value, "get_seq_length", None)):
            return int(value.get_seq_length())
    return None


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of the positional arguments of a class's ``forward``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _may_attend(module: nn.Module) -> bool:
    """Return whether a module may call attention: custom ones, and torch's attention modules."""
    is_torch = type(module).__module__.startswith("torch.nn.modules.")
    return not is_torch or isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)


class _AttendingForward:
    """``forward`` of a module inside a block, with split attention if recomputed on its own in backward."""

    def __init__(self, engine: ContextParallel, forward: Callable[..., Any], positions: Positions) -> None:
        self.engine = engine
        self.forward = forward
        self._positions = positions

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.engine.splits:
            return self.forward(*args, **kwargs)
        with self.engine.exchange, self._positions.counted():
            return self.forward(*args, **kwargs)


class _BlockForward:
    """``forward`` of a block on this rank's positions."""

    def __init__(self, engine: ContextParallel, block: nn.Module, name: str, positions: Positions) -> None:
        self.engine = engine
        self._positions = positions
        self.forward = block.forward
        self.name = name
        self._names = _argument_names(type(block).forward)
        self._block = block
        self._is_first, self._is_last = (block is engine._blocks[i] for i in (0, -1))
        self._is_checked = False
        self._draws = draws_randomly(block)

    @torch.compiler.disable(recursive=False)  # the block itself may be compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.engine.splits:
            return self.forward(*args, **kwargs)
        if not self._is_checked:
            return self._checked(args, kwargs)
        args, kwargs, is_entered = self._begin(args, kwargs)
        try:
            with self.engine.exchange, self._positions.counted():
                return self.forward(*args, **kwargs)
        finally:
            self._end(is_entered)

    @torch.compiler.disable
    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first call, with checks."""
        args, kwargs, is_entered = self._begin(args, kwargs)
        calls = self.engine.exchange.calls
        try:
            with self.engine.exchange, self._positions.watched():
                output = self.forward(*args, **kwargs)
        finally:
            self._end(is_entered)
        self._positions.check()
        if self.engine.exchange.calls == calls:
            raise RuntimeError(
                f"No scaled_dot_product_attention was called in block {self.name} while its sequence is split, so its "
                "positions did not see those of other ranks. Use attn_implementation='sdpa' with Hugging Face, "
                "need_weights=False with nn.MultiheadAttention; other kinds of attention and convolutions along the "
                "sequence need context=1."
            )
        self._is_checked = True
        return output

    @torch.compiler.disable
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Return the split arguments, and whether per-rank random numbers were entered."""
        if self._is_first:
            self.engine.forget_cuts()
        given = self.engine.cut_others(self._block, self._names, arguments(args, kwargs))
        self._positions.held = self.engine.held_by(self._block, given)
        draws = self._draws and self._block.training
        return *call_of(given), draws and self.engine.randomness.enter(given[hidden_states(given)].device)

    @torch.compiler.disable
    def _end(self, is_entered: bool) -> None:
        if is_entered:
            self.engine.randomness.leave()
        if self._is_last:
            self.engine.forget_cuts()


class _Attending(threading.local):
    """Active exchanges of this thread, since virtual ranks of a proof are threads."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []


_attending = _Attending()
_num_active = [0]  # in all threads


@torch.compiler.disable
def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Replace torch's attention while any exchange is active."""
    return _attending.exchanges[-1].attend(*args, **kwargs) if _attending.exchanges else ATTENTION(*args, **kwargs)


class Exchange:
    """Context manager that replaces torch's attention wherever the blocks look it up."""

    def __init__(self, attention: DistributedAttention, blocks: Sequence[nn.Module]) -> None:
        self._attention = attention
        classes = {base for block in blocks for m in block.modules() for base in type(m).__mro__}
        spaces = {id(F): vars(F)}
        for module in filter(None, (sys.modules.get(cls.__module__) for cls in classes)):
            spaces[id(module)] = vars(module)
        # torch.nn.functional, and modules that imported the function.
        known = (ATTENTION, _attend)
        self._places = [
            (space, n) for space in spaces.values() for n, value in space.items() if any(value is one for one in known)
        ]
        self._depth = 0
        self._is_fast = torch.backends.mha.get_fastpath_enabled()
        self.calls = 0

    @torch.compiler.disable
    def __enter__(self) -> None:
        """Replace attention; reentrant."""
        self._depth += 1
        if self._depth == 1:
            _attending.exchanges.append(self)
            _num_active[0] += 1
            # The fused kernel of evaluation in nn.TransformerEncoderLayer computes its attention itself.
            torch.backends.mha.set_fastpath_enabled(False)
            for space, name in self._places:
                space[name] = _attend

    @torch.compiler.disable
    def __exit__(self, *_: object) -> None:
        """Restore torch's attention."""
        self._depth -= 1
        if self._depth == 0:
            _attending.exchanges.remove(self)
            _num_active[0] -= 1
            torch.backends.mha.set_fastpath_enabled(self._is_fast and not _num_active[0])
            for space, name in self._places if not _num_active[0] else ():
                space[name] = ATTENTION

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention across ranks."""
        self.calls += 1
        return self._attention(*args, **kwargs)
