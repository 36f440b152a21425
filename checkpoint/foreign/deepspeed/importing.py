"""Checkpoints of DeepSpeed as run states, optimizer included: both know parameters by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from trainwright.checkpoint.foreign.deepspeed.merge import FlatTensor
from trainwright.checkpoint.foreign.deepspeed.reading import DeepSpeedCheckpoint, read_deepspeed
from trainwright.checkpoint.foreign.imported import Encoder, StreamedTensor, about
from trainwright.checkpoint.format.tree import encode, reference
from trainwright.checkpoint.write.save import Content

# What Lightning's DeepSpeed strategy put before the names of the user's module.
_WRAPPER = "_forward_module."
_LIGHTNING = "pytorch-lightning_version"


def of_deepspeed(source: str) -> Content:
    """What a folder of DeepSpeed holds, to be written as a checkpoint; tensors are read when they are written.

    Raises:
        CheckpointError: as :func:`~trainwright.checkpoint.foreign.deepspeed.reading.read_deepspeed`.
    """
    found = read_deepspeed(source)
    if found.left_out:
        warnings.warn(f"Of {source} these are left out: {'; '.join(found.left_out)}.", stacklevel=2)
    encoder = Encoder()
    tree = {key: encoder.entry(key, value) for key, value in found.client.items()}
    tree["state_dict"] = _weights(found, encoder)
    tree.setdefault("epoch", found.epoch)
    tree.setdefault("global_step", found.global_step)
    tree.setdefault(_LIGHTNING, version("lightning"))
    if found.optimizer:
        tree["optimizer_states"] = [_optimizer(found, encoder)]
        tree.setdefault("lr_schedulers", _schedulers(found, encoder))
        if "loops" not in tree:
            warnings.warn(
                f"{source} was not saved by Lightning, so it does not say where the run was in its data: a run that "
                "goes on from the import begins to count steps and epochs at 0, with the optimizer's state.",
                stacklevel=2,
            )
    told = about("run state" if found.optimizer else "weights", found.global_step, found.epoch)
    told["world_size"], told["strategy"] = found.ranks, f"deepspeed_stage_{found.stage}"
    told["versions"]["deepspeed"] = found.version
    return Content(tree, encoder.tensors, told)


def _schedulers(found: DeepSpeedCheckpoint, encoder: Encoder) -> list[Any]:
    """The scheduler that the user gave to DeepSpeed; its own ones mean nothing to torch's."""
    state = found.lr_scheduler
    if state is None:
        return []
    if "last_epoch" in state:
        return [encode(state, encoder.put, "lr_schedulers/0")]
    warnings.warn(
        f"{found.path} has the state of a scheduler of DeepSpeed ({', '.join(state)}), which is left out: set "
        "last_epoch of the scheduler that takes its place.",
        stacklevel=2,
    )
    return []


def _weights(found: DeepSpeedCheckpoint, encoder: Encoder) -> dict[str, Any]:
    first: dict[int, str] = {}
    tree = {}
    for name, tensor in found.weights.items():
        own = name.removeprefix(_WRAPPER)
        key = first.setdefault(id(tensor), f"weights/{own}")  # a shared parameter is one object
        encoder.tensors.setdefault(key, _streamed(tensor))
        tree[own] = reference(key)
    return tree


def _optimizer(found: DeepSpeedCheckpoint, encoder: Encoder) -> dict[str, Any]:
    state = {name.removeprefix(_WRAPPER): values for name, values in found.optimizer.items()}
    groups = [{**group, "params": [n.removeprefix(_WRAPPER) for n in group["params"]]} for group in found.param_groups]
    return {
        "by_name": True,
        "state": {name: _state(name, values, encoder) for name, values in state.items()},
        "param_groups": [encode(group, encoder.put, f"optimizer/0/groups/{i}") for i, group in enumerate(groups)],
    }


def _state(name: str, values: Mapping[str, FlatTensor], encoder: Encoder) -> dict[str, Any]:
    tree = {}
    for kind, tensor in values.items():
        key = f"optimizer/0/{name}/{kind}"
        if not tensor.shape:
            tree[kind] = encode(tensor.read(), encoder.put, key)
            continue
        encoder.tensors[key] = _streamed(tensor)
        tree[kind] = reference(key)
    return tree


def _streamed(tensor: FlatTensor) -> StreamedTensor:
    return StreamedTensor(tensor.shape, tensor.dtype, tensor.read)
