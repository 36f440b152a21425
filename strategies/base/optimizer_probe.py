"""Trial steps that show whether an optimizer's updates are element-wise.

The user's optimizer, with its own options but small tensors, steps them whole and in parts:

1. all tensors together, whole,
2. the first and the second part along each dim, separately: if a tensor comes out as in 1, its update is element-wise
and ranks may step their own parts,
3. the others, whole but alone: if they come out as in 1, a rank that has the whole tensor may step it.

An optimizer that fails 3 for a tensor, or calls its closure several times, cannot be divided.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.failures.error_text import named_line
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.randomness.state import kept_random_state

# Gradient scales of the trial steps: large ones show clipping by norm.
_SCALES = (10.0, 1.0, 0.1, 1.0)
# Learning rate of trials: schedules may start at zero, where no optimizer changes anything.
_RATE = 0.5
# Longest dim of a trial tensor by number of dims, long enough for behavior that depends on size.
_LONGEST = {1: 5000, 2: 160, 3: 24}
_LONGEST_OF_MORE = 12
# Largest relative difference that counts as rounding.
_ROUNDING = 2e-6

_Kind = tuple[int, tuple[int, ...]]
_Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Behaviour:
    """How an optimizer steps.

    Args:
        difference: kind of parameter (group index and shape with lengths above 1 as 2) -> largest relative difference
            between steps on parts and on the whole; missing kinds are element-wise.
        problem: why it cannot step other tensors than its own; ``None``: it can.
        joint: why its steps cannot be divided among ranks with different parameters; ``None``: they can.
        counted: names of the numeric options of groups that its steps change.
    """

    difference: Mapping[_Kind, float]
    problem: str | None = None
    joint: str | None = None
    counted: tuple[str, ...] = ()

    def is_elementwise(self, group: int, shape: Sequence[int]) -> bool:
        """Return whether a parameter of this group and (whole) shape may be stepped in parts."""
        return _kind(group, shape) not in self.difference


def study(optimizer: Optimizer, shape_of: Callable[[Tensor], Sequence[int]]) -> Behaviour:
    """Study the steps of ``optimizer`` without changing it or any random state.

    Args:
        optimizer: with parameters, before its first step.
        shape_of: returns the whole shape of a parameter held by the optimizer.
    """
    trial = _Trial(optimizer, _representatives(optimizer, shape_of))
    if not trial.kinds:
        return Behaviour({})
    with _without_trace(trial.device):
        return trial.behaviour()


def _kind(group: int, shape: Sequence[int]) -> _Kind:
    return group, tuple(min(length, 2) for length in shape)


def _representatives(optimizer: Optimizer, shape_of: Callable[[Tensor], Sequence[int]]) -> dict[_Kind, tuple[int, ...]]:
    """Return the shape of a representative tensor per kind of parameter: the largest, capped."""
    found: dict[_Kind, tuple[int, ...]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = tuple(shape_of(parameter))
            longest = _LONGEST.get(len(shape), _LONGEST_OF_MORE)
            capped = tuple(min(length, longest) for length in shape)
            kind = _kind(index, shape)
            found[kind] = tuple(map(max, capped, found.get(kind, capped)))
    return {kind: shape for kind, shape in found.items() if 0 not in shape}


class _Trial:
    """Steps of twins of an optimizer on two tensors of each kind, to detect reductions over several parameters."""

    def __init__(self, optimizer: Optimizer, shapes: Mapping[_Kind, tuple[int, ...]]) -> None:
        self.kinds = [kind for kind in shapes for _ in range(2)]
        self.extra_calls = 0  # of the closure, beyond one per step
        self._optimizer = optimizer
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        self.device = torch.device("cpu") if first is None or first.is_meta else local_tensor(first).device
        generator = torch.Generator().manual_seed(0)
        self._begin = [self._numbers(shapes[kind], generator) for kind in self.kinds]
        self._gradients = [[s * self._numbers(shapes[kind], generator) for kind in self.kinds] for s in _SCALES]
        self._parts: list[tuple[_Select, dict[int, Tensor]]] = []
        self._options: dict[tuple[int, str], float] = {}  # of the last twin

    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return normal numbers that grow along every dim, so that no two parts have the same norm."""
        numbers = torch.randn(shape, generator=generator)
        for dim, length in enumerate(shape):
            numbers *= torch.linspace(0.5, 2, length).view(-1, *[1] * (len(shape) - dim - 1))
        return numbers.to(self.device)

    def behaviour(self) -> Behaviour:
        name, everything = type(self._optimizer).__name__, range(len(self.kinds))
        before = torch.get_rng_state()
        try:
            whole, irregular = self._stepped(everything, _itself)
        except _KeptParameters:
            return Behaviour({}, f"{name} keeps parameters outside of its param_groups, where they cannot be exchanged")
        except Exception as error:  # whatever the user's class raises
            why = named_line(error).removesuffix(".")
            return Behaviour({}, f"{name} failed in a trial step on small dense tensors ({why})")
        if self.extra_calls > 0:
            calls, steps = self.extra_calls + len(_SCALES), len(_SCALES)
            return Behaviour({}, f"{name} called its closure {calls} times in {steps} trial steps")
        options, counted = self._options, self._counted()
        draws = " and draws random numbers" if not torch.equal(before, torch.get_rng_state()) else ""
        parted = {index: self._parted(index, whole[index]) for index in everything}
        for (group, key), value in options.items() if counted else ():
            found = self._options.get((group, key), math.nan)
            if key in counted and not math.isclose(found, value, rel_tol=_ROUNDING):
                return Behaviour(
                    {},
                    joint=f"a trial step of {name} sets the option {key!r} of its group to {value:.6g}, and on parts "
                    f"of the parameters to {found:.6g}: it uses values of several parameters at once{draws}",
                )
        differing = [index for index in everything if index in irregular or parted[index] > _ROUNDING]
        for index in differing:
            alone = _difference(self._try([index], _itself).get(index), whole[index])
            if alone > _ROUNDING:
                return Behaviour(
                    {},
                    joint=f"a trial step of {name} on parts of a {self._words(index)} differs from the step on the "
                    f"whole by {parted[index]:.0e}, and a step on it alone from one together with others by "
                    f"{alone:.0e}: it uses values of several parameters at once{draws}",
                )
        if differing and self._fails_empty():
            return Behaviour({}, joint=f"{name} fails in a trial step of an empty group, which some ranks would have")
        return Behaviour({self.kinds[index]: parted[index] for index in differing}, counted=counted)

    def _counted(self) -> tuple[str, ...]:
        """Return the options that the last twin changed; the learning rate is that of trials."""
        before = _numeric_options(self._optimizer.param_groups)
        return tuple(dict.fromkeys(k for (g, k), v in self._options.items() if k != "lr" and before.get((g, k)) != v))

    def _words(self, index: int) -> str:
        shape = self._begin[index].shape
        return f"{' x '.join(map(str, shape))} tensor" if len(shape) > 1 else "vector" if shape else "number"

    def _parted(self, index: int, whole: Tensor) -> float:
        """Return the largest difference between a tensor stepped whole and in parts along any dim."""
        if not self._parts:
            dims = range(max(1, min(3, max(tensor.dim() for tensor in self._begin))))
            selects = [select for dim in dims for select in _halves(dim)]
            self._parts = [(select, self._try(range(len(self.kinds)), select)) for select in selects]
        return max(_difference(stepped.get(index), select(whole)) for select, stepped in self._parts)

    def _try(self, indices: Sequence[int], select: _Select) -> dict[int, Tensor]:
        """Return the stepped tensors; empty if the optimizer fails on them."""
        try:
            return self._stepped(indices, select)[0]
        except Exception:  # whatever the user's class raises
            return {}

    def _fails_empty(self) -> bool:
        try:
            _twin(self._optimizer, [[] for _ in self._optimizer.param_groups]).step(closure=lambda: 0.0)
        except Exception:  # whatever the user's class raises
            return True
        return False

    def _stepped(self, indices: Sequence[int], select: _Select) -> tuple[dict[int, Tensor], set[int]]:
        """Return the stepped parts, and the indices of tensors whose state has another shape."""
        parameters = {index: nn.Parameter(select(self._begin[index]).clone()) for index in indices}
        groups: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        for index, parameter in parameters.items():
            groups[self.kinds[index][0]].append(parameter)
        twin = _twin(self._optimizer, groups)
        calls = 0

        def closure(gradients: Sequence[Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            for index, parameter in parameters.items():
                parameter.grad = select(gradients[index]).clone()
            return torch.ones((), device=self.device)

        for gradients in self._gradients:
            closure(gradients)  # an optimizer need not call it
            twin.step(closure=partial(closure, gradients))  # type: ignore[arg-type]
        self.extra_calls = calls - 2 * len(_SCALES)
        self._options = _numeric_options(twin.param_groups)
        after = {index: parameter.detach() for index, parameter in parameters.items()}
        return after, {index for index, p in parameters.items() if not _is_like(twin.state.get(p, {}), p)}


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _halves(dim: int) -> Iterator[_Select]:
    """Yield functions that select a first and a second part, of different lengths, of a long enough tensor."""

    def part(tensor: Tensor, is_first: bool) -> Tensor:
        along = min(dim, tensor.dim() - 1)
        if tensor.dim() == 0 or tensor.shape[along] < 2:
            return tensor
        length = max(1, tensor.shape[along] // 3)
        rest = tensor.shape[along] - length
        return tensor.narrow(along, 0, length) if is_first else tensor.narrow(along, length, rest)

    yield lambda tensor: part(tensor, True)
    yield lambda tensor: part(tensor, False)


def _difference(found: Tensor | None, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; infinite if not finite."""
    if found is None:
        return float("inf")
    size = expected.abs().max().clamp(min=1e-30)
    difference = float((found - expected).abs().max() / size)
    return difference if difference == difference else float("inf")


def _is_like(values: Any, parameter: Tensor) -> bool:
    """Return whether a parameter's state consists of scalars and tensors of its own shape."""
    for value in values.values():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            return False
        if isinstance(value, list | tuple | dict):
            return False
    return True


def _numeric_options(groups: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], float]:
    return {
        (index, key): float(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_meta)
    }


# ---- a twin of the optimizer -----------------------------------------------------------------------------------------


class _KeptParameters(Exception):  # noqa: N818
    """Optimizer that keeps its parameters outside of its groups."""


class _Memo(dict[int, Any]):
    """Memo of ``copy.deepcopy`` that refuses to copy parameters."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self._parameters = parameters

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self._parameters:
            raise _KeptParameters
        return super().get(key, default)


def _twin(optimizer: Optimizer, groups: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Return an optimizer of the same class and options for other parameters, sharing no mutable state.

    Copied by attributes, since a user's constructor may take any arguments.
    """
    memo = _Memo({id(p) for group in optimizer.param_groups for p in group["params"]})
    twin: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    twin.state = memo[id(optimizer.state)] = defaultdict(dict)
    twin.param_groups = memo[id(optimizer.param_groups)] = []
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        own: dict[str, Any] = {"params": list(parameters)}
        memo[id(group)], memo[id(group["params"])] = own, own["params"]
        twin.param_groups.append(own)
    for group, own in zip(optimizer.param_groups, twin.param_groups, strict=True):
        own.update((key, _copied(value, memo)) for key, value in group.items() if key != "params")
        if isinstance(own.get("lr"), float | int):
            own["lr"] = _RATE
        elif isinstance(own.get("lr"), Tensor):
            own["lr"].fill_(_RATE)
    for key, value in vars(optimizer).items():
        if key.startswith("_optimizer_"):  # hooks of steps and states
            setattr(twin, key, OrderedDict())
        elif key not in ("state", "param_groups", "step"):  # schedulers replace `step` to count calls
            setattr(twin, key, _copied(value, memo))
    return twin  # type: ignore[no-any-return]


def _copied(value: Any, memo: _Memo) -> Any:
    if isinstance(value, nn.Module):
        return value
    try:
        return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, AttributeError):  # process groups, locks and other objects without copies
        return value


@contextmanager
def _without_trace(device: torch.device) -> Iterator[None]:
    """Hide warnings and restore random states."""
    with kept_random_state(device), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield
