"""Merging of DeepSpeed ZeRO's flat partitions into named weights, optimizer state and parameter groups.

In stages 1 and 2 each parameter group is one flat tensor, padded and split evenly among the ranks. In stage 3 each
parameter is split, and a rank's parts are in one or more flat tensors, its sub-groups. The optimizer only saw these
flat tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainwright.checkpoint.foreign.unpickle import Inert


class FlatTensor:
    """A tensor that is assembled from pieces when it is read.

    Args:
        shape: its shape.
        pieces: 1-dimensional tensors of one dtype whose concatenation has its values, and perhaps padding at the end;
            mostly views of memory-mapped files. None for an empty tensor.
        dtype: its dtype, if there are no pieces.

    Raises:
        ValueError: if the pieces have fewer values than the shape.
    """

    def __init__(self, shape: Sequence[int], pieces: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.shape = tuple(shape)
        self.dtype = pieces[0].dtype if pieces else dtype
        self._pieces = tuple(pieces)
        held = sum(piece.numel() for piece in pieces)
        if any(length < 0 for length in self.shape) or held < math.prod(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} has only {held} values")

    @classmethod
    def whole(cls, tensor: Tensor) -> FlatTensor:
        """Wrap a tensor in one piece."""
        return cls(tensor.shape, [tensor.reshape(-1)], tensor.dtype)

    def read(self) -> Tensor:
        """Return the tensor, contiguous, in memory of its own."""
        if not self._pieces:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.cat(self._pieces)[: math.prod(self.shape)].reshape(self.shape).to(self.dtype)


def cut(flats: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Return the pieces with ``length`` values from ``start`` of the concatenation of flat tensors.

    Raises:
        ValueError: if they have fewer.
    """
    pieces = []
    at = 0
    for flat in flats:
        first, last = max(start, at), min(start + length, at + flat.numel())
        if first < last:
            pieces.append(flat[first - at : last - at])
        at += flat.numel()
    if start + length > at:
        raise ValueError(f"{at} values, but {start + length} are needed")
    return pieces


T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
State = Mapping[str, FlatTensor]


@dataclass(frozen=True)
class Merged:
    """Merged training state.

    Args:
        stage: of ZeRO.
        ranks: number of partitions.
        weights: by name.
        optimizer: state by name of the parameter and key.
        param_groups: options of each group, ``params`` by name.
    """

    stage: int
    ranks: int
    weights: Mapping[str, FlatTensor]
    optimizer: Mapping[str, State]
    param_groups: Sequence[Mapping[str, Any]]


def expect(value: Any, *kinds: type[T]) -> T:
    """Return ``value`` if it is of one of these types.

    Raises:
        TypeError: otherwise.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} instead of a {kinds[0].__name__}")
    return value


def number(value: Any) -> int:
    """Return an integer, also from a member of an enumeration.

    Raises:
        TypeError: if it is not one.
    """
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    return expect(value, int)


def shapes_of(groups: Any) -> list[Shapes]:
    """Return shapes by name for each group. Versions before 0.3.16 had a single group."""
    groups = groups if isinstance(groups, list) else [groups]
    return [{expect(name, str): tuple(map(number, shape)) for name, shape in group.items()} for group in groups]


# ---- stages 1 and 2 --------------------------------------------------------------------------------------------------


def merge_groups(
    stage: int, ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes], *, check_slices: bool = True
) -> Merged:
    """Merge the partitions of each group, of stage 1 or 2.

    Args:
        stage: 1 or 2.
        ranks: optimizer state of each rank.
        shapes: of the parameters, by group, in the order of the flat tensors.
        check_slices: check the positions of parameters against those that newer versions record.

    Raises:
        Exception: a :class:`ValueError`, :class:`TypeError` or :class:`LookupError`, if they are not in DeepSpeed's
            form.
    """
    weights: dict[str, FlatTensor] = {}
    optimizer: dict[str, State] = {}
    flats = [[expect(flat, Tensor) for flat in state["single_partition_of_fp32_groups"]] for state in ranks]
    held = [_states(state, state["base_optimizer_state"]) for state in ranks]
    paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for index, group in enumerate(shapes):
        own = [flat[index] for flat in flats]
        places, end = _places(group, paddings[index])
        _check_padding(index, end, sum(flat.numel() for flat in own), len(ranks))
        if check_slices:
            _check_slices(index, ranks, places, group, [flat.numel() for flat in own])
        states = [state[index] for state in held]
        _check_lengths(own, states)
        for name, start in places.items():
            shape = group[name]
            weights[name] = _piece(own, shape, start)
            optimizer[name] = {key: _piece([state[key] for state in states], shape, start) for key in states[0]}
    return Merged(
        stage, len(ranks), weights, optimizer, named_groups(_options(ranks[0]["base_optimizer_state"]), shapes)
    )


def _places(group: Shapes, paddings: Sequence[Any]) -> tuple[dict[str, int], int]:
    """Return the start of each parameter in its flat group, and the end of the last one."""
    places: dict[str, int] = {}
    end = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        places[name] = end
        end += math.prod(shape) + number(padding)
    return places, end


def _piece(flats: Sequence[Tensor], shape: tuple[int, ...], start: int) -> FlatTensor:
    """Return a parameter's part of a flat group; a scalar applies to all of the group."""
    if flats[0].dim() == 0:
        return FlatTensor.whole(flats[0])
    return FlatTensor(shape, cut(flats, start, math.prod(shape)), flats[0].dtype)


def _check_padding(index: int, end: int, held: int, ranks: int) -> None:
    # Padded to a multiple of twice the ranks; some versions strip a part before saving.
    step = 2 * ranks
    if held < end or -(-end // step) != -(-held // step):
        raise ValueError(f"group {index} has {held} values, but its parameters have {end}")


def _check_slices(
    index: int, ranks: Sequence[Mapping[str, Any]], places: Mapping[str, int], group: Shapes, lengths: Sequence[int]
) -> None:
    """Raise if recorded positions of parameters differ from the computed ones."""
    whole = max(lengths)
    for rank, state in enumerate(ranks):
        slices = state.get("param_slice_mappings")
        for name, place in (slices[index] if slices else {}).items():
            recorded = expect(place, Inert).state
            begin = max(places[name] - rank * whole, 0)
            length = min(places[name] + math.prod(group[name]), (rank + 1) * whole) - rank * whole - begin
            if (recorded["start"], recorded["numel"]) != (begin, length):
                raise ValueError(f"{name} has another position on rank {rank} than expected in group {index}")


def _check_lengths(flats: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise if partitions have unequal lengths; only padding after the last value may be stripped."""
    last = max((rank for rank, flat in enumerate(flats) if flat.numel()), default=0)
    whole = flats[0].numel()
    if any(flat.numel() != whole for flat in flats[:last]):
        raise ValueError("the partitions have different lengths")
    for state in states[:last]:
        if any(value.dim() and value.numel() != whole for value in state.values()):
            raise ValueError("the optimizer state has another length than the weights")


# ---- stage 3 ---------------------------------------------------------------------------------------------------------


def merge_parameters(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> Merged:
    """Merge the partitions of each parameter, of stage 3.

    Args:
        ranks: optimizer state of each rank.
        shapes: of the parameters, by sub-group, in the order of the flat tensors.

    Raises:
        Exception: as :func:`merge_groups`.
    """
    flats = [[expect(flat, Tensor) for flat in state["fp32_flat_groups"]] for state in ranks]
    held = [_states(state, state["optimizer_state_dict"]) for state in ranks]
    lengths = [flat.numel() for flat in flats[0]]
    if any([flat.numel() for flat in own] != lengths for own in flats):
        raise ValueError("the partitions have different lengths")
    weights: dict[str, FlatTensor] = {}
    optimizer: dict[str, State] = {}
    start = 0
    for name, shape in [item for group in shapes for item in group.items()]:
        length = -(-math.prod(shape) // len(ranks))
        keys = held[0][_group_at(lengths, start)]
        weights[name] = _gathered(flats, shape, start, length)
        optimizer[name] = {
            key: FlatTensor.whole(value)
            if value.dim() == 0
            else _gathered([[state[key] for state in own] for own in held], shape, start, length)
            for key, value in keys.items()
        }
        start += length
    if start != sum(lengths):
        raise ValueError(f"a rank holds {sum(lengths)} values, but its parts of the parameters have {start}")
    return Merged(3, len(ranks), weights, optimizer, named_groups(_options(ranks[0]["optimizer_state_dict"]), shapes))


def _gathered(ranks: Sequence[Sequence[Tensor]], shape: tuple[int, ...], start: int, length: int) -> FlatTensor:
    return FlatTensor(shape, [piece for flats in ranks for piece in cut(flats, start, length)], ranks[0][0].dtype)


def _group_at(lengths: Sequence[int], start: int) -> int:
    """Return the sub-group that contains a value."""
    end = 0
    for index, length in enumerate(lengths):
        end += length
        if start < end:
            return index
    return len(lengths) - 1


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _options(base: Any) -> list[Mapping[str, Any]]:
    """Return the options of each group; none in elastic checkpoints, which only have the state."""
    return [expect(group, dict) for group in base["param_groups"]] if isinstance(base, dict) else []


def _states(state: Mapping[str, Any], base: Any) -> list[dict[str, Tensor]]:
    """Return the state of each flat tensor of the optimizer, in order."""
    if not isinstance(base, dict):
        step = state.get("base_optimizer_state_step")
        return [_tensors(own, step) for own in base]
    # Some optimizers keep the step count in the group.
    steps = {index: group.get("step") for group in _options(base) for index in group["params"]}
    return [_tensors(base["state"].get(index, {}), step) for index, step in sorted(steps.items())]


def _tensors(state: Mapping[str, Any], step: Any) -> dict[str, Tensor]:
    counted = {} if step is None or not state else {"step": step}
    return {key: as_tensor(value) for key, value in {**counted, **state}.items()}


def as_tensor(value: Any) -> Tensor:
    """Return a state value as a tensor; some optimizers keep step counts as Python numbers.

    Raises:
        TypeError: if it is neither a tensor nor a number.
    """
    return value if isinstance(value, Tensor) else torch.tensor(float(expect(value, float, int)))


def named_groups(options: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Return the parameter groups with ``params`` by name.

    Args:
        options: as saved, ``params`` by index of the flat tensor.
        shapes: of the parameters in each flat tensor.

    Raises:
        ValueError: if the two do not match.
    """
    groups = [{**group, "params": [name for index in group["params"] for name in shapes[index]]} for group in options]
    if groups and sum(len(group["params"]) for group in groups) != sum(map(len, shapes)):
        raise ValueError("the parameter groups do not have all parameters")
    return groups
