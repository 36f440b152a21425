"""Gathering of a split module's parameters, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainwright.core.torch_internals import (
    _disable_current_modes,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from trainwright.strategies.base.certificate.determinism import Deterministic
from trainwright.strategies.base.certificate.state import WrittenWeights
from trainwright.strategies.base.certificate.written import WrittenParameter
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.plan.module_state import KeptObjects, ModuleState
from trainwright.strategies.state.assemble import Assembly
from trainwright.strategies.state.wholes import whole_on_device

_END = -1


class Supply:
    """Source of whole parameters, unit by unit, for the first rank of each group that shares samples.

    Args:
        parameters: of the module as written.
        units: names of the parameters of each unit.
        held: returns this rank's part of a parameter; ``None``: another stage holds it.
        dtypes: of the parameters by name.
        assembly: locations of parts.
        group: ranks that share samples, the requesting one first; ``None``: this rank alone.
        device: of the values.
    """

    def __init__(
        self,
        parameters: Sequence[WrittenParameter],
        units: Sequence[Sequence[str]],
        held: Callable[[str], Tensor | None],
        dtypes: Mapping[str, torch.dtype],
        assembly: Assembly,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.units = units
        self._shapes = {written.name: written.shape for written in parameters}
        # Aliases, since the parameters themselves stand for those as written meanwhile.
        parts = {name: held(name) for name in self._shapes}
        self._held = {name: None if part is None else part.detach() for name, part in parts.items()}
        self._dtypes, self._assembly = dtypes, assembly
        self._group, self._device = group, device

    @property
    def leads(self) -> bool:
        """True if this rank requests parameters."""
        return self._group is None or dist.get_rank(self._group) == 0

    def ask(self, unit: int) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole value of each parameter of ``unit`` on the leading rank; to be iterated to the end."""
        self._announce(unit)
        for name in self.units[unit]:
            whole = self._gather(name)
            assert whole is not None
            yield name, whole

    def end(self) -> None:
        """End :meth:`serve` of the other ranks, on the leading rank."""
        self._announce(_END)

    def serve(self) -> None:
        """Answer requests until the leading rank ends."""
        while (unit := self._announce(_END)) != _END:
            for name in self.units[unit]:
                self._gather(name)

    def _announce(self, unit: int) -> int:
        if self._group is None:
            return unit
        request = torch.tensor([unit], device=self._device)
        dist.broadcast(request, group=self._group, group_src=0)
        return int(request.item())

    @torch.no_grad()
    def _gather(self, name: str) -> Tensor | None:
        """Gather a parameter, at least on the leading rank."""
        assembly = self._assembly
        whole = None
        if assembly.owns(name):
            part, cut = self._gather_shards(name), assembly.cuts.get(name)
            whole = part if cut is None else cut.whole(part)
        owner = assembly.owners.get(name, 0)
        if assembly.pipeline is None or owner == 0 or not self._is_with_leader(assembly.pipeline):
            return whole
        # The leading rank is on the first stage.
        if whole is not None:
            dist.send(whole.contiguous(), group=assembly.pipeline, group_dst=0)
        elif self.leads:
            whole = torch.empty(self._shapes[name], dtype=self._dtypes[name], device=self._device)
            dist.recv(whole, group=assembly.pipeline, group_src=owner)
        return whole

    def _is_with_leader(self, pipeline: dist.ProcessGroup) -> bool:
        """Return whether the leading rank is in this rank's pipeline."""
        assert self._group is not None
        return dist.get_global_rank(pipeline, 0) == dist.get_global_rank(self._group, 0)

    def _gather_shards(self, name: str) -> Tensor:
        held = self._held[name]
        assert held is not None
        return whole_on_device(held).to(self._device)


class Streamed:
    """Parameters of the module as written that are in memory only while needed.

    Those outside of the blocks are always in memory. A block's are fetched before its forward, dropped after it, and
    fetched again for recomputation in backward. Those that user code reads elsewhere stay until the end.

    Args:
        supply: of values; unit 0 is outside of the blocks.
        parameters: of the module as written.
        trained: whether a parameter is trained, by name.
        dtypes: of the parameters by name.
        device: of the values.
        take: called with the name of a parameter and its gradient or a summand of it.
    """

    def __init__(
        self,
        supply: Supply,
        parameters: Sequence[WrittenParameter],
        trained: Mapping[str, bool],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        take: Callable[[str, Tensor], None],
    ) -> None:
        self._supply, self._take = supply, take
        self.parameters: dict[str, nn.Parameter] = {}
        self._hooks = []
        self._keeps_gradients = False
        for written in parameters:
            tensor = torch.empty(written.shape, dtype=dtypes[written.name], device=device)
            tensor.untyped_storage().resize_(0)
            parameter = nn.Parameter(tensor, requires_grad=trained[written.name])
            if parameter.requires_grad:
                self._hooks += [parameter.register_hook(hook) for hook in written.hooks]
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(partial(self._take_computed, written.name))
                )
            self.parameters[written.name] = parameter
        self._writes = WrittenWeights(self.parameters)
        self._places = {
            self.parameters[name].untyped_storage()._cdata: unit
            for unit, names in enumerate(supply.units)
            for name in names
        }
        self._filled: set[int] = set()
        self._pinned: set[int] = set()

    def _take_computed(self, name: str, parameter: Tensor) -> None:
        if not self._keeps_gradients:
            self._take_gradient(name, parameter)

    def _take_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._take(name, parameter.grad)
            parameter.grad = None

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Keep gradients in a ``with`` block of user code, which may read, change or drop those that it computes."""
        return with_attributes(self, _keeps_gradients=True)

    def take_kept(self) -> None:
        """Take the gradients that user code has left."""
        for name, parameter in self.parameters.items():
            self._take_gradient(name, parameter)

    def fill(self, unit: int) -> None:
        """Fetch the parameters of ``unit``, and drop those of other units that are not pinned."""
        if unit in self._filled:
            return
        for other in self._filled - self._pinned:
            self.release(other)
        with _disable_current_modes():  # not writes of user code
            for name, value in self._supply.ask(unit):
                parameter = self.parameters[name]
                storage = parameter.untyped_storage()
                storage.resize_(parameter.numel() * parameter.element_size())
                parameter.data.copy_(value)
        self._filled.add(unit)

    def release(self, unit: int) -> None:
        """Drop the values of ``unit``, unless they are pinned."""
        if unit in self._pinned or unit not in self._filled:
            return
        for name in self._supply.units[unit]:
            self.parameters[name].untyped_storage().resize_(0)
        self._filled.discard(unit)

    def close(self) -> None:
        """Free all memory explicitly, since tensor hooks hide references from the garbage collector."""
        self._pinned.clear()
        for unit in list(self._filled):
            self.release(unit)
        for hook in self._hooks:
            hook.remove()
        self.parameters.clear()
        self._writes = WrittenWeights({})

    def pin(self, unit: int) -> None:
        """Fetch ``unit`` and keep it until the end."""
        self.fill(unit)
        self._pinned.add(unit)

    def before(self, arguments: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Pin the units of an operator's arguments that are not in memory, and of tensors it writes to."""
        for tensor in arguments:
            if tensor.numel() and not tensor.is_meta and tensor.untyped_storage().nbytes() == 0:
                unit = self._places.get(tensor.untyped_storage()._cdata)
                if unit is not None:
                    self.pin(unit)
        for tensor in written:
            unit = self._places.get(tensor.untyped_storage()._cdata)
            if unit is not None:
                self.pin(unit)
                self._writes.before([tensor])

    def changed(self) -> set[str]:
        """Return names of parameters whose values user code has changed."""
        return self._writes.changed()

    @contextmanager
    def around(self, blocks: Sequence[nn.Module], randomness: Deterministic) -> Iterator[None]:
        """Fetch the parameters of each block (units 1, 2, ... in order) around its forward, in a ``with`` block."""
        with ExitStack() as stack:
            for unit, block in enumerate(blocks, 1):
                forward = self._streaming(unit, block, randomness)
                stack.enter_context(with_attributes(block, forward=forward))
            yield

    def _streaming(self, unit: int, block: nn.Module, randomness: Deterministic) -> Callable[..., Any]:
        forward = block.forward

        def run(before: _BlockInputs, *args: Any, **kwargs: Any) -> Any:
            self.fill(unit)
            with before.restored(), randomness.replaying_from(before.drawn):
                return forward(*args, **kwargs)

        def streamed(*args: Any, **kwargs: Any) -> Any:
            if peek_interpreter_stack() is not None:  # a transform of torch.func: nothing can be recomputed in it
                with temporarily_clear_interpreter_stack():
                    self.pin(unit)
                return forward(*args, **kwargs)
            before = _BlockInputs(randomness, block, (args, kwargs))
            try:
                if not torch.is_grad_enabled():
                    return run(before, *args, **kwargs)
                return checkpoint(
                    run,
                    before,
                    *args,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    determinism_check="none",
                    early_stop=False,  # its exception would end in functions that TorchScript has compiled
                    **kwargs,
                )
            finally:
                self.release(unit)

        return streamed


class _BlockInputs:
    """State and arguments of a block before its forward, restored for recomputation in backward."""

    def __init__(self, randomness: Deterministic, block: nn.Module, arguments: Any) -> None:
        self.drawn = randomness.drawn()
        self._block, self._arguments = block, arguments
        self._kept: tuple[ModuleState, KeptObjects] | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Record state and arguments around the first run; restore them for later runs."""
        now = ModuleState(self._block), KeptObjects(self._arguments)
        if self._kept is None:
            yield
            self._kept = now
            now[0].forget_unchanged()
            return
        for kept in self._kept:
            kept.restore()
        try:
            yield
        finally:
            for kept in now:
                kept.restore()
