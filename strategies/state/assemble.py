"""From what the ranks of a layout hold to the state of the whole module, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.state.wholes import register_taking, whole_on_device


class StateOwners(Protocol):
    """Of which parameters one rank has the optimizer state, and has it whole."""

    def __contains__(self, name: str) -> bool:
        """Whether the parameter ``name`` is one of them."""

    def is_mine(self, name: str) -> bool:
        """Whether this rank is its owner."""

    def united(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Entries by name of all ranks among which parameters are dealt. A collective of these."""


@dataclass(frozen=True)
class Assembly:
    """Where the parts of a module are, by fully qualified name.

    Args:
        names: names of all parameters of the unmodified module, in its order.
        keys: keys of its ``state_dict``, in order.
        cuts: how a parameter is cut along other axes than the data axes; without an entry it is not.
        owners: index along the pipeline axis of a rank that holds a parameter or buffer; without an entry all do.
        pipeline: the ranks of this rank's pipeline; ``None``: one stage.
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
        """Of a module that every rank holds whole; without its names."""
        return cls((), (), {}, {}, None, torch.device("cpu"))

    # ---- parts to wholes ------------------------------------------------------------------------------------------

    def whole_here(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a parameter's tensor, from the ranks of this stage; on the CPU."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = whole_on_device(tensor)
        if name in self.cuts:
            tensor = self.cuts[name].whole(tensor.to(self.device))
        return tensor.to("cpu", copy=True)

    def wholes(self, held: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole of each of ``names`` that a rank of the pipeline holds; a collective of all ranks.

        Args:
            held: this rank's parts by name.
            names: which, in order; the same on all ranks.
        """
        for name in self._held_by_owners(held, names):
            part = self.whole_here(name, held[name]) if self.owns(name) else None
            yield name, self._from_owner(part, self.owners.get(name, 0))

    def owns(self, name: str) -> bool:
        """Whether this rank's copy is the one that counts in its pipeline."""
        return self.pipeline is None or dist.get_rank(self.pipeline) == self.owners.get(name, 0)

    def _held_by_owners(self, held: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
        """Those of ``names``, in order, that their owners hold; a collective of the pipeline."""
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
        """The whole module's ``state_dict``; ``keep=False`` keeps no tensors (for ranks that do not write)."""
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
        """The ``state_dict`` that ``optimizer`` would have on one process.

        Args:
            optimizer: this rank's.
            state: its ``state_dict``, whose tensors may be parts.
            name_of: name of a parameter as the optimizer holds it.
            keep: as in :meth:`whole_state`.
            whole_states: parameters whose state is whole already, on every rank; ``None``: of none.
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
        elif value.dim() == 0 or is_whole:  # a step count is the same on all ranks
            value = value.detach().cpu()
        else:
            value = self.whole_here(name, value)
        whole = self._from_owner(value, owner)
        return whole if keep else None

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """Names of the parameters of each group of ``optimizer`` on all stages together."""
        mine = [[name_of(p) for p in group["params"]] for group in optimizer.param_groups]
        stages = self.gathered(mine)
        if len(stages) == 1:
            return mine
        if len({len(groups) for groups in stages}) > 1:
            raise ValueError(
                f"configure_optimizers made {[len(groups) for groups in stages]} parameter groups on the stages of the "
                "pipeline, so they cannot be put together. Make the same groups on every stage; one may be empty."
            )
        order = {name: index for index, name in enumerate(self.names)}
        return [sorted({n for stage in stages for n in stage[g]}, key=order.__getitem__) for g in range(len(mine))]

    def gathered(self, value: Any) -> list[Any]:
        """What each rank of the pipeline gives, in order; a collective of it."""
        if self.pipeline is None:
            return [value]
        return all_gather_values(value, self.pipeline, self.device)

    # ---- wholes to parts ------------------------------------------------------------------------------------------

    def part(self, name: str, value: Any) -> Any:
        """What this rank holds of a whole saved tensor, before it is split over data ranks."""
        if name not in self.cuts or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self.cuts[name].part(value)

    def take_parts_on_load(self, module: nn.Module) -> None:
        """Let ``load_state_dict`` of the cut module, or of a copy of it, take a whole saved state."""
        known = set(self.keys)

        def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            own = {name: tensor.shape for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
            for key in [key for key in state if key.startswith(prefix)]:
                name = key[len(prefix) :]
                if name in known and name not in own:
                    state.pop(key)
                elif name in self.cuts and own.get(name) != state[key].shape:  # else it is this rank's part already
                    state[key] = self.part(name, state[key])

        register_taking(module, take)

    def optimizer_parts(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        name_of: Callable[[Tensor], str],
        whole_states: StateOwners | None = None,
    ) -> dict[str, Any]:
        """Of a whole optimizer ``state_dict``, what belongs to the parameters of this rank's ``optimizer``.

        ``whole_states`` are left whole.
        """
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
    """Parameter groups of a ``state_dict``, whose parameters are numbered one after the other."""
    numbers = count()
    return [{**group, "params": list(islice(numbers, size))} for group, size in zip(groups, sizes, strict=True)]
