"""Loading of a checkpoint into a rank's shards: weights and optimizer states, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.read.run_state import StoredTensor, materialised
from trainwright.core.errors import CheckpointError
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import StateOwners, numbered
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.shards import spread_like
from trainwright.strategies.state.wholes import only_splits
from trainwright.strategies.state.wrapped_tensors import OTHERWISE, rebuilt

WEIGHTS, CURRENT_WEIGHTS, OPTIMIZERS = "state_dict", "current_model_state", "optimizer_states"
# Maximum number of names in a message, per kind.
_SHOWN = 8


def is_stored(state: Mapping[str, Any]) -> bool:
    """Return whether ``state`` has unread tensors."""
    return any(isinstance(value, StoredTensor) for value in state.values())


def can_fill(module: nn.Module) -> bool:
    """Return whether weights may be read directly into ``module``: no loading hook in it changes them."""
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
    """Return whether a hook of ``load_state_dict`` is this project's or FSDP2's, which only split tensors."""
    function = getattr(hook, "hook", hook)
    return only_splits(hook) or str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def fill_weights(
    module: nn.Module,
    placement: Placement,
    state: Mapping[str, Any],
    expected: Sequence[str],
    *,
    strict: bool,
    where: str,
) -> None:
    """Read the weights of ``state`` into this rank's shards.

    Args:
        module: the module on this rank.
        placement: locations of shards.
        state: name -> :class:`StoredTensor`, tensor or extra state, of the whole module.
        expected: names of the whole module, over all ranks.
        strict: refuse missing and unexpected names, mismatched shapes and other kinds of numbers; otherwise skip these
            with a warning, unless nothing matches.
        where: source of the weights, for messages.

    Raises:
        CheckpointError: listing mismatches.
    """
    targets = {name: value for name, value in module.state_dict().items() if name in state}
    boxes = {name: placement.boxes(name, tensor) for name, tensor in targets.items() if isinstance(tensor, Tensor)}
    wrong = [
        f"{name}: saved {tuple(state[name].shape)}, the module has {parts.shape}"
        for name, parts in boxes.items()
        if hasattr(state[name], "shape") and tuple(state[name].shape) != parts.shape
    ]
    wrong += [
        f"{name}: saved as {state[name].dtype}, the module has {parts.dtype}; convert one to the kind of the other"
        for name, parts in boxes.items()
        if hasattr(state[name], "dtype") and _kind_of(state[name].dtype) != _kind_of(parts.dtype)
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
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(materialised(value))


def _kind_of(dtype: torch.dtype) -> tuple[bool, ...]:
    """Return the kind of numbers, within which casts keep the meaning."""
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def _key_of(value: Any) -> Any:
    return value.key if isinstance(value, StoredTensor) else id(value)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's memory location, equal for tied tensors."""
    part = local_tensor(tensor)
    return part.data_ptr(), part.numel()


def misfit(where: str, report: str, *, some_fit: bool = True) -> CheckpointError:
    """Return the error for mismatched weights, with what to type."""
    if not some_fit:
        return CheckpointError(
            f"{where} is of a different module, no tensor matches: {report} Pass one of this module."
        )
    return CheckpointError(
        f"{where} does not fit this module: {report} Build the module as it was, or type strict=false (in Python: "
        "self.strict_loading = False in the module) to load matching tensors only."
    )


def mismatch(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> str:
    """Summarize mismatches; empty if there are none."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    return "; ".join(f"{len(names)} tensor(s) {kind}: {listed(names)}" for kind, names in kinds if names) + (
        "." if missing or unexpected or wrong else ""
    )


def listed(names: Sequence[str]) -> str:
    """List the first few names for a message."""
    between = "; " if any(":" in name for name in names) else ", "  # shapes contain commas
    more = f"{between}... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more


@torch.no_grad()
def read_into(boxes: Mapping[str, TensorParts], state: Mapping[str, Any]) -> None:
    """Read tensors of ``state`` into boxes of the same names, in place."""
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
    """Read tensors from one source; tied ones share a key."""
    if hasattr(source, "fill"):
        for turn in range(max(map(len, wanted.values()))):
            source.fill({key: several[turn] for key, several in wanted.items() if turn < len(several)})
        return
    for key, several in wanted.items():
        for parts in several:
            for offsets, tensor in parts.parts:
                tensor.copy_(source.read(key, offsets, tuple(tensor.shape)))


def optimizer_parts(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    placement: Placement,
    name_of: Callable[[Tensor], str],
    owners: StateOwners | None = None,
) -> dict[str, Any]:
    """Return the ``state_dict`` for this rank's ``optimizer`` from a state saved by name under any layout.

    Raises:
        CheckpointError: if parameter groups differ from the saved ones.
    """
    boxes: dict[str, TensorParts] = {}
    stored: dict[str, StoredTensor] = {}

    def allocated(name: str, parameter: Tensor, key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and parameter.dim() == 0 and key != "step":  # of a scalar; steps are never sharded
            return spread_like(parameter, value.to(parameter.device))
        if not isinstance(value, StoredTensor):
            return rebuilt(materialised(value))  # LBFGS keeps lists of tensors
        if tuple(value.shape) != tuple(placement.boxes(name, parameter).shape):
            return value.whole()
        target = spread_like(parameter, torch.empty_like(local_tensor(parameter).detach(), dtype=value.dtype))
        boxes[value.key], stored[value.key] = placement.boxes(name, target), value
        return target

    _refuse_other_groups(placement.group_names(optimizer, name_of), saved["param_groups"])
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = name_of(parameter)
        values = saved["state"].get(name)
        if values is not None and (owners is None or name not in owners):
            state[index] = {k: allocated(name, parameter, k, v) for k, v in values.items()}
        elif values is not None and owners is not None and owners.is_mine(name):
            state[index] = {key: rebuilt(value) for key, value in materialised(values).items()}
    read_into(boxes, stored)
    rest = {k: materialised(v) for k, v in saved.items() if k not in ("by_name", "state", "param_groups")}
    sizes = (len(group["params"]) for group in optimizer.param_groups)
    groups = numbered((materialised(dict(group)) for group in saved["param_groups"]), sizes)
    return {**rest, "state": state, "param_groups": groups}


def refuse_other_optimizer(optimizer: Optimizer) -> None:
    """Refuse a loaded state that a different kind of optimizer saved.

    torch replaces the optimizer's groups by the saved ones. Missing options would otherwise fail in the first step with
    a ``KeyError``.

    Raises:
        CheckpointError: naming missing options.
    """
    # Loading adds "differentiable" to the defaults of any optimizer.
    needed = set(optimizer.defaults) - {"differentiable"}
    missing = sorted({key for group in optimizer.param_groups for key in needed - set(group)})
    if missing:
        raise CheckpointError(
            f"The checkpoint holds the state of another optimizer than {type(optimizer).__name__}: it has no "
            f"{', '.join(missing)}. Make the same optimizer {OTHERWISE}"
        )


def _refuse_other_groups(names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    if len(names) != len(saved):
        raise CheckpointError(
            f"The checkpoint holds an optimizer of {len(saved)} parameter group(s), this one has {len(names)}. Make "
            f"the same groups {OTHERWISE}"
        )
    for index, (own, group) in enumerate(zip(names, saved, strict=True)):
        missing, unexpected = sorted(set(own) - set(group["params"])), sorted(set(group["params"]) - set(own))
        if missing or unexpected:
            raise CheckpointError(
                f"Parameter group {index} of the optimizer differs from that of the checkpoint: "
                f"{mismatch(missing, unexpected, ())} Make the same groups {OTHERWISE}"
            )
