"""Whether a module computes the same when it is split: tried on a copy with random weights, by ranks of this process.

A split is proven if outputs, and gradients of all inputs and parameters, are those of the whole module. Weights are
drawn anew, since those of a new model hide errors (zeros of adapters, layer scales of 1e-5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.torch_internals import _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.plan.proof.trace import BlockCall, ShapesOnly, is_larger, real_tensor, twin_of
from trainwright.strategies.plan.proof.virtual_ranks import run_virtual_ranks
from trainwright.strategies.plan.tensor_rules import is_attention, is_projection

# Largest difference, as a part of the largest number of the tensor. Rounding in float32 stays far below; half of the
# features in a norm of thousands is above.
_TOLERANCE = 5e-4
# Gradients that are this part of the largest one of the module are compared by that one: sums that cancel are noise.
_SMALL = 0.05
# Parameters of a module beyond which a plan that is only looked at (there is no process group) is not proven: ranks
# that train prove it, and the certificate of their first batch stands behind.
_LARGEST = 2**24
# The place of the module in what is run.
UNIT = "unit"
# Splits what is given it, which holds the module as UNIT, as a rank of the group; returns how it cut parameters.
Split = Callable[[nn.Module, dist.ProcessGroup], Mapping[str, Cut]]


@dataclass(frozen=True)
class ProofVerdict:
    """What a proof has shown.

    Args:
        problem: what differs; ``None``: nothing does.
        summed: names of whole parameters of whose gradient each rank has a part of the sum.
        mixing: name of the first submodule that computes something else on a slice of the sequence; ``None``: the
            module's own code does, or none.
    """

    problem: str | None = None
    summed: frozenset[str] = frozenset()
    mixing: str | None = None


class _RaisedError(Exception):
    """What a rank raised, and in which submodule."""

    def __init__(self, where: str | None) -> None:
        super().__init__(where)
        self.where = where


@dataclass
class _Run:
    """What one run of a module gave: outputs, and gradients by name."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    gradients: dict[str, Tensor]
    parts: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    mixing: list[str] = field(default_factory=list)


class Proof:
    """One module and how it is called: run whole once, and split as often as it is asked for.

    Args:
        module: whole, possibly on the meta device; it does not change.
        call: how it is called.
        size: ranks among which it is split.

    Attributes:
        projections: names of the projections and attentions within it that were called, with which of them shared
            their input, in the order of calls.
        reads: name of a submodule -> its integer attributes that were read while it ran.

    Raises:
        Exception: if it cannot be called so, or gives no numbers to compare.
    """

    def __init__(self, module: nn.Module, call: BlockCall, size: int) -> None:
        self._size = size
        self._trusts = is_larger(module, _LARGEST) and not _trains()
        self.projections: list[tuple[str, object]] = []
        self.reads: dict[str, dict[str, int]] = {}
        self._between: dict[tuple[str, str], Tensor] = {}
        with _disable_current_modes():  # a planner may run its step without memory
            self._run_whole(module, call)

    def _run_whole(self, module: nn.Module, call: BlockCall) -> None:
        shapes = ShapesOnly(module) if self._trusts else None
        self._module = _with_random_weights(module) if shapes is None else shapes.twin
        self._call = _real(call) if shapes is None else call
        if shapes is not None:
            self._listen(shapes.twin)
            shapes.run(call)
            return
        twin = _as_unit(twin_of(self._module, self._leaves()))
        self._listen(twin.get_submodule(UNIT))
        self._whole = _run(twin, self._call)
        numbers = (*self._whole.outputs, *self._whole.gradients.values())
        if not self._whole.outputs or not all(bool(t.isfinite().all()) for t in numbers):
            raise ValueError("it gives no numbers that could be compared")

    def of(self, split: Split, *, averaged: bool = False) -> ProofVerdict:
        """Whether the module computes the same when ``split`` splits it.

        Args:
            split: called by each rank with a copy of its own.
            averaged: gradients are those of one process when they are averaged over the ranks (a split sequence), and
                not on each rank.
        """
        if self._trusts:
            return ProofVerdict()
        with _disable_current_modes():
            return self._tried(split, averaged)

    def _tried(self, split: Split, averaged: bool) -> ProofVerdict:
        try:
            runs = run_virtual_ranks(self._size, partial(self._work, split))
        except _RaisedError as error:
            cause = error.__cause__
            text = str(cause).strip() or type(cause).__name__
            return ProofVerdict(f"split, it raises {text.splitlines()[0][:200]}", mixing=error.where)
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
            run = _run(twin, self._call)
        except Exception as error:  # whatever the user's code raises when its tensors are smaller
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
        """Have a copy tell which projections it calls, and which integers it reads."""
        kept: list[Tensor] = []

        def called(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = _first_tensor((args, kwargs))
            assert given is not None
            kept.append(given)  # so that no other tensor gets its memory
            place = (given.untyped_storage()._cdata, given.storage_offset(), given.shape[-1])
            self.projections.append((name, place))

        for name, sub in unit.named_modules():
            sub.register_forward_pre_hook(partial(_keep_input, self._between, name), with_kwargs=True)
            sub.register_forward_hook(partial(_keep_output, self._between, name))
            if is_attention(sub) or is_projection(sub):
                sub.register_forward_pre_hook(partial(called, name), with_kwargs=True)
            elif not type(sub).__module__.startswith("torch.nn."):
                _tell_reads(sub, self.reads.setdefault(name, {}))


def _keep_input(kept: dict[tuple[str, str], Tensor], name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
    if (given := _first_tensor((args, kwargs))) is not None:
        kept.setdefault((name, "input"), given.detach().clone())


def _keep_output(kept: dict[tuple[str, str], Tensor], name: str, _: nn.Module, __: Any, output: Any) -> None:
    if (returned := _first_tensor(output)) is not None:
        kept.setdefault((name, "output"), returned.detach().clone())


def _first_tensor(value: Any) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)), None)


class _Slices:
    """Finds submodules whose outputs are other ones on a slice of the sequence though their inputs are the same.

    Args:
        whole: first input and output of each submodule of the whole module.
        group: of the ranks that hold slices.

    Attributes:
        mixing: their names, in the order in which they returned.
        inside: names of the submodules that have been called and have not returned.
    """

    def __init__(self, whole: Mapping[tuple[str, str], Tensor], group: dist.ProcessGroup) -> None:
        self._whole, self._group = whole, group
        self._fed_otherwise: set[str] = set()
        self.mixing: list[str] = []
        self.inside: list[str] = []

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(name)
        if self._differs(name, "input", (args, kwargs)):
            self._fed_otherwise.add(name)

    def leave(self, name: str, *called: Any) -> None:
        self.inside.pop()
        if name not in self._fed_otherwise and self._differs(name, "output", called[2]):
            self.mixing.append(name)

    def _differs(self, name: str, side: str, found: Any) -> bool:
        whole, found, size = self._whole.get((name, side)), _first_tensor(found), self._group.size()
        if whole is None or found is None or found.dim() != whole.dim():
            return False
        dims = [dim for dim in range(1, whole.dim()) if whole.shape[dim] != found.shape[dim]]
        if len(dims) != 1 or found.shape[dims[0]] * size != whole.shape[dims[0]]:
            return False
        return _difference(found.detach(), whole.chunk(size, dims[0])[self._group.rank()]) > _TOLERANCE


def _tell_reads(module: nn.Module, reads: dict[str, int]) -> None:
    """Note in ``reads`` which integer attributes of ``module`` are read."""
    kind = type(module)

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if type(value) is int:
            reads[name] = value
        return value

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


def _trains() -> bool:
    """Whether this process is a rank, and no planner with ranks that are not there."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def _as_unit(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.add_module(UNIT, module)
    return holder.train()


def _run(holder: nn.Module, call: BlockCall) -> _Run:
    call = call.renewed()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        output = holder.get_submodule(UNIT)(*call.args, **call.kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        torch.manual_seed(1)
        sum((leaf * torch.randn_like(leaf)).sum() for leaf in trained).backward()  # type: ignore[union-attr]
    inputs = [torch.zeros_like(t) if t.grad is None else t.grad for t in call.tensors()]
    named = holder.named_parameters()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named if p.requires_grad}
    return _Run([leaf.detach() for leaf in outputs], inputs, gradients)


def _output_problem(run: _Run, whole: _Run) -> str | None:
    if len(run.outputs) != len(whole.outputs):
        return "it returns something else"
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
    """A copy with float32 weights of a common size, on the CPU, in which nothing is dropped."""
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
    # Vectors scale and shift; what is zero or tiny at first must count as well.
    return nn.Parameter(value.mul_(parameter.shape[-1] ** -0.5) if value.dim() > 1 else value.mul_(0.3).add_(1))


def _real(call: BlockCall) -> BlockCall:
    args, kwargs = pytree.tree_map_only(Tensor, _real_tensor, (call.args, dict(call.kwargs)))
    return BlockCall(args, kwargs)


def _real_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU, floats as float32. What depends on parameters is drawn: those may be all zeros."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if not tensor.requires_grad:
        return real_tensor(tensor).detach().to("cpu", dtype)
    return torch.randn(tensor.shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
