"""Reader of DeepSpeed ZeRO checkpoints (stages 1 to 3) and universal checkpoints: weights and optimizer state by name.

Tensors are assembled when they are read, and DeepSpeed is not needed. The format follows DeepSpeed 0.19
(``deepspeed/utils/zero_to_fp32.py``) and was checked against files that it wrote.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from trainwright.checkpoint.foreign.deepspeed.merge import (
    FlatTensor,
    Merged,
    Shapes,
    State,
    as_tensor,
    expect,
    merge_groups,
    merge_parameters,
    named_groups,
    number,
    shapes_of,
)
from trainwright.checkpoint.foreign.unpickle import Inert, load_inert, values_in
from trainwright.checkpoint.store.paths import join_path, normal_path
from trainwright.checkpoint.store.storage import Folder, is_folder
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Files of pipeline layers and of experts.
_LAYER = re.compile(r"(?:layer_\d+|.*expert_\d+).*_states\.pt")
_POINTERS = ("latest", "latest_universal")
_PLAIN_NAME = re.compile(r"[^/\\\0]{1,255}")


@dataclass(frozen=True)
class Files:
    """The files of one DeepSpeed checkpoint.

    Args:
        folder: of one step, such as ``.../global_step500``.
        model: names of the module's files, by data-parallel rank; one in stages 1 and 2.
        optimizer: names of the optimizer's files, by data-parallel rank.
        universal: whether it is a universal checkpoint, which has a folder per parameter.
    """

    folder: str
    model: tuple[str, ...]
    optimizer: tuple[str, ...]
    universal: bool

    def load(self, name: str) -> dict[str, Any]:
        """Return the dict in one file.

        Raises:
            CheckpointError: if it is missing, damaged, or not a dict.
        """
        value = self.load_value(name)
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{join_path(self.folder, name)} holds a {type(value).__name__}, not a dict as DeepSpeed writes."
            )
        return value

    def load_value(self, name: str) -> Any:
        """Return the value in one file.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        return load_inert(join_path(self.folder, name))

    def states_of(self, parameter: str) -> list[str]:
        """Return the names of a parameter's optimizer states in a universal checkpoint.

        Raises:
            CheckpointError: if it has no folder of the parameter.
        """
        path = join_path(self.folder, f"zero/{parameter}")
        if not _PLAIN_NAME.fullmatch(parameter) or parameter in (".", "..") or not is_folder(path):
            raise CheckpointError(f"{self.folder} has no folder zero/{parameter}, though it lists that parameter.")
        files = [name.removesuffix(".pt") for name in Folder(path).names() if name.endswith(".pt")]
        return [name for name in sorted(files) if name != "fp32"]


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder, local or in an fsspec store, looks like a DeepSpeed checkpoint."""
    path = normal_path(path)
    names = Folder(path).names() if is_folder(path) else []
    if any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names):
        return True
    return any((folder := _pointed(path, name)) and is_folder(folder) for name in _POINTERS if name in names)


def find_files(path: str | os.PathLike[str]) -> Files:
    """Return the files of a checkpoint.

    Args:
        path: the folder that DeepSpeed was given, in which ``latest`` names the step to read, or the folder of one
            step.

    Raises:
        CheckpointError: if there is none, files are missing, or its kind is not supported.
    """
    path = normal_path(path)
    if not is_folder(path):
        raise CheckpointError(f"There is no folder {path}.")
    folder = _folder_of_step(path)
    names = Folder(folder).names()
    _refuse_kinds(folder, names)
    model = _by_rank(folder, names, _MODEL)
    optimizer = _by_rank(folder, names, _OPTIMIZER)
    if not model:
        raise CheckpointError(f"{folder} has no file mp_rank_00_model_states.pt: it is not a DeepSpeed checkpoint.")
    return Files(folder, model, optimizer, is_folder(join_path(folder, "zero")))


def _folder_of_step(path: str) -> str:
    names = Folder(path).names()
    for pointer in _POINTERS:
        if pointer in names:
            folder = _pointed(path, pointer)
            if folder is None or not is_folder(folder):
                raise CheckpointError(
                    f"{join_path(path, pointer)} names a missing checkpoint. Give the folder of a step."
                )
            return folder
    return path


def _pointed(path: str, pointer: str) -> str | None:
    """Return the folder that a file names, ``None`` unless it is in ``path``."""
    with Folder(path).open(pointer) as file:
        text = file.read(1024).decode("utf-8", "replace").strip()
    return join_path(path, text) if _PLAIN_NAME.fullmatch(text) and text not in (".", "..") else None


def _refuse_kinds(folder: str, names: Iterable[str]) -> None:
    for name in names:
        if _LAYER.fullmatch(name):
            raise CheckpointError(
                f"{folder} was written with pipeline or expert parallelism ({name}), whose files do not say how "
                "they make up the module. Save the whole module with DeepSpeed (save_16bit_model) and import that."
            )
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if match and int(match[2]) > 0:
            raise CheckpointError(
                f"{folder} was written with tensor parallelism ({name}), and does not say how weights were split. "
                "Save the whole module with DeepSpeed, e.g. save_16bit_model, and import that."
            )


def _by_rank(folder: str, names: Iterable[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            rank = int(match[1] or 0)
            if rank in found:
                raise CheckpointError(
                    f"{folder} has two files of rank {rank}: {found[rank]} and {name}. Remove the old."
                )
            found[rank] = name
    missing = list(islice((rank for rank in range(max(found, default=-1) + 1) if rank not in found), 10))
    if missing:
        like = found[max(found)]
        raise CheckpointError(f"{folder} has no file like {like} for the ranks {', '.join(map(str, missing))}.")
    return tuple(found[rank] for rank in sorted(found))


__all__ = ["DeepSpeedCheckpoint", "is_deepspeed", "read_deepspeed"]

# DeepSpeed's own keys in a module's file; others are the client's.
_OWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "epoch",
    }
)  # fmt: skip


@dataclass(frozen=True)
class DeepSpeedCheckpoint(Merged):
    """Contents of a DeepSpeed checkpoint.

    Args:
        path: folder of the step that was read.
        version: of the DeepSpeed that wrote it.
        stage: of ZeRO; 0 without it.
        ranks: data-parallel ranks that wrote it.
        weights: parameters and buffers by name. Trained ones have the precision of the optimizer's master weights
            (float32); frozen parameters and buffers that of the module. A shared parameter is one object under several
            names.
        optimizer: ``exp_avg``, ``exp_avg_sq``, ``step`` and the like, by name of the parameter.
        param_groups: options of the parameter groups, ``params`` by name.
        lr_scheduler: state of DeepSpeed's scheduler, ``None`` if there was none.
        global_step: optimizer steps done.
        epoch: as saved by the client, 0 if it was not.
        client: other state of the client, such as Lightning's loops and callbacks.
        left_out: skipped values, each with the reason.
    """

    path: str
    version: str
    lr_scheduler: Mapping[str, Any] | None
    global_step: int
    epoch: int
    client: Mapping[str, Any]
    left_out: Sequence[str]


def read_deepspeed(path: str | os.PathLike[str]) -> DeepSpeedCheckpoint:
    """Open a DeepSpeed checkpoint.

    Nothing in its files is run, so they need not be trusted: objects of DeepSpeed's classes are read as data.

    Args:
        path: the folder that DeepSpeed was given, in which ``latest`` names the step to read, or the folder of one
            step, or of a universal checkpoint; local or any fsspec path. Local files are memory-mapped; others are
            loaded into memory.

    Raises:
        CheckpointError: if it is not one, is damaged or incomplete, or was written with tensor, pipeline or expert
            parallelism.
    """
    files = find_files(path)
    advice = "Use another checkpoint, or convert it with the zero_to_fp32.py beside it and import the result."
    with interpreting(files.folder, advice, "is damaged, or not in DeepSpeed's form"):
        return _read(files)


def _read(files: Files) -> DeepSpeedCheckpoint:
    model = [files.load(name) for name in files.model]
    first = model[0]
    if number(first.get("mp_world_size") or 1) > 1:
        raise CheckpointError(
            f"{files.folder} was written with tensor parallelism of {first['mp_world_size']}, and does not say along "
            "which dim weights were split. Save the whole module with DeepSpeed (save_16bit_model) and import that."
        )
    merged = _merge(files, model)
    client, left_out = _plain({key: value for key, value in first.items() if key not in _OWN_KEYS})
    scheduler, unknown = _plain(first.get("lr_scheduler") or {}, "lr_scheduler/")
    groups = [_plain(group, f"param_groups/{index}/") for index, group in enumerate(merged.param_groups)]
    for _, more in groups:
        unknown += more
    if not files.optimizer and not files.universal and first.get("optimizer"):
        unknown.append("optimizer: saved by position, not by name, without ZeRO")
    whole = replace(merged, weights=_weights(model, merged), param_groups=[group for group, _ in groups])
    return DeepSpeedCheckpoint(
        **vars(whole),
        path=files.folder,
        version=str(first.get("ds_version") or ""),
        lr_scheduler=scheduler or None,
        global_step=number(first.get("global_steps") or 0),
        epoch=number(first.get("epoch") or 0),
        client=client,
        left_out=left_out + unknown,
    )


# ---- weights ---------------------------------------------------------------------------------------------------------


def _merge(files: Files, model: Sequence[Mapping[str, Any]]) -> Merged:
    """Return the trained state from the files that hold it."""
    zero = (model[0].get("ds_config") or {}).get("zero_optimization") or {}
    round_robin = bool(zero.get("round_robin_gradients"))
    if files.universal and round_robin:
        # The converter (0.19) assumes the positions of parameters without this option.
        raise CheckpointError(
            f"{files.folder} was converted with round_robin_gradients, which mixes weights. Import the original."
        )
    if files.universal:
        return _universal(files, shapes_of(model[0]["param_shapes"]))
    if not files.optimizer:
        return Merged(0, number(model[0].get("dp_world_size") or 1), {}, {}, [])
    ranks = [expect(files.load(name)["optimizer_state_dict"], dict) for name in files.optimizer]
    counts = ranks[0]["partition_count"]
    partitions = {number(count) for count in (counts if isinstance(counts, list) else [counts])}
    if len(partitions) > 1:
        raise CheckpointError(
            f"{files.folder} was written with expert parallelism of DeepSpeed, which is not supported."
        )
    if partitions != {len(ranks)}:
        raise CheckpointError(
            f"{files.folder} was written by {partitions.pop()} ranks, but has files of {len(ranks)}. Fetch the others."
        )
    # DeepSpeed's bfloat16 optimizer does not record the stage, which is always 1.
    stage = number(ranks[0].get("zero_stage", 1))
    shapes = shapes_of(model[0]["param_shapes"])
    if stage < 3:
        # With round_robin_gradients DeepSpeed (0.19) records positions as they would be without it.
        return merge_groups(stage, ranks, shapes, check_slices=not round_robin)
    if len(model) != len(ranks):
        raise CheckpointError(f"{files.folder} has module files of {len(model)} ranks, but {len(ranks)} wrote it.")
    return merge_parameters(ranks, shapes)


def _weights(model: Sequence[Mapping[str, Any]], merged: Merged) -> dict[str, FlatTensor]:
    """Return the tensors under names of the module, in the module's order."""
    first = model[0]
    module = expect(first["module"], dict)
    found = {**_frozen(model), **merged.weights}
    shared = expect(first.get("shared_params") or {}, dict)
    for name, tensor in module.items():
        # In stage 3 the module's parameters are empty placeholders, but its buffers are not.
        stands_in = merged.stage == 3 and name not in first["buffer_names"]
        if name not in found and name not in shared and not stands_in:
            found[name] = FlatTensor.whole(expect(tensor, Tensor))
    found.update({name: found[origin] for name, origin in shared.items() if origin in found})
    order = dict.fromkeys([name for name in module if name in found])
    return {name: found[name] for name in [*order, *(name for name in found if name not in order)]}


def _frozen(model: Sequence[Mapping[str, Any]]) -> dict[str, FlatTensor]:
    """Return frozen parameters: whole, or in stage 3 split among the ranks."""
    weights = {}
    shapes = expect(model[0].get("frozen_param_shapes") or {}, dict)
    for name, shape in shapes_of(shapes)[0].items():
        parts = [expect(own["frozen_param_fragments"][name], Tensor) for own in model]
        weights[name] = FlatTensor(shape, [part.reshape(-1) for part in parts], parts[0].dtype)
    return weights


# ---- universal checkpoints: a folder per parameter -------------------------------------------------------------------


def _universal(files: Files, shapes: Sequence[Shapes]) -> Merged:
    common = expect(files.load("zero/optimizer_state.pt"), dict)
    steps = common.get("optimizer_state_dict", {}).get("state", {})
    weights: dict[str, FlatTensor] = {}
    optimizer: dict[str, State] = {}
    for index, group in enumerate(shapes):
        # In stage 3 step counts are stored by sub-group, not with the parameters.
        step = steps.get(index, {}).get("step")
        counted = {} if step is None else {"step": FlatTensor.whole(as_tensor(step))}
        for name, shape in group.items():
            present = files.states_of(name)
            weights[name] = _of_parameter(files, name, "fp32", shape)
            optimizer[name] = {**counted, **{key: _of_parameter(files, name, key, shape) for key in present}}
    counts = common.get("partition_count", 1)
    ranks = max(number(count) for count in (counts if isinstance(counts, list) else [counts]))
    groups = named_groups(common["param_groups"], shapes)
    return Merged(number(common.get("zero_stage", 1)), ranks, weights, optimizer, groups)


def _of_parameter(files: Files, name: str, key: str, shape: tuple[int, ...]) -> FlatTensor:
    """Return the weight or one state of a parameter; in stages 1 and 2 it is in a dict."""
    value = files.load_value(f"zero/{name}/{key}.pt")
    tensor = expect(value["param"] if isinstance(value, dict) else value, Tensor)
    if tensor.numel() != math.prod(shape) and tensor.dim():
        raise ValueError(f"{name} has {tensor.numel()} values in {key}.pt, but {math.prod(shape)} by its shape")
    return FlatTensor(shape if tensor.dim() else (), [tensor.reshape(-1)], tensor.dtype)


# ---- other values ----------------------------------------------------------------------------------------------------


def _plain(values: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the values that can be kept, and descriptions of those that need code of a class to be rebuilt."""
    kept = {key: value for key, value in values.items() if _named_class(value) is None}
    left_out = [f"{where}{key}: {_named_class(value)}" for key, value in values.items() if key not in kept]
    return kept, left_out


def _named_class(value: Any) -> str | None:
    """Return the name of a class with an object anywhere in ``value``."""
    return next((str(getattr(each, "name", each)) for each in values_in(value) if isinstance(each, Inert | type)), None)
