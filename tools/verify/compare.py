"""Comparison of two recorded runs (`trainwright.tools.verify.record`).

**Loss.** `|a - b| <= tolerance * |b|`, b of the one-process run.

**Gradients and parameters.** `|a - b| <= tolerance * max(|b|, FLOOR * largest)` in L2 norms of a whole tensor;
`largest` is the largest `|b|` of that step. The floor is for gradients that are zero except for rounding (the bias of
attention keys). A missing gradient is zero. With several optimizers only gradients of the stepped parameters are
compared.

**Excluded elements** of parameters, which are counted: those whose gradient in an earlier step was rounding only, that
is, different between the runs and in both at most `ROUNDING` times the largest gradient element of that step. Adam
turns such a gradient into a full step in an arbitrary direction.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.tools.verify.report import FirstDifference, LossDifference, TensorDifference

FLOOR = 1e-2
ROUNDING = 1e-6
_CHUNK = 2**20  # elements compared at a time


class Record:
    """Record of one run.

    Args:
        folder: written by `trainwright.tools.verify.record.Recorder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        self.ranks: list[dict[str, Any]] = [
            json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
            for rank in range(len(list(folder.glob("rank_*.json"))))
        ]

    @property
    def steps(self) -> int:
        """Number of recorded optimizer steps."""
        return int(self.run["steps"])

    @property
    def wave_size(self) -> int | None:
        """Samples that all ranks read at a time."""
        micro = self.run["micro_batch_size"]
        return None if micro is None else int(micro) * int(self.run["data_ranks"])

    def losses(self) -> list[float | None]:
        """Return the loss of every step, the mean over data ranks; None where no rank has one."""
        columns = zip(*(rank["losses"] for rank in self.ranks), strict=True)
        found = [[value for value in column if value is not None] for column in columns]
        return [sum(values) / len(values) if values else None for values in found]

    def has(self, kind: str, number: int) -> bool:
        """Return whether these tensors were recorded; several optimizers may step within one batch."""
        return (self.folder / f"{kind}_{number}.json").exists()

    def stepped(self, step: int) -> list[str] | None:
        """Return the names of the parameters of this step's optimizer; None: all, there is one optimizer."""
        names: list[str] | None = self.run["stepped"].get(str(step))
        return names

    def tensors(self, kind: str, number: int) -> "Tensors":
        """Return gradients or parameters by name, memory-mapped."""
        path = self.folder / f"{kind}_{number}"
        index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return {name: _mapped(path.with_suffix(".bin"), **where) for name, where in index.items()}


def _mapped(path: Path, offset: int, dtype: str, shape: list[int]) -> "np.ndarray[Any, Any]":
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", offset, tuple(shape) or (1,))


def compare_losses(
    layout: Sequence[float | None], reference: Sequence[float | None], tolerance: float
) -> list[LossDifference]:
    """Compare the losses of steps that both runs have."""
    found = []
    for step, (ours, theirs) in enumerate(zip(layout, reference, strict=False), 1):
        if ours is None or theirs is None:
            difference = 0.0 if ours is theirs else float("inf")
        else:
            difference = _relative(abs(ours - theirs), abs(theirs))
        found.append(LossDifference(step, theirs, ours, difference, bool(difference <= tolerance)))
    return found


Tensors = Mapping[str, "np.ndarray[Any, Any]"]


def exclude_rounding(masks: "dict[str, np.ndarray[Any, Any]]", layout: Tensors, reference: Tensors) -> None:
    """Exclude the elements whose gradient in a step was rounding only.

    Args:
        masks: parameter -> flat mask of its excluded elements, extended.
        layout: gradients by name.
        reference: gradients by name.
    """
    limit = ROUNDING * max((_largest(tensor) for tensor in reference.values()), default=0.0)
    for name, theirs in reference.items():
        ours = layout.get(name)
        if ours is None or ours.shape != theirs.shape:
            continue
        for start, a, b in _chunks(ours, theirs):
            mask = (a != b) & (np.maximum(np.abs(a), np.abs(b)) <= limit)
            if mask.any():
                masks.setdefault(name, np.zeros(theirs.size, bool))[start : start + mask.size] |= mask


def compare_steps(
    layout: Record, reference: Record, tolerance: float
) -> tuple[list[TensorDifference], list[TensorDifference]]:
    """Compare gradients and parameters of all steps that both runs recorded."""
    masks, gradients = dict[str, "np.ndarray[Any, Any]"](), list[TensorDifference]()
    parameters = compare_tensors(0, layout.tensors("parameters", 0), reference.tensors("parameters", 0), tolerance)
    for step in range(1, min(layout.steps, reference.steps) + 1):
        stepped = reference.stepped(step)
        ours, theirs = (_only(record.tensors("gradients", step), stepped) for record in (layout, reference))
        gradients += compare_tensors(step, ours, theirs, tolerance)
        exclude_rounding(masks, ours, theirs)
        if layout.has("parameters", step) and reference.has("parameters", step):
            ours, theirs = (record.tensors("parameters", step) for record in (layout, reference))
            parameters += compare_tensors(step, ours, theirs, tolerance, masks)
    return gradients, parameters


def _only(tensors: Tensors, names: Sequence[str] | None) -> Tensors:
    return tensors if names is None else {name: tensor for name, tensor in tensors.items() if name in names}


def compare_tensors(
    step: int, layout: Tensors, reference: Tensors, tolerance: float, masks: Tensors | None = None
) -> list[TensorDifference]:
    """Compare tensors by name, in the order of the reference; a missing one is zero.

    Args:
        step: of the tensors.
        layout: by name.
        reference: by name.
        tolerance: largest relative difference that passes.
        masks: see :func:`exclude_rounding`; None: no element is excluded.
    """
    names, masks = dict.fromkeys([*reference, *layout]), masks or {}
    measured = {name: _measure(layout.get(name), reference.get(name), masks.get(name)) for name in names}
    largest = max((norm for _, norm, _ in measured.values()), default=0.0)
    found = []
    for name, (distance, norm, factor) in measured.items():
        difference = _relative(distance, max(norm, FLOOR * largest))
        passed, left_out = bool(difference <= tolerance), int(masks[name].sum()) if name in masks else 0
        factor = None if passed else factor
        found.append(TensorDifference(step, name, distance, norm, difference, passed, left_out, factor))
    return found


def _measure(
    ours: "np.ndarray[Any, Any] | None", theirs: "np.ndarray[Any, Any] | None", mask: "np.ndarray[Any, Any] | None"
) -> tuple[float, float, float | None]:
    """Return the distance, the norm of the reference, and the factor between them if only the scale differs."""
    present = ours if theirs is None else theirs
    assert present is not None
    if ours is not None and theirs is not None and ours.shape != theirs.shape:
        return float("inf"), float(np.linalg.norm(theirs.ravel())), None
    squared_distance = squared_ours = squared_theirs = product = 0.0
    zeros = np.broadcast_to(np.zeros((), present.dtype), present.shape)
    for start, a, b in _chunks(zeros if ours is None else ours, zeros if theirs is None else theirs):
        if mask is not None:
            a = np.where(mask[start : start + a.size], b, a)
        squared_distance += float(np.sum((a - b) ** 2))
        squared_ours += float(np.sum(a * a))
        squared_theirs += float(np.sum(b * b))
        product += float(np.sum(a * b))
    return squared_distance**0.5, squared_theirs**0.5, _factor(product, squared_ours, squared_theirs)


def _factor(product: float, squared_ours: float, squared_theirs: float) -> float | None:
    if not (squared_ours > 0 and squared_theirs > 0):
        return None
    factor, rest = product / squared_theirs, 1 - product**2 / (squared_ours * squared_theirs)
    return factor if abs(rest) < 1e-6 and abs(factor - 1) > 1e-3 else None


def _chunks(
    ours: "np.ndarray[Any, Any]", theirs: "np.ndarray[Any, Any]"
) -> Iterator[tuple[int, "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]]:
    """Yield the start of each chunk, and both chunks in float64, flat."""
    for start in range(0, theirs.size, _CHUNK):
        a, b = (tensor.reshape(-1)[start : start + _CHUNK].astype(np.float64) for tensor in (ours, theirs))
        yield start, a, b


def _largest(tensor: "np.ndarray[Any, Any]") -> float:
    return float(max(-tensor.min(), tensor.max())) if tensor.size else 0.0


def _relative(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 else float("inf") if distance == distance else distance


# ---- samples ---------------------------------------------------------------------------------------------------------


def compare_samples(layout: Record, reference: Record) -> dict[int, str]:
    """Return the problem of each step, from 1, whose data ranks did not read each sample of one process once."""
    found, readers = dict[int, str](), _readers(layout)
    for step, of_one in enumerate(reference.ranks[0]["samples"], 1):
        by_rank = [rank["samples"][step - 1] if step <= len(rank["samples"]) else [] for rank in layout.ranks]
        texts = [*_unequal_sharers(readers, by_rank)]
        text = _compare_step([_flat(by_rank[ranks[0]]) if ranks else [] for ranks in readers], of_one)
        texts += [text, *_without_reader(readers)] if text else []
        if texts:
            found[step] = f"step {step}: samples differ: {'; '.join(texts)}"
    return found


def _readers(layout: Record) -> list[list[int]]:
    """Return the ranks of each data rank."""
    data_ranks = range(int(layout.run["data_ranks"]))
    return [[rank for rank, each in enumerate(layout.ranks) if each["data_rank"] == one] for one in data_ranks]


def _unequal_sharers(readers: Sequence[Sequence[int]], by_rank: Sequence[list[list[str]]]) -> Iterator[str]:
    """Yield ranks that share the samples of another (they split model or sequence) but read different ones."""
    for first, *others in filter(None, readers):
        for rank in others:
            if Counter(_flat(by_rank[first])) != Counter(_flat(by_rank[rank])):
                yield f"rank {rank} must read the samples of rank {first} but reads others"


def _without_reader(readers: Sequence[Sequence[int]]) -> Iterator[str]:
    most = max(readers, key=len)
    for data_rank, ranks in enumerate(readers):
        if not ranks:
            ranks_text = ", ".join(map(str, most))
            yield f"no rank reads as data rank {data_rank}, but ranks {ranks_text} all read as {readers.index(most)}"


def _compare_step(read: Sequence[list[str]], of_one: list[list[str]]) -> str | None:
    expected, given = Counter(_flat(of_one)), Counter(sample for each in read for sample in each)
    if given == expected:
        return None
    missing, total = expected - given, sum(expected.values())
    again = sum(count for sample, count in (given - expected).items() if sample in expected)
    foreign = sum((given - expected).values()) - again
    # A data rank reads every R-th micro-batch of the one-process run.
    due = [Counter(_flat(of_one[rank :: len(read)])) for rank in range(len(read))]
    wrong = [str(rank) for rank, each in enumerate(read) if Counter(each) != due[rank]]
    parts = [f"{again} read more than once"] if again else []
    parts += [f"{foreign} read from other steps"] if foreign else []
    parts += [f"{sum(missing.values())} of {total} not read"] if missing else []
    return f"data rank {', '.join(wrong)} read wrong samples ({', '.join(parts)})"


def _flat(micro_batches: Iterable[list[str]]) -> list[str]:
    return [sample for each in micro_batches for sample in each]


# ---- where it starts -------------------------------------------------------------------------------------------------


def find_start(
    problems: Sequence[str],
    samples: Mapping[int, str],
    losses: Sequence[LossDifference],
    gradients: Sequence[TensorDifference],
    parameters: Sequence[TensorDifference],
    execution: Sequence[str],
) -> FirstDifference | None:
    """Return the first difference: of the runs, then by step of samples, loss, gradients, parameters."""
    if problems:
        return FirstDifference(0, "run", None, None, f"before the first step: {problems[0]}")
    # Step 0 has parameters only. With several optimizers there are more steps than losses and samples.
    steps = {one.step for one in losses} | {one.step for one in (*gradients, *parameters)}
    for step in sorted(steps):
        of_gradients, of_parameters = ([one for one in of if one.step == step] for of in (gradients, parameters))
        if step in samples:
            return FirstDifference(step, "samples", None, None, f"at {samples[step]}")
        for loss in losses:
            if loss.step == step and not loss.passed:
                return _loss_start(loss, of_gradients, execution)
        start = _tensor_start("gradients", step, of_gradients, execution)
        start = start or _tensor_start("parameters", step, of_parameters, execution)
        if start is not None:
            return start
    return None


def _loss_start(
    loss: LossDifference, gradients: Sequence[TensorDifference], execution: Sequence[str]
) -> FirstDifference:
    text = f"at step {loss.step}, in the loss ({loss.difference:.1e}), with equal samples and parameters: in forward"
    failed = [one for one in gradients if not one.passed]
    if not failed:
        return FirstDifference(loss.step, "loss", None, None, text)
    worst = max(failed, key=lambda one: one.difference if one.difference == one.difference else float("inf"))
    first = _in_order(failed, execution)[0]
    module, parameter = module_of(first.name), first.name
    text += f"; gradients differ from module {module or '(root)'} on, most in {worst.name} ({worst.difference:.1e})"
    return FirstDifference(loss.step, "loss", module, parameter, text)


def _tensor_start(
    kind: str, step: int, differences: Sequence[TensorDifference], execution: Sequence[str]
) -> FirstDifference | None:
    failed = [one for one in differences if not one.passed]
    if not failed:
        return None
    first = _in_order(failed, execution)[0]
    module = module_of(first.name)
    when = "before the first step" if step == 0 else f"at step {step}"
    noun = {"gradients": "the gradient", "parameters": "the parameter"}[kind]
    text = f"{when}, in module {module or '(root)'}: {noun} {first.name} differs by {first.difference:.1e}"
    if first.factor is not None:
        text += f", it is {first.factor:.4g} times that of one process"
    others = len(failed) - 1
    if others:
        text += f"; so do {others} more of {len(differences)}"
    return FirstDifference(step, kind, module, first.name, text)


def module_of(parameter: str) -> str:
    """Return the name of the module that holds a parameter; "" for the root."""
    return parameter.rpartition(".")[0]


def _in_order(differences: Sequence[TensorDifference], execution: Sequence[str]) -> list[TensorDifference]:
    """Sort by first execution of the modules; those never seen running come last, in order of registration."""
    place = {name: number for number, name in enumerate(execution)}
    return sorted(differences, key=lambda one: place.get(module_of(one.name), len(place)))
