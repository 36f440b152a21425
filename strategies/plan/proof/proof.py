"""Proof that a split module computes the same, by running a copy on virtual ranks.

Outputs, and gradients of all inputs and parameters, must equal those of the unsplit module. Weights are random, since
initial ones can hide errors (zeros of adapters, layer scales of 1e-5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.failures.error_text import first_line
from trainwright.core.torch_internals import _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.plan.proof.trace import BlockCall, ShapesOnly, is_larger, real_tensor, twin_of
from trainwright.strategies.plan.proof.virtual_ranks import run_virtual_ranks
from trainwright.strategies.plan.tensor_rules import is_attention, is_projection

# Largest difference relative to the largest element of the tensor. Float32 rounding is far below; dropping half of
# thousands of features from a norm is above.
_TOLERANCE = 5e-4
# Small gradients are compared relative to this fraction of the module's largest: cancelling sums are noise.
_SMALL = 0.05
# Larger modules (in parameters) are proven only by training ranks, not by planners without a process group.
_LARGEST = 2**24
# Name of the module in its holder.
UNIT = "unit"
# Splits the module called UNIT in a holder, as a rank of the group; returns the cuts of its parameters.
Split = Callable[[nn.Module, dist.ProcessGroup], Mapping[str, Cut]]


@dataclass(frozen=True)
class ProofVerdict:
    """Result of a proof.

    Args:
        problem: what differs; ``None``: nothing.
        summed: names of replicated parameters whose gradients must be summed over ranks.
        mixing: name of the first submodule whose output on a slice of the sequence differs; ``None``: none, or the
            module itself.
    """

    problem: str | None = None
    summed: frozenset[str] = frozenset()
    mixing: str | None = None


class _RaisedError(Exception):
    """An exception of a rank, and the submodule that raised it."""

    def __init__(self, where: str | None) -> None:
        super().__init__(where)
        self.where = where


@dataclass
class _Run:
    """Outputs and gradients, by name, of one run of a module."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    gradients: dict[str, Tensor]
    parts: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    mixing: list[str] = field(default_factory=list)


class Proof:
    """A module and its calls: run unsplit once, then split by each candidate.

    Args:
        module: unsplit, possibly on the meta device; not modified.
        calls: their arguments.
        size: number of ranks.

    Attributes:
        projections: names of its projections and attentions in the order of calls, each with an identifier of its
        input.
        reads: name of a submodule -> its integer attributes that were read in forward.
        unused: names of parameters that no call uses.

    Raises:
        Exception: if a call fails or has no finite outputs.
    """

    def __init__(self, module: nn.Module, calls: Sequence[BlockCall], size: int) -> None:
        self._size = size
        self._trusts = is_larger(module, _LARGEST) and not _trains()
        self.projections: list[tuple[str, object]] = []
        self.reads: dict[str, dict[str, int]] = {}
        self._between: dict[tuple[str, str], Tensor] = {}
        with _disable_current_modes():  # a planner may run under FakeTensorMode
            self._run_whole(module, calls)

    def _run_whole(self, module: nn.Module, calls: Sequence[BlockCall]) -> None:
        shapes = ShapesOnly(module) if self._trusts else None
        self._module = _with_random_weights(module) if shapes is None else shapes.twin
        if shapes is not None:
            self._listen(shapes.twin)
            for call in calls:
                shapes.run(call)
            projections = {f"{name}.weight" for name, sub in module.named_modules() if is_projection(sub)}
            self.unused = projections.difference(f"{name}.weight" for name, _ in self.projections)
            return
        self._calls = [_real(call) for call in calls]
        twin = _as_unit(twin_of(self._module, self._leaves()))
        self._listen(twin.get_submodule(UNIT))
        self._whole = _run(twin, self._calls)
        self.unused = {n for n, p in twin.get_submodule(UNIT).named_parameters() if p.requires_grad and p.grad is None}
        numbers = (*self._whole.outputs, *self._whole.gradients.values())
        if not self._whole.outputs or not all(bool(t.isfinite().all()) for t in numbers):
            raise ValueError("it has no finite outputs to compare")

    def of(self, split: Split, *, averaged: bool = False) -> ProofVerdict:
        """Compare the module split by ``split`` with the unsplit one.

        Args:
            split: called by each rank with its own copy.
            averaged: whether gradients must match after averaging over ranks (a split sequence) instead of per rank.
        """
        if self._trusts:
            return ProofVerdict()
        with _disable_current_modes():
            return self._tried(split, averaged)

    def _tried(self, split: Split, averaged: bool) -> ProofVerdict:
        try:
            runs = run_virtual_ranks(self._size, partial(self._work, split))
        except _RaisedError as error:
            return ProofVerdict(f"split, it raises {first_line(error.__cause__ or error)[:200]}", mixing=error.where)
        except Exception as error:
            return ProofVerdict(str(error))
        mixing = next((name for run in runs for name in run.mixing), None)
        return replace(self._judged(runs, averaged), mixing=mixing)

    def _leaves(self) -> dict[int, nn.Parameter]:
        return {id(p): nn.Parameter(p.detach(), p.is_floating_point()) for p in self._module.parameters()}

    def _work(self, split: Split, group: dist.ProcessGroup) -> _Run:
        twin = _as_unit(twin_of(self._module, self._leaves()))
        cuts = split(twin, group)
        watch = _Slices(self._between, group)
        for name, sub in twin.get_submodule(UNIT).named_modules():
            sub.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True)
            sub.register_forward_hook(partial(watch.leave, name))
        try:
            run = _run(twin, self._calls)
        except Exception as error:  # user code may raise anything for smaller tensors
            raise _RaisedError(next(iter(watch.mixing), watch.inside[-1] if watch.inside else None)) from error
        run.parts, run.mixing = {name: cut.part for name, cut in cuts.items()}, watch.mixing
        return run

    def _judged(self, runs: list[_Run], averaged: bool) -> ProofVerdict:
        whole = self._whole
        for run in runs:
            if problem := _output_problem(run, whole):
                return ProofVerdict(problem)
            inputs = () if averaged else zip(run.inputs, whole.inputs, strict=True)
            if any(_difference(*pair) > _TOLERANCE for pair in inputs):
                return ProofVerdict("gradients of inputs differ")
        summed = set()
        for name, wanted in whole.gradients.items():
            found = [run.gradients[name] for run in runs]
            found = [torch.stack(found).mean(0)] if averaged else found
            by = max(
                _difference(g, run.parts[name](wanted) if name in run.parts else wanted, self._floor)
                for g, run in zip(found, runs, strict=False)
            )
            if by <= _TOLERANCE:
                continue
            is_part = not averaged and name not in runs[0].parts
            if not is_part or _difference(torch.stack(found).sum(0), wanted, self._floor) > _TOLERANCE:
                return ProofVerdict(f"the gradient of {name.removeprefix(f'{UNIT}.')} differs by {by:.1e}")
            summed.add(name.removeprefix(f"{UNIT}."))
        return ProofVerdict(summed=frozenset(summed))

    @property
    def _floor(self) -> float:
        return _SMALL * max((float(g.abs().max()) for g in self._whole.gradients.values() if g.numel()), default=0.0)

    def _listen(self, unit: nn.Module) -> None:
        """Record which projections a copy calls, and which integers it reads."""
        kept: list[Tensor] = []

        def called(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = _first_tensor((args, kwargs))
            assert given is not None
            kept.append(given)  # so that its memory, which identifies it, is not reused
            place = (given.untyped_storage()._cdata, given.storage_offset(), given.shape[-1])
            self.projections.append((name, place))

        for name, sub in unit.named_modules():
            sub.register_forward_pre_hook(partial(_keep_input, self._between, name), with_kwargs=True)
            sub.register_forward_hook(partial(_keep_output, self._between, name))
            if is_attention(sub) or is_projection(sub):
                sub.register_forward_pre_hook(partial(called, name), with_kwargs=True)
            elif not type(sub).__module__.startswith("torch.nn."):
                _record_reads(sub, self.reads.setdefault(name, {}))


def _keep_input(kept: dict[tuple[str, str], Tensor], name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
    if (given := _first_tensor((args, kwargs))) is not None:
        kept.setdefault((name, "input"), given.detach().clone())


def _keep_output(kept: dict[tuple[str, str], Tensor], name: str, _: nn.Module, __: Any, output: Any) -> None:
    if (returned := _first_tensor(output)) is not None:
        kept.setdefault((name, "output"), returned.detach().clone())


def _first_tensor(value: Any) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)), None)


class _Slices:
    """Finder of submodules whose output on a slice of the sequence differs although their input does not.

    Args:
        whole: first input and output of each submodule of the unsplit module.
        group: of the ranks with slices.

    Attributes:
        mixing: names of these submodules, in the order of their returns.
        inside: stack of the submodules being called.
    """

    def __init__(self, whole: Mapping[tuple[str, str], Tensor], group: dist.ProcessGroup) -> None:
        self._whole, self._group = whole, group
        self._other_inputs: set[str] = set()
        self.mixing: list[str] = []
        self.inside: list[str] = []

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(name)
        if self._differs(name, "input", (args, kwargs)):
            self._other_inputs.add(name)

    def leave(self, name: str, *called: Any) -> None:
        self.inside.pop()
        if name not in self._other_inputs and self._differs(name, "output", called[2]):
            self.mixing.append(name)

    def _differs(self, name: str, side: str, found: Any) -> bool:
        whole, found, size = self._whole.get((name, side)), _first_tensor(found), self._group.size()
        if whole is None or found is None or found.dim() != whole.dim():
            return False
        dims = [dim for dim in range(1, whole.dim()) if whole.shape[dim] != found.shape[dim]]
        if len(dims) != 1 or found.shape[dims[0]] * size != whole.shape[dims[0]]:
            return False
        return _difference(found.detach(), whole.chunk(size, dims[0])[self._group.rank()]) > _TOLERANCE


def _record_reads(module: nn.Module, reads: dict[str, int]) -> None:
    """Record in ``reads`` which integer attributes of ``module`` are read."""
    kind = type(module)

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if type(value) is int:
            reads[name] = value
        return value

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


def _trains() -> bool:
    """Return whether this process is a training rank, not a planner with a fake process group."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def _as_unit(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.add_module(UNIT, module)
    return holder.train()


def _run(holder: nn.Module, calls: Sequence[BlockCall]) -> _Run:
    calls = [call.renewed() for call in calls]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        returned = [holder.get_submodule(UNIT)(*call.args, **call.kwargs) for call in calls]
        outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        torch.manual_seed(1)
        sum((leaf * torch.randn_like(leaf)).sum() for leaf in trained).backward()  # type: ignore[union-attr]
    inputs = [torch.zeros_like(t) if t.grad is None else t.grad for call in calls for t in call.tensors()]
    named = holder.named_parameters()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named if p.requires_grad}
    return _Run([leaf.detach() for leaf in outputs], inputs, gradients)


def _output_problem(run: _Run, whole: _Run) -> str | None:
    if len(run.outputs) != len(whole.outputs):
        return "it returns a different number of tensors"
    by = max(map(_difference, run.outputs, whole.outputs))
    return f"outputs differ by {by:.1e} of the largest" if by > _TOLERANCE else None


def _difference(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel() or torch.equal(found, wanted):
        return 0.0
    by = float((found.double() - wanted.double()).abs().max()) / max(float(wanted.abs().max()), floor, 1e-30)
    return math.inf if math.isnan(by) else by


# ---- weights and inputs -------------------------------------------------------------------------------------------


def _with_random_weights(module: nn.Module) -> nn.Module:
    """Return a copy with random float32 weights on the CPU and without dropout."""
    generator = torch.Generator().manual_seed(0)
    drawn = {id(p): _drawn(p, generator) for p in module.parameters()}
    twin = twin_of(module, drawn)
    for sub in twin.modules():
        for name, buffer in sub._buffers.items():
            sub._buffers[name] = None if buffer is None else _real_tensor(buffer.detach())
        for name, value in vars(sub).items():
            if isinstance(value, float) and (name == "p" or "drop" in name.lower()):
                setattr(sub, name, 0.0)
        sub._forward_hooks.clear()
    return twin


def _drawn(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    if not parameter.is_floating_point():
        return nn.Parameter(_real_tensor(parameter.detach()), requires_grad=False)
    value = torch.empty(parameter.shape).normal_(generator=generator)
    # Vectors scale and shift; initial zeros or tiny values must matter as well.
    return nn.Parameter(value.mul_(parameter.shape[-1] ** -0.5) if value.dim() > 1 else value.mul_(0.3).add_(1))


def _real(call: BlockCall) -> BlockCall:
    args, kwargs = pytree.tree_map_only(Tensor, _real_tensor, (call.args, dict(call.kwargs)))
    return BlockCall(args, kwargs)


def _real_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU, floats as float32; random if it depends on parameters, which may be all zeros."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if not tensor.requires_grad:
        return real_tensor(tensor).detach().to("cpu", dtype)
    return torch.randn(tensor.shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
