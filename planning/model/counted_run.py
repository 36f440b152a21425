"""Operations, memory and traffic counted during one forward and backward of a module."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.callbacks.monitor.flops import operations_of
from trainwright.core.layout import Layout
from trainwright.core.torch_internals import TorchDispatchMode
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.planning.model.fake_run import autocast_of, loss_of
from trainwright.strategies.contract.communication.calls import CollectiveCall, listen
from trainwright.strategies.contract.communication.costs import least_bytes
from trainwright.strategies.contract.communication.meter import Sent, name_of

BEFORE, AFTER = "before", "after"
"""Phases of a run besides the indices of its blocks: before the first block, and after the last."""


class CountedRun:
    """One forward and backward of a module, and its costs.

    Args:
        module: whose `training_step` is run; unusable afterwards.
        blocks: of it, with their indices.
        batch: input of the step.
        layout: for which the module is cut.
        precision: of the group of that name.

    Attributes:
        phase: current phase: :data:`BEFORE`, the index of a block, or :data:`AFTER`.
        in_backward: whether backward is running.
        counter: of operations and memory.
        kept: bytes alive at the loss, by the phase that allocated them.
        boundaries: bytes of a block's output, by index.
        outputs: bytes of outputs of modules with parameters, by index.
        sent: by phase, then by axis and kind of collective; ``sent_forward`` is the part of forward.
        at_loss: bytes alive at the loss.
        entry: bytes alive when backward enters the last block.
        forward_block: peak within the forward of the last block, beyond what stays alive.
        forward_peak: peak of forward.
        head_peak: peak until backward enters the last block.
        block_peak, accumulating_peak: peak from then on; the second without weight gradients.
    """

    def __init__(
        self,
        module: LightningModule,
        blocks: Sequence[tuple[int, nn.Module]],
        batch: Any,
        layout: Layout,
        precision: str,
    ) -> None:
        self.blocks, self._layout = blocks, layout
        self.phase: Any = BEFORE if blocks else AFTER
        self.in_backward = False
        self.counter = OperationCounter(self)
        self.kept: dict[Any, int] = {}
        self.boundaries: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.sent: dict[Any, dict[tuple[str, str], Sent]] = {}
        self.sent_forward: dict[Any, dict[tuple[str, str], Sent]] = {}
        self.at_loss = self.entry = self.forward_block = 0
        self.forward_peak = self.head_peak = self.block_peak = self.accumulating_peak = 0
        self._graded: list[Tensor] = []
        for place, block in blocks:
            self._watch(place, block)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._graded.append)
        self.counter.ignore([*module.parameters(), *module.buffers(), *_tensors_in(batch)])
        self._run(module, batch, precision)

    def _run(self, module: LightningModule, batch: Any, precision: str) -> None:
        counter = self.counter
        with contextlib.ExitStack() as stack, counter:
            if dist.is_initialized():
                stack.callback(listen(self._count_collective))
            with autocast_of(precision):
                loss = loss_of(module.training_step(batch, 0))
            self.kept = counter.alive()
            self.sent_forward = {phase: dict(counts) for phase, counts in self.sent.items()}
            self.at_loss = counter.now
            self.forward_peak = counter.peak
            counter.reset_peak()
            self.phase = AFTER
            self.in_backward = True
            loss.backward()
        self._close_peaks()

    def _count_collective(self, call: CollectiveCall) -> None:
        ranks = call.group.size()
        if ranks == 1 or call.kind == "barrier":
            return
        counts = self.sent.setdefault(self.phase, {})
        key = name_of(dist.get_process_group_ranks(call.group), call.kind, self._layout), call.kind
        least = least_bytes(call.kind, call.size, ranks, call.place)
        counts[key] = counts.get(key, Sent()) + Sent(1, least, least)

    def _watch(self, place: int, block: nn.Module) -> None:
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.in_backward:
                return inner(*args, **kwargs)
            self.phase = place
            self.counter.block_peak = self.counter.now
            args, kwargs = pytree.tree_map(lambda leaf: self._hook_input(place, leaf), (args, kwargs))
            output = inner(*args, **kwargs)
            self.phase = AFTER
            self.forward_block = self.counter.block_peak - self.counter.now
            self.boundaries[place] = _bytes_in(output)
            first = next((leaf for leaf in _tensors_in(output) if leaf.requires_grad), None)
            if first is not None:
                first.register_hook(lambda gradient: self._enter_backward(place))
            return output

        block.forward = forward
        for part in block.modules():
            if any(parameter is not None for parameter in part._parameters.values()):
                part.register_forward_hook(lambda module, args, output: self._count_output(place, output))

    def _count_output(self, place: int, output: Any) -> None:
        if not self.in_backward:
            self.outputs[place] = self.outputs.get(place, 0) + _bytes_in(output)

    def _hook_input(self, place: int, leaf: Any) -> Any:
        """Register a hook on a block's input, whose gradient marks the end of the block's backward."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf:
            return leaf
        leaf.register_hook(lambda gradient: self._leave_backward(place))
        return leaf

    def _enter_backward(self, place: int) -> None:
        self._drop_gradients()
        self.phase = place
        if place == self.blocks[-1][0]:
            self.head_peak = self.counter.peak
            self.entry = self.counter.now
            self.counter.peak = self.counter.accumulating_peak = self.counter.now

    def _leave_backward(self, place: int) -> None:
        if self.phase == place:
            self._drop_gradients()
            self.phase = BEFORE

    def _drop_gradients(self) -> None:
        """Free gradients after the backward of each block; the memory model counts those that stay."""
        for parameter in self._graded:
            parameter.grad = None
        self._graded.clear()

    def _close_peaks(self) -> None:
        if not self.blocks or not self.entry:
            self.head_peak, self.entry, self.block_peak = self.counter.peak, self.at_loss, self.counter.peak
            self.accumulating_peak = self.counter.peak
        else:
            self.block_peak, self.accumulating_peak = self.counter.peak, self.counter.accumulating_peak

    @property
    def graded_bytes(self) -> int:
        """Bytes of existing weight gradients."""
        return sum(each.grad.nbytes for each in self._graded if each.grad is not None)


@dataclass(frozen=True)
class Counts:
    """Costs of forward or backward, by phase.

    Args:
        flops: arithmetic operations.
        calls: torch operations.
        moved: bytes read and written by operations other than matrix products.
    """

    flops: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))
    calls: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))
    moved: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))


class OperationCounter(TorchDispatchMode):
    """Counter of operations and live storages, by phase of a run.

    Args:
        run: whose ``phase``, ``in_backward`` and ``graded_bytes`` are read.

    Attributes:
        forward, backward: costs; recomputation counts as backward.
        now: bytes alive.
        peak: peak since :meth:`reset_peak`.
        block_peak: peak since the forward of a block began.
        accumulating_peak: peak of backward without weight gradients.
    """

    def __init__(self, run: CountedRun) -> None:
        super().__init__()
        self._run = run
        # id of a storage -> weak reference, phase that allocated it, bytes.
        self._seen: dict[int, tuple[Any, Any, int]] = {}
        self._ignored = WeakIdKeyDictionary()
        self.forward, self.backward = Counts(), Counts()
        self.now = self.peak = self.accumulating_peak = self.block_peak = 0

    def alive(self) -> dict[Any, int]:
        """Return the bytes alive by the phase that allocated them."""
        found: dict[Any, int] = {}
        for _, phase, size in list(self._seen.values()):
            found[phase] = found.get(phase, 0) + size
        return found

    def reset_peak(self) -> None:
        """Restart the peak."""
        self.peak = self.now

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Exclude tensors that exist before the run."""
        for tensor in tensors:
            self._ignored[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        before = self.now
        for tensor in _tensors_in(output):
            self._track(tensor)
        if self.now > before:
            self._raise_peaks()
        self._count(func, args, kwargs, output)
        return output

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen or storage in self._ignored:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, lambda _: self._on_gone(key)), self._run.phase, size
        self.now += size

    def _on_gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)[2]

    def _raise_peaks(self) -> None:
        self.peak, self.block_peak = max(self.peak, self.now), max(self.block_peak, self.now)
        if self._run.in_backward:
            self.accumulating_peak = max(self.accumulating_peak, self.now - self._run.graded_bytes)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        counts, phase = self.backward if self._run.in_backward else self.forward, self._run.phase
        counts.calls[phase] += 1
        operations = operations_of(func, args, kwargs, output, halve_causal=True)
        if operations:
            counts.flops[phase] += operations
        elif not _is_view(func):
            counts.moved[phase] += _bytes_in((args, kwargs, output))


def _is_view(func: Any) -> bool:
    """Return whether an operation moves no memory (views), or communicates, which is counted elsewhere."""
    schema = func._schema
    aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return aliases or func.namespace in ("c10d", "_c10d_functional", "fsdp") or not schema.returns


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_in(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors_in(tree))
