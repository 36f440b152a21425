"""A rank's contribution to a checkpoint.

A checkpoint is Lightning's checkpoint dict with two changes: tensors are identified by name instead of list position,
which depends on the layout, and each rank contributes its boxes of every tensor. Other values come from the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format import directory
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import encode, encode_supported, reference
from trainwright.checkpoint.write.objects import HYPER_PARAMETERS
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import StateOwners
from trainwright.strategies.state.placement import Placement, boxes_of
from trainwright.strategies.state.run_state import CURRENT_WEIGHTS, OPTIMIZERS, WEIGHTS
from trainwright.strategies.state.wrapped_tensors import flattened, is_wrapped

# State of StochasticWeightAveraging: the state_dict of a copy of the module, sharded like the module.
_CALLBACKS, _AVERAGING, _AVERAGE = "callbacks", "StochasticWeightAveraging", "average_model_state"
# State of BaseFinetuning: optimizer index -> groups with names of parameters.
_GROUPS = "internal_optimizer_metadata"
_SECTIONS = {WEIGHTS: "weights", CURRENT_WEIGHTS: "current_weights"}
# Ends the key of the names of hyper-parameters that the tree does not hold.
LEFT_OUT = "_left_out"
# Key prefixes of per-rank state and of tensors in callback states.
OF_RANK, OF_CALLBACKS = directory.OF_RANK, f"tree/{_CALLBACKS}/"


class Collector:
    """Converter of Lightning's checkpoint dict into a tree and tensors by key.

    Args:
        module: the user's module on this rank.
        placement: locations of shards.
        name_of: returns the name of an optimizer's parameter.
        owners: of unsharded optimizer states; ``None``: none.
        complete: include this rank's copies of what another rank would write for all.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        name_of: Callable[[Tensor], str],
        owners: StateOwners | None = None,
        complete: bool = False,
    ) -> None:
        self.tensors: dict[str, TensorParts] = {}
        self.objects: dict[str, Any] = {}
        self._placement, self._name_of, self._owners, self._complete = placement, name_of, owners, complete
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._canonical = {name: first[id(parameter)] for name, parameter in self._parameters.items()}

    def collect(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the tree of ``checkpoint``; add its tensors and ``objects`` of the content. A collective."""
        tree: dict[str, Any] = {}
        for key, value in checkpoint.items():
            if key in _SECTIONS:
                tree[key] = self._placement.united(self._weights(_SECTIONS[key], value))
            elif key == OPTIMIZERS:
                pairs = zip(optimizers, value, strict=True)
                tree[key] = [self._optimizer(index, *pair) for index, pair in enumerate(pairs)]
            elif key == _CALLBACKS:
                tree[key] = self._callbacks(self._with_all_groups(value, optimizers))
            elif key in HYPER_PARAMETERS and isinstance(value, dict):
                tree[key] = self._supported(value, key)
                if key in self.objects:
                    tree[key + LEFT_OUT] = list(self.objects[key])
            else:
                tree |= self._supported({key: value})
        return tree

    def _supported(self, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
        """Encode the entries of a mapping that have a form; add the others to :attr:`objects`."""
        tree, others = encode_supported(values, self._put, section)
        if others:
            self.objects |= {section: others} if section else others
            unused = tuple("/".join(filter(None, ("tree", section, name, ""))) for name in others)
            self.tensors = {key: parts for key, parts in self.tensors.items() if not key.startswith(unused)}
        return tree

    def add_of_rank(self, rank: int, state: Mapping[str, Tensor]) -> None:
        """Add tensors of per-rank state."""
        self.tensors.update((f"{OF_RANK}{rank}/{name}", TensorParts.whole(value)) for name, value in state.items())

    def _writes(self, name: str, is_parameter: bool) -> bool:
        return self._complete or self._placement.writes(name, is_parameter)

    def _put(self, path: str, tensor: Tensor) -> str:
        """Add a tensor that is no weight: the first rank's, unless it is sharded."""
        key = f"tree/{path}"
        if isinstance(tensor, DTensor) or self._complete or self._placement.is_first:
            self.tensors[key] = boxes_of(tensor)
        return key

    def _put_nested(self, name: str, path: str, tensor: Tensor) -> str:
        """Add a tensor within an optimizer value of the parameter ``name``, from a rank of its stage."""
        key = f"tree/{path}"
        if self._writes(name, is_parameter=isinstance(tensor, DTensor)):
            self.tensors[key] = boxes_of(tensor)
        return key

    def _put_whole(self, path: str, tensor: Tensor) -> str:
        """Add an unsharded tensor that only this rank has."""
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
            if self._writes(canonical, canonical in self._parameters):
                self.tensors[f"{section}/{canonical}"] = self._placement.boxes(canonical, value)
        return tree

    def _with_all_groups(self, states: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Complete the groups that finetuning callbacks keep by names of parameters: a pipeline stage knows its own."""
        found = dict(states)
        for name, state in states.items():
            if isinstance(state, dict) and state.get(_GROUPS):
                found[name] = {
                    **state,
                    _GROUPS: {index: self._named_groups(optimizers[index]) for index in state[_GROUPS]},
                }
        return found

    def _named_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        names = self._placement.group_names(optimizer, self._name_of)
        return [{**group, "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]

    def _callbacks(self, states: Mapping[str, Any]) -> Any:
        averages = {
            name: state[_AVERAGE]
            for name, state in states.items()
            if str(name).startswith(_AVERAGING) and isinstance(state, dict) and state.get(_AVERAGE) is not None
        }
        rest = {name: {**state, _AVERAGE: None} if name in averages else state for name, state in states.items()}
        tree = self._supported(rest, _CALLBACKS)
        for name, average in averages.items():
            parts = self._weights(f"tree/{_CALLBACKS}/{name}/{_AVERAGE}", average)
            tree[name][_AVERAGE] = self._placement.united(parts)
        return tree

    def _canonical_name(self, name: str, value: Tensor, state: Mapping[str, Any]) -> str:
        """Return the name under which a tied parameter is saved: its first, if ``state`` has the same tensor there."""
        first = self._canonical.get(name, name)
        other = state.get(first)
        if first == name or not isinstance(other, Tensor):
            return name
        same = local_tensor(value).data_ptr() == local_tensor(other).data_ptr() and value.shape == other.shape
        return first if same else name

    def _optimizer(self, index: int, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        if "param_groups" not in state:  # Lightning's placeholder if configure_optimizers returns None
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
        if is_wrapped(value):
            value = flattened(value)
        if self._owners is not None and name in self._owners:
            return encode(value, self._put_whole, key)
        if not isinstance(value, Tensor) or value.dim() == 0:
            value = local_tensor(value) if isinstance(value, Tensor) else value
            return encode(value, partial(self._put_nested, name), key)
        is_alike = value.shape == parameter.shape
        if self._writes(name, is_parameter=is_alike or isinstance(value, DTensor)):
            self.tensors[key] = self._placement.boxes(name, value) if is_alike else boxes_of(value)
        return reference(key)
