"""Conversion between the shards of a layout's ranks and the state of the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.state.wholes import register_splitting, whole_on_device


class StateOwners(Protocol):
    """Parameters whose whole optimizer state is on one rank."""

    def __contains__(self, name: str) -> bool:
        """Return whether the parameter ``name`` is one of them."""

    def is_mine(self, name: str) -> bool:
        """Return whether this rank owns it."""

    def united(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the entries, by name, of all owners. A collective of these."""


@dataclass(frozen=True)
class Assembly:
    """Locations of the parts of a module, by fully qualified name.

    Args:
        names: names of all parameters of the unmodified module, in its order.
        keys: keys of its ``state_dict``, in order.
        cuts: how a parameter is split along axes other than the data axes; missing: not split.
        owners: pipeline index of a stage that holds a parameter or buffer; missing: all do.
        pipeline: group of this rank's pipeline; ``None``: one stage.
        device: where collectives run.
    """

    names: Sequence[str]
    keys: Sequence[str]
    cuts: Mapping[str, Cut]
    owners: Mapping[str, int]
    pipeline: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of_whole(cls) -> Assembly:
        """Return the assembly of a fully replicated module, without names."""
        return cls((), (), {}, {}, None, torch.device("cpu"))

    # ---- parts to whole -------------------------------------------------------------------------------------------

    def gather_in_stage(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a parameter's whole tensor from the ranks of this stage, on the CPU."""
        tensor = whole_on_device(tensor)
        if name in self.cuts:
            tensor = self.cuts[name].whole(tensor.to(self.device))
        return tensor.to("cpu", copy=True)

    def wholes(self, held: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each of ``names`` that exists in the pipeline. A collective of all ranks.

        Args:
            held: this rank's parts by name.
            names: in order, the same on all ranks.
        """
        for name in self._available(held, names):
            part = self.gather_in_stage(name, held[name]) if self.owns(name) else None
            yield name, self._from_owner(part, self.owners.get(name, 0))

    def owns(self, name: str) -> bool:
        """Return whether this rank's copy is authoritative in its pipeline."""
        return self.pipeline is None or dist.get_rank(self.pipeline) == self.owners.get(name, 0)

    def _available(self, held: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that their owners hold. A collective of the pipeline."""
        flags = torch.tensor([name in held and self.owns(name) for name in names], dtype=torch.int32)
        if self.pipeline is not None:
            flags = flags.to(self.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.pipeline)
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def _from_owner(self, value: Tensor | None, owner: int) -> Tensor:
        if self.pipeline is None:
            assert value is not None
            return value
        form = None if value is None else (tuple(value.shape), value.dtype)
        shape, dtype = broadcast_value(form, owner, self.pipeline, self.device)
        buffer = torch.empty(shape, dtype=dtype, device=self.device) if value is None else value.to(self.device)
        buffer = buffer.contiguous()
        dist.broadcast(buffer, group=self.pipeline, group_src=owner)
        return buffer.cpu()

    def whole_state(self, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        """Return the whole module's ``state_dict``; ``keep=False`` drops tensors (for ranks that do not write)."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        whole: dict[str, Any] = {key: state.get(key) for key in self.keys}
        for key, value in self.wholes(tensors, self.keys):
            whole[key] = value if keep else None
        return whole

    # ---- optimizers -----------------------------------------------------------------------------------------------

    def whole_optimizer(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        name_of: Callable[[Tensor], str],
        keep: bool,
        whole_states: StateOwners | None = None,
    ) -> dict[str, Any]:
        """Return the ``state_dict`` that ``optimizer`` would have on one process.

        Args:
            optimizer: this rank's.
            state: its ``state_dict``, whose tensors may be parts.
            name_of: returns the name of an optimizer's parameter.
            keep: as in :meth:`whole_state`.
            whole_states: parameters whose state is whole on every rank; ``None``: none.
        """
        groups = self.group_names(optimizer, name_of)
        mine = [name_of(p) for group in optimizer.param_groups for p in group["params"]]
        by_name = {mine[index]: values for index, values in state["state"].items()}
        index_of = {name: index for index, name in enumerate(name for names in groups for name in names)}
        kinds = self.gathered({n: {k: isinstance(v, Tensor) or v for k, v in vs.items()} for n, vs in by_name.items()})
        whole: dict[int, dict[str, Any]] = {}
        for name, index in index_of.items():
            owner = kinds[self.owners.get(name, 0) if self.pipeline is not None else 0].get(name)
            if owner is None:
                continue
            whole[index] = {key: value for key, value in owner.items() if value is not True}
            for key in (key for key, value in owner.items() if value is True):
                is_whole = whole_states is not None and name in whole_states
                whole[index][key] = self._whole_value(name, by_name.get(name, {}).get(key), keep, is_whole)
        return {
            **state,
            "state": dict(sorted(whole.items())),
            "param_groups": numbered(state["param_groups"], map(len, groups)),
        }

    def _whole_value(self, name: str, value: Any, keep: bool, is_whole: bool) -> Tensor | None:
        owner = self.owners.get(name, 0)
        if not self.owns(name):
            value = None
        elif value.dim() == 0 or is_whole:  # step counts are equal on all ranks
            value = value.detach().cpu()
        else:
            value = self.gather_in_stage(name, value)
        whole = self._from_owner(value, owner)
        return whole if keep else None

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """Return the parameter names of each group of ``optimizer``, merged over stages."""
        mine = [[name_of(p) for p in group["params"]] for group in optimizer.param_groups]
        stages = self.gathered(mine)
        if len(stages) == 1:
            return mine
        if len({len(groups) for groups in stages}) > 1:
            raise ValueError(
                f"configure_optimizers made {[len(groups) for groups in stages]} parameter groups on the stages of the "
                "pipeline, so they cannot be merged. Make the same groups on every stage; one may be empty."
            )
        order = {name: index for index, name in enumerate(self.names)}
        return [sorted({n for stage in stages for n in stage[g]}, key=order.__getitem__) for g in range(len(mine))]

    def gathered(self, value: Any) -> list[Any]:
        """Return the value of each rank of the pipeline, in order. A collective of the pipeline."""
        if self.pipeline is None:
            return [value]
        return all_gather_values(value, self.pipeline, self.device)

    # ---- whole to parts -------------------------------------------------------------------------------------------

    def part(self, name: str, value: Any) -> Any:
        """Return this rank's part of a whole saved tensor, before it is sharded over data ranks."""
        if name not in self.cuts or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self.cuts[name].part(value)

    def split_on_load(self, module: nn.Module) -> None:
        """Make ``load_state_dict`` of the split module, or of a copy, accept the whole state."""
        known = set(self.keys)

        def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            own = {name: tensor.shape for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
            for key in [key for key in state if key.startswith(prefix)]:
                name = key[len(prefix) :]
                if name in known and name not in own:
                    state.pop(key)
                elif name in self.cuts and own.get(name) != state[key].shape:  # otherwise already this rank's part
                    state[key] = self.part(name, state[key])

        def ignore(module: nn.Module, incompatible: Any) -> None:
            """Ignore what hooks of other stages' blocks miss, such as those of ``torch.nn.utils.spectral_norm``."""
            elsewhere = {name.rpartition(".")[0] for name in known - module.state_dict().keys()}
            missing = incompatible.missing_keys
            missing[:] = [name for name in missing if name.rpartition(".")[0] not in elsewhere]

        register_splitting(module.register_load_state_dict_pre_hook, take)
        register_splitting(module.register_load_state_dict_post_hook, ignore)

    def optimizer_parts(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        name_of: Callable[[Tensor], str],
        whole_states: StateOwners | None = None,
    ) -> dict[str, Any]:
        """Split a whole optimizer ``state_dict`` for this rank's ``optimizer``; ``whole_states`` are left whole."""
        groups = self.group_names(optimizer, name_of)
        saved = [index for group in state["param_groups"] for index in group["params"]]
        index_of = dict(zip((name for names in groups for name in names), saved, strict=True))
        parts: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = name_of(parameter)
            if (values := state["state"].get(index_of[name])) is not None:
                is_whole = whole_states is not None and name in whole_states
                parts[index] = {k: v if is_whole else self.part(name, v) for k, v in values.items()}
        sizes = (len(group["params"]) for group in optimizer.param_groups)
        return {**state, "state": parts, "param_groups": numbered(state["param_groups"], sizes)}


def numbered(groups: Iterable[Mapping[str, Any]], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Return parameter groups of a ``state_dict`` with consecutive parameter indices."""
    numbers = count()
    return [{**group, "params": list(islice(numbers, size))} for group, size in zip(groups, sizes, strict=True)]
