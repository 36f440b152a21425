"""From what a rank holds to its contribution to a checkpoint, and back.

A checkpoint is Lightning's dict of a run, with two changes: every tensor has a name, so that no position in a list
depends on the layout, and of every tensor each rank gives the boxes that it holds. What is not a tensor comes from the
first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format import directory
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.format.tree import encode, encode_what_can_be, reference
from trainwright.checkpoint.read.run_state import StoredTensor, materialised
from trainwright.core.errors import CheckpointError
from trainwright.core.torch_internals import compute_local_shape_and_global_offset
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.wholes import only_takes_parts

WEIGHTS, CURRENT_WEIGHTS, OPTIMIZERS = "state_dict", "current_model_state", "optimizer_states"
# Of StochasticWeightAveraging: a state_dict of a copy of the module, of which this rank holds what it holds of that.
_CALLBACKS, _AVERAGING, _AVERAGE = "callbacks", "StochasticWeightAveraging", "average_model_state"
_SECTIONS = {WEIGHTS: "weights", CURRENT_WEIGHTS: "current_weights"}
# What a module was called with may be anything; training does not need it.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# Prefixes of keys: of what every rank has of its own, and of tensors in the states of callbacks.
OF_RANK, OF_CALLBACKS = directory.OF_RANK, f"tree/{_CALLBACKS}/"
# Keys of an error message, per kind.
_SHOWN = 8


class Placement(Protocol):
    """How the ranks of a layout hold things; each strategy has one."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all where all have the same."""

    def boxes(self, name: str, tensor: Tensor) -> TensorParts:
        """Boxes of the whole that ``tensor`` holds, laid out like this rank's parameter or buffer ``name``."""

    def writes(self, name: str, is_parameter: bool) -> bool:
        """Whether this rank's copy of what is called ``name`` may be written."""

    def united(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Entries by name of all ranks that hold different ones. A collective of these."""

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """Names of the parameters of each group of an optimizer, on all ranks together."""


def boxes_of(tensor: Tensor) -> TensorParts:
    """The box that this rank holds of a DTensor, or all of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return TensorParts.whole(tensor.detach())
    if any(not (placement.is_shard() or placement.is_replicate()) for placement in tensor.placements):
        raise CheckpointError(f"A DTensor with placements {tensor.placements} cannot be saved; reduce it first.")
    part = local_tensor(tensor).detach()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorParts(tensor.shape, part.dtype, [(tuple(offsets), part)])


class StateOwners(Protocol):
    """Of which parameters one rank has the optimizer state, and has it whole."""

    def __contains__(self, name: str) -> bool:
        """Whether the parameter ``name`` is one of them."""

    def is_mine(self, name: str) -> bool:
        """Whether this rank is its owner."""

    def united(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Entries by name of all ranks among which parameters are dealt. A collective of these."""


class WholePlacement:
    """Every rank holds all of the module, or DTensors that say themselves what they hold.

    Args:
        is_first: see :class:`Placement`.
    """

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first

    def boxes(self, name: str, tensor: Tensor) -> TensorParts:
        """See :class:`Placement`."""
        return boxes_of(tensor)

    def writes(self, name: str, is_parameter: bool) -> bool:
        """Parameters are the same everywhere, so anybody may; buffers need not be."""
        return is_parameter or self.is_first

    def united(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Every rank has all names."""
        return mine

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """See :class:`Placement`."""
        return [[name_of(p) for p in group["params"]] for group in optimizer.param_groups]


class CompletePlacement:
    """A placement under which every rank also holds what one would write for all: a state to go on from alone.

    Args:
        placement: that of the strategy.
    """

    is_first = True

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def boxes(self, name: str, tensor: Tensor) -> TensorParts:
        """See :class:`Placement`."""
        return self._placement.boxes(name, tensor)

    def writes(self, name: str, is_parameter: bool) -> bool:
        """Everything that it holds."""
        return True

    def united(self, mine: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Placement`."""
        return self._placement.united(mine)

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """See :class:`Placement`."""
        return self._placement.group_names(optimizer, name_of)


# ---- saving ----------------------------------------------------------------------------------------------------------


class Collector:
    """Turns Lightning's dict of a run into a tree and tensors by key.

    Args:
        module: the user's module as this rank holds it.
        placement: who holds what.
        name_of: name of a parameter as an optimizer holds it.
        owners: of optimizer states that are whole; ``None``: there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        name_of: Callable[[Tensor], str],
        owners: StateOwners | None = None,
    ) -> None:
        self.tensors: dict[str, TensorParts] = {}
        self._placement = placement
        self._name_of = name_of
        self._owners = owners
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._canonical = {name: first[id(parameter)] for name, parameter in self._parameters.items()}

    def collect(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The tree of ``checkpoint``; its tensors are in :attr:`tensors` afterwards. A collective."""
        tree: dict[str, Any] = {}
        for key, value in checkpoint.items():
            if key in _SECTIONS:
                tree[key] = self._placement.united(self._weights(_SECTIONS[key], value))
            elif key == OPTIMIZERS:
                pairs = zip(optimizers, value, strict=True)
                tree[key] = [self._optimizer(index, *pair) for index, pair in enumerate(pairs)]
            elif key == _CALLBACKS:
                tree[key] = self._callbacks(value)
            elif key in _HYPER_PARAMETERS and isinstance(value, dict):
                tree[key] = self._hyper_parameters(key, value)
            else:
                tree[key] = encode(value, self._put, key)
        return tree

    def add_of_rank(self, rank: int, state: Mapping[str, Tensor]) -> None:
        """Tensors that every rank has of its own."""
        self.tensors.update((f"{OF_RANK}{rank}/{name}", TensorParts.whole(value)) for name, value in state.items())

    def _put(self, path: str, tensor: Tensor) -> str:
        """A tensor that is no weight: the first rank's counts, unless it is split."""
        key = f"tree/{path}"
        if isinstance(tensor, DTensor) or self._placement.is_first:
            self.tensors[key] = boxes_of(tensor)
        return key

    def _put_whole(self, path: str, tensor: Tensor) -> str:
        """A tensor that this rank alone has, of those that share its parameter."""
        self.tensors[path] = TensorParts.whole(tensor.detach())
        return path

    def _weights(self, section: str, state: Mapping[str, Any]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                tree[name] = encode(value, self._put, f"{section}/{name}")
                continue
            canonical = self._canonical_name(name, value, state)
            tree[name] = reference(f"{section}/{canonical}")
            if self._placement.writes(canonical, canonical in self._parameters):
                self.tensors[f"{section}/{canonical}"] = self._placement.boxes(canonical, value)
        return tree

    def _callbacks(self, states: Mapping[str, Any]) -> Any:
        averages = {
            name: state[_AVERAGE]
            for name, state in states.items()
            if name.startswith(_AVERAGING) and isinstance(state, dict) and state.get(_AVERAGE) is not None
        }
        rest = {name: {**state, _AVERAGE: None} if name in averages else state for name, state in states.items()}
        tree = encode(rest, self._put, _CALLBACKS)
        for name, average in averages.items():
            parts = self._weights(f"tree/{_CALLBACKS}/{name}/{_AVERAGE}", average)
            tree[name][_AVERAGE] = self._placement.united(parts)
        return tree

    def _canonical_name(self, name: str, value: Tensor, state: Mapping[str, Any]) -> str:
        """The name under which a tied parameter is kept: its first, if ``state`` has the same tensor there."""
        first = self._canonical.get(name, name)
        other = state.get(first)
        if first == name or not isinstance(other, Tensor):
            return name
        same = local_tensor(value).data_ptr() == local_tensor(other).data_ptr() and value.shape == other.shape
        return first if same else name

    def _hyper_parameters(self, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        tree, left_out = encode_what_can_be(values, self._put, section)
        if left_out:
            rank_zero_warn(
                f"The hyper-parameters {', '.join(left_out)} are left out of checkpoints, which hold plain values. "
                "Give them to load_from_checkpoint(path, name=value) again, or leave them out of the saved ones with "
                "self.save_hyperparameters(ignore=[...])."
            )
        return tree

    def _optimizer(self, index: int, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        if "param_groups" not in state:  # Lightning's stand-in where configure_optimizers gives None
            return dict(encode(state, self._put, f"optimizer/{index}"))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tree = {}
        for position, values in state["state"].items():
            parameter = parameters[position]
            name = self._name_of(parameter)
            path = f"optimizer/{index}/{name}"
            tree[name] = {k: self._optimizer_value(f"{path}/{k}", name, parameter, v) for k, v in values.items()}
        rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        return {
            **encode(rest, self._put, f"optimizer/{index}"),
            "by_name": True,
            "state": self._placement.united(tree if self._owners is None else self._owners.united(tree)),
            "param_groups": list(self._groups(index, optimizer, state["param_groups"])),
        }

    def _groups(self, index: int, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        names = self._placement.group_names(optimizer, self._name_of)
        for number, (group, own) in enumerate(zip(groups, names, strict=True)):
            options = {key: value for key, value in group.items() if key != "params"}
            yield {**encode(options, self._put, f"optimizer/{index}/groups/{number}"), "params": own}

    def _optimizer_value(self, key: str, name: str, parameter: Tensor, value: Any) -> Any:
        if self._owners is not None and name in self._owners:
            return encode(value, self._put_whole, key)
        if not isinstance(value, Tensor) or value.dim() == 0:
            value = local_tensor(value) if isinstance(value, Tensor) else value
            return encode(value, self._put, key)
        is_alike = value.shape == parameter.shape
        if self._placement.writes(name, is_parameter=is_alike or isinstance(value, DTensor)):
            self.tensors[key] = self._placement.boxes(name, value) if is_alike else boxes_of(value)
        return reference(key)


# ---- loading ---------------------------------------------------------------------------------------------------------


def is_stored(state: Mapping[str, Any]) -> bool:
    """Whether tensors of ``state`` have yet to be read."""
    return any(isinstance(value, StoredTensor) for value in state.values())


def can_fill(module: nn.Module) -> bool:
    """Whether weights may be read straight into ``module``: nobody in it wants to change them on the way."""
    if getattr(module.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        return False
    keys = list(module.state_dict())
    for name, part in module.named_modules():
        loads_itself = not type(part)._load_from_state_dict.__module__.startswith(("torch.nn.", "torch.ao."))
        if loads_itself and any(key.startswith(f"{name}." if name else "") for key in keys):
            return False
        hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
        if not all(_changes_nothing(hook) for hook in hooks):
            return False
    return True


def _changes_nothing(hook: Any) -> bool:
    """Whether a hook of ``load_state_dict`` is ours, or FSDP2's, which only wants its parameters split."""
    function = getattr(hook, "hook", hook)
    return only_takes_parts(hook) or str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def fill_weights(
    module: nn.Module,
    placement: Placement,
    state: Mapping[str, Any],
    expected: Sequence[str],
    *,
    strict: bool,
    where: str,
) -> None:
    """Read the weights of ``state`` into what this rank holds of them.

    Args:
        module: the module as this rank holds it.
        placement: who holds what.
        state: name -> :class:`StoredTensor`, tensor or extra state, of the whole module.
        expected: names of the whole module, on all ranks together.
        strict: refuse missing and unexpected names and other shapes; else leave these as they are, with a warning,
            unless nothing fits.
        where: what the weights come from, for messages.

    Raises:
        CheckpointError: listing what does not fit.
    """
    targets = {name: value for name, value in _held(module).items() if name in state}
    boxes = {name: placement.boxes(name, tensor) for name, tensor in targets.items() if isinstance(tensor, Tensor)}
    wrong = [
        f"{name}: saved {tuple(state[name].shape)}, the module has {parts.shape}"
        for name, parts in boxes.items()
        if hasattr(state[name], "shape") and tuple(state[name].shape) != parts.shape
    ]
    report = mismatch([n for n in expected if n not in state], sorted(set(state) - set(expected)), wrong)
    misfits = {text.partition(":")[0] for text in wrong}
    some_fit = any(name in state and name not in misfits for name in expected)
    if report and (strict or not some_fit):
        raise misfit(where, report, some_fit=some_fit)
    if report:
        rank_zero_warn(f"{where} was loaded in part: {report}")
    once = {(_key_of(state[name]), _place_of(targets[name])): name for name in boxes if name not in misfits}
    read_into({name: boxes[name] for name in once.values()}, state)
    for name, value in state.items():
        if name in targets and not isinstance(targets[name], Tensor):
            _set_extra_state(module, name, materialised(value))


def _key_of(value: Any) -> Any:
    return value.key if isinstance(value, StoredTensor) else id(value)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies in memory: a tied one, under whatever name, lies in one place."""
    part = local_tensor(tensor)
    return part.data_ptr(), part.numel()


def misfit(where: str, report: str, *, some_fit: bool = True) -> CheckpointError:
    """The error for weights that do not fit, with what to type."""
    if not some_fit:
        return CheckpointError(f"{where} is of another module, no tensor fits: {report} Give one of this module.")
    return CheckpointError(
        f"{where} does not fit this module: {report} Build the module as it was, or type strict=false (in Python: "
        "self.strict_loading = False in the module) to load what fits and leave the rest as it is."
    )


def mismatch(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> str:
    """What does not fit, at most a screenful; empty when all does."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    return "; ".join(f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in kinds if names) + (
        "." if missing or unexpected or wrong else ""
    )


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first few of them."""
    between = "; " if any(":" in name for name in names) else ", "  # shapes have commas themselves
    more = f"{between}... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more


@torch.no_grad()
def read_into(boxes: Mapping[str, TensorParts], state: Mapping[str, Any]) -> None:
    """Read what ``state`` holds under the same names into boxes, in place."""
    sources: dict[int, tuple[TensorSource, dict[str, list[TensorParts]]]] = {}
    for name, parts in boxes.items():
        value = state[name]
        if isinstance(value, StoredTensor):
            _, wanted = sources.setdefault(id(value.source), (value.source, {}))
            wanted.setdefault(value.key, []).append(parts)
            continue
        for offsets, tensor in parts.parts:
            box = tuple(slice(o, o + length) for o, length in zip(offsets, tensor.shape, strict=True))
            tensor.copy_(value[box])
    for source, by_key in sources.values():
        _fill_from(source, by_key)


def _fill_from(source: Any, wanted: Mapping[str, Sequence[TensorParts]]) -> None:
    """Read from one source; tied tensors share a key."""
    if hasattr(source, "fill"):
        for turn in range(max(map(len, wanted.values()))):
            source.fill({key: several[turn] for key, several in wanted.items() if turn < len(several)})
        return
    for key, several in wanted.items():
        for parts in several:
            for offsets, tensor in parts.parts:
                tensor.copy_(source.read(key, offsets, tuple(tensor.shape)))


def _held(module: nn.Module) -> dict[str, Any]:
    """What the ``state_dict`` of ``module`` holds here, by name."""
    return dict(module.state_dict())


def _set_extra_state(module: nn.Module, name: str, value: Any) -> None:
    path = name.rpartition(".")[0]
    module.get_submodule(path).set_extra_state(value)


def optimizer_parts(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    placement: Placement,
    name_of: Callable[[Tensor], str],
    where: str,
    owners: StateOwners | None = None,
) -> dict[str, Any]:
    """The ``state_dict`` for this rank's ``optimizer``, from what was saved by name under any layout.

    Raises:
        CheckpointError: if the groups hold other parameters than the saved ones.
    """
    _refuse_other_groups(placement.group_names(optimizer, name_of), saved["param_groups"], where)
    reader = _OptimizerReader(placement)
    state: dict[int, dict[str, Any]] = {}
    param_groups, position = [], 0
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        first = position
        for parameter in group["params"]:
            name = name_of(parameter)
            values = saved["state"].get(name)
            if values is not None and (owners is None or name not in owners):
                state[position] = {k: reader.value(name, parameter, k, v) for k, v in values.items()}
            elif values is not None and owners is not None and owners.is_mine(name):
                state[position] = materialised(values)
            position += 1
        param_groups.append({**materialised(dict(saved_group)), "params": list(range(first, position))})
    reader.read()
    rest = {k: materialised(v) for k, v in saved.items() if k not in ("by_name", "state", "param_groups")}
    return {**rest, "state": state, "param_groups": param_groups}


def refuse_other_optimizer(optimizer: Optimizer, where: str) -> None:
    """Refuse a state that another kind of optimizer saved, after it was loaded.

    torch puts the saved groups in the place of the optimizer's own, and a newer version adds what an older one had not
    saved. What its class needs and is not there then would fail in the first step, with the name of a key alone.

    Raises:
        CheckpointError: naming what is missing.
    """
    # Loading adds this one to the defaults of any optimizer, also of those that have none in their groups.
    needed = set(optimizer.defaults) - {"differentiable"}
    missing = sorted({key for group in optimizer.param_groups for key in needed - set(group)})
    if missing:
        raise CheckpointError(
            f"{where[0].upper()}{where[1:]} holds the state of another optimizer than {type(optimizer).__name__}: it "
            f"has no {', '.join(missing)}. Make the same optimizer in configure_optimizers, or begin from the weights "
            "alone with init_from=<the checkpoint>."
        )


class _OptimizerReader:
    """Makes room for the saved values of parameters and reads them all at once."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._boxes: dict[str, TensorParts] = {}
        self._stored: dict[str, StoredTensor] = {}

    def value(self, name: str, parameter: Tensor, key: str, saved: Any) -> Any:
        if isinstance(saved, Tensor) and parameter.dim() == 0 and key != "step":  # of a scalar; steps are never split
            return spread_like(parameter, saved.to(parameter.device))
        if not isinstance(saved, StoredTensor):
            return materialised(saved)  # LBFGS keeps lists of tensors
        whole = self._placement.boxes(name, parameter).shape
        if tuple(saved.shape) != tuple(whole):
            return saved.whole()
        value = spread_like(parameter, torch.empty_like(local_tensor(parameter).detach(), dtype=saved.dtype))
        self._boxes[saved.key] = self._placement.boxes(name, value)
        self._stored[saved.key] = saved
        return value

    def read(self) -> None:
        read_into(self._boxes, self._stored)


def spread_like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` spread over ranks as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _refuse_other_groups(names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], where: str) -> None:
    if len(names) != len(saved):
        raise CheckpointError(
            f"{where} holds an optimizer of {len(saved)} parameter group(s), this one has {len(names)}. Make the same "
            "groups in configure_optimizers, or begin from the weights alone with init_from=<the checkpoint>."
        )
    for index, (own, group) in enumerate(zip(names, saved, strict=True)):
        missing, unexpected = sorted(set(own) - set(group["params"])), sorted(set(group["params"]) - set(own))
        if missing or unexpected:
            raise CheckpointError(
                f"Parameter group {index} of the optimizer differs from that of {where}: "
                f"{mismatch(missing, unexpected, ())} Make the same groups in configure_optimizers, or begin from the "
                "weights alone with init_from=<the checkpoint>."
            )
