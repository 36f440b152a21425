"""Export of a checkpoint of any layout to formats of other tools: safetensors, Hugging Face, peft, Lightning, torch.

Tensors are read and written one at a time, so models larger than this machine's memory can be exported.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.checkpoint.foreign.adapters import Adapter
from trainwright.checkpoint.foreign.lightning_file import as_lightning
from trainwright.checkpoint.foreign.tokenizer_files import TOKENIZER_FILES, tokenizer_files
from trainwright.checkpoint.foreign.torch_file import LazyTensor, check_torch_file, write_torch_file
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileWriter
from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.checkpoint.store.atomic import atomic_path
from trainwright.checkpoint.store.paths import is_remote, local_path
from trainwright.checkpoint.store.write_errors import refuse_full
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting
from trainwright.core.text.sizes import size_text

Format = Literal["safetensors", "hf", "peft", "lightning", "torch"]
FORMATS: tuple[str, ...] = ("safetensors", "hf", "peft", "lightning", "torch")
_ONE_FILE = ("peft", "lightning", "torch")

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Default bytes of tensors per file of a folder."""

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("float32", "fp32", "32"),
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float16: ("float16", "fp16", "16"),
        torch.float64: ("float64", "fp64", "64"),
    }.items()
    for name in names
}
# Name parts that peft adds to base weights.
_OF_WRAPPERS = re.compile(r"\.(base_layer|original_module)\.")
_OLD = (
    "or was written by a version that did not record adapters (resume it with this one and save it again), so no "
    "adapter is known"
)
# Marks of adapters in tensor names.
_ADAPTERS = (".lora_", ".base_layer.", ".modules_to_save.", ".ia3_")


@dataclass(frozen=True)
class _Order:
    """Options of an export."""

    target: Path
    max_shard_bytes: int | None
    dtype: torch.dtype | None
    overwrite: bool
    model: str | None
    merge: bool
    tokenizer: str | Path | None


def export(
    path: str,
    to: str | Path,
    format: Format | str,
    *,
    max_shard_bytes: int | None = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    model: str | None = None,
    merge: bool = False,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write the checkpoint at ``path`` in another format, after verifying it.

    Args:
        path: a checkpoint of this package, local or any fsspec path.
        to: target, a local path.
        format: ``"safetensors"``: the weights under the module's names, as one file (``to`` ends in ``.safetensors``)
            or a folder of shards with an index. ``"hf"``: a folder for ``from_pretrained``, of the Hugging Face model
            in the module. ``"peft"``: a folder for ``PeftModel.from_pretrained``, of the active adapter in the module;
            needs peft. ``"lightning"``: a ``.ckpt`` file for ``load_from_checkpoint`` and Lightning's own Trainer.
            ``"torch"``: a file with ``{name: tensor}``.
        max_shard_bytes: most bytes of tensors in one file, unless a single tensor is larger; ``None``: 5 GB in a
            folder, no limit for one file. Only for ``"safetensors"`` and ``"hf"``.
        dtype: convert floating-point weights to it (``"bfloat16"``, ``"float16"``, ``"float32"``, ``"float64"``);
            ``None``: unchanged. Not for ``"lightning"``, whose optimizer states belong to the original weights.
        overwrite: replace an earlier export; off: refuse if ``to`` exists.
        model: for ``"hf"`` and ``"peft"`` and modules with several such models, the attribute path of the one to
            export.
        merge: for ``"hf"``, merge the model's active adapter (LoRA, DoRA or IA3 of peft) into the weights; needs peft.
        tokenizer: for ``"hf"`` and ``"peft"``, a folder with the tokenizer's files, which are copied beside the
            weights; ``None``: the ``tokenizer/`` of the checkpoint's run directory, if there is one.

    Returns:
        The file or folder that was written.

    Raises:
        CheckpointError: if the checkpoint cannot be read or lacks what the format needs, if an argument does not apply
            to the format, or if ``to`` cannot be written; nothing is left there then.
        DamagedCheckpoint: if the checkpoint is damaged.
    """
    order = _Order(_target(to), max_shard_bytes, _dtype(dtype), overwrite, model, merge, tokenizer)
    _refuse_contradictions(order, format)
    _WRITERS[format](RunState.open(path), order)
    return order.target


# ---- options --------------------------------------------------------------------------------------------------------


def _target(to: str | Path) -> Path:
    if is_remote(str(to)):
        raise CheckpointError(f"Exports are written to local paths, and {to} is remote. Give a local path and copy it.")
    return Path(local_path(str(to)))


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise CheckpointError(f"dtype={dtype} is not supported; give float32, bfloat16, float16 or float64.")
    return found


def _refuse_contradictions(order: _Order, format: str) -> None:
    if format not in FORMATS:
        raise CheckpointError(f"format={format!r} is unknown; give one of {', '.join(FORMATS)}.")
    if order.max_shard_bytes is not None and format in _ONE_FILE:
        raise CheckpointError(
            f"max_shard_bytes (--max-shard-size) does not apply to format={format}, which is one file."
        )
    if order.max_shard_bytes is not None and order.max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={order.max_shard_bytes} must be at least 1.")
    if order.dtype is not None and format == "lightning":
        raise CheckpointError(
            "dtype does not apply to format=lightning, whose optimizer states belong to the original weights; export "
            "the weights alone with format=torch or format=safetensors."
        )
    for name, given, formats in (
        ("model", order.model, ("hf", "peft")), ("tokenizer", order.tokenizer, ("hf", "peft")),
        ("merge", order.merge or None, ("hf",)),
    ):  # fmt: skip
        if given is not None and format not in formats:
            only = " and format=".join(formats)
            raise CheckpointError(f"{name}={given!r} applies to format={only} only, not to format={format}.")


# ---- weights --------------------------------------------------------------------------------------------------------


def _weights(state: RunState) -> dict[str, LazyTensor]:
    """Return the tensors of the module's ``state_dict``, in its order; tied ones share a key."""
    saved = state.tree.get("state_dict")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{state.path} holds no weights (no state_dict); there is nothing to export.")
    others = [name for name, value in saved.items() if not isinstance(value, StoredTensor | Tensor)]
    if others:
        warnings.warn(
            f"{', '.join(others)}: the module's extra state is not a tensor and is skipped; format=lightning keeps it.",
            stacklevel=2,
        )
    return {name: _lazy(name, saved[name]) for name in saved if name not in others}


def _lazy(name: str, value: StoredTensor | Tensor) -> LazyTensor:
    if isinstance(value, StoredTensor):
        return LazyTensor(value.key, tuple(value.shape), value.dtype, value.whole)
    return LazyTensor(f"value of {name}", tuple(value.shape), value.dtype, lambda: value)


def _all_converted(weights: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    return {name: _converted(name, lazy, dtype) for name, lazy in weights.items()}


def _converted(name: str, lazy: LazyTensor, dtype: torch.dtype | None) -> LazyTensor:
    if dtype is None or not lazy.dtype.is_floating_point or lazy.dtype == dtype:
        return lazy

    def read() -> Tensor:
        value = lazy.read()
        converted = value.to(dtype)
        if not torch.equal(converted.isfinite(), value.isfinite()):
            raise CheckpointError(f"{name} has values that {dtype} cannot hold; give dtype=bfloat16 or dtype=float32.")
        return converted

    return replace(lazy, dtype=dtype, read=read)


def _written_once(weights: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the weights without those tied to an earlier one, and name -> the one it is tied to."""
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, lazy in weights.items():
        kept = first.setdefault(lazy.key, name)
        if kept != name:
            tied[name] = kept
    return {name: lazy for name, lazy in weights.items() if name not in tied}, tied


# ---- formats --------------------------------------------------------------------------------------------------------


def _safetensors(state: RunState, order: _Order) -> None:
    with interpreting(state.path):
        weights, tied = _written_once(_all_converted(_weights(state), order.dtype))
    # Tied names as the safetensors package records them: omitted name -> written name.
    metadata = {"format": "pt", **tied}
    if order.target.suffix != ".safetensors":
        _write_folder(order, weights, metadata, {})
        return
    refuse_full(str(order.target), _num_bytes(weights.values()))
    shards = _shards(weights, order.max_shard_bytes)
    if len(shards) > 1:
        raise CheckpointError(
            f"The weights have {size_text(_num_bytes(weights.values()))}, more than max_shard_bytes="
            f"{order.max_shard_bytes} allows in one file. Give a folder instead of {order.target.name}."
        )
    with atomic_path(order.target, overwrite=order.overwrite, may_replace=_is_export) as pending:
        _write_file(pending, weights, weights, metadata)


def _hugging_face(state: RunState, order: _Order) -> None:
    with interpreting(state.path):
        kept, files = _hugging_face_content(state, order)
    _write_folder(order, _all_converted(kept, order.dtype), {"format": "pt"}, files)


def _hugging_face_content(state: RunState, order: _Order) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Return the weights of a Hugging Face model, and the files beside them."""
    found = state.about.get("hugging_face") or []
    facts = _chosen(found, order.model, state.path, "Hugging Face model", "so there is no config.json to write")
    inside = _merged(state, facts) if order.merge else _unadapted(state, facts)
    names = [[_OF_WRAPPERS.sub(".", name) for name in group] for group in facts["tied"]]
    first = {name: position for group in names for position, name in enumerate(group)}
    kept, _ = _written_once(dict(sorted(inside.items(), key=lambda item: first.get(item[0], 0))))
    kept = {name: lazy for name, lazy in inside.items() if name in kept}
    dtypes = [order.dtype or lazy.dtype for lazy in kept.values() if lazy.dtype.is_floating_point]
    config = {**facts["config"], "dtype": str(dtypes[0]).removeprefix("torch.") if dtypes else facts["dtype"]}
    if order.merge and any(len({inside[name].key for name in group if name in inside}) > 1 for group in names):
        # The adapter changed only one of the tied weights.
        config["tie_word_embeddings"], kept = False, inside
    return kept, {"config.json": config, **_files_beside(state, order, facts)}


def _unadapted(state: RunState, facts: Mapping[str, Any]) -> dict[str, LazyTensor]:
    prefix = _under(facts["prefix"])
    inside = {name.removeprefix(prefix): lazy for name, lazy in _weights(state).items() if name.startswith(prefix)}
    adapters = [name for name in inside if any(mark in name for mark in _ADAPTERS)]
    if adapters:
        raise CheckpointError(
            f"{facts['class']} has adapters ({adapters[0]}, ...), which from_pretrained would not find. Give "
            "merge=True (--merge) to merge them into the weights, format=peft to export the adapter alone, or "
            "format=safetensors for all tensors as they are."
        )
    return inside


def _merged(state: RunState, facts: Mapping[str, Any]) -> dict[str, LazyTensor]:
    around = [f for f in state.about.get("peft") or () if facts["prefix"].startswith(_under(f["prefix"]))]
    if not around:
        raise CheckpointError(
            f"{facts['class']} of {state.path} is not in a PeftModel, {_OLD}. Omit merge, or give format=safetensors."
        )
    return _adapter(state, around[0]).merged()


def _peft(state: RunState, order: _Order) -> None:
    with interpreting(state.path):
        adapter = _adapter(state, _chosen(state.about.get("peft") or [], order.model, state.path, "PeftModel", _OLD))
        files = {"adapter_config.json": adapter.config, **_files_beside(state, order, adapter.base)}
        weights = adapter.own()
    _write_folder(order, _all_converted(weights, order.dtype), {"format": "pt"}, files, "adapter_model")


def _adapter(state: RunState, facts: Mapping[str, Any]) -> Adapter:
    trained = (state.tree.get("trainwright") or {}).get("trained", ())
    models = state.about.get("hugging_face") or []
    return Adapter.of(facts, models, _weights(state), trained, state.about.get("init_from"))


def _files_beside(state: RunState, order: _Order, facts: Mapping[str, Any]) -> dict[str, Any]:
    generation = facts["generation_config"]
    files = {} if generation is None else {"generation_config.json": generation}
    return {**files, **tokenizer_files(state.path, order.tokenizer)}


def _under(prefix: str) -> str:
    return f"{prefix}." if prefix else ""


def _chosen(found: Sequence[dict[str, Any]], model: str | None, path: str, kind: str, without: str) -> dict[str, Any]:
    """Return the facts of the selected model."""
    if not found:
        raise CheckpointError(f"{path} was made from a module without a {kind}, {without}. Give format=safetensors.")
    prefixes = [facts["prefix"] for facts in found]
    if model is None and len(found) == 1:
        return found[0]
    if model not in prefixes:
        given = "none was selected" if model is None else f"there is no {model!r}"
        raise CheckpointError(
            f"{path} has {kind}s at {', '.join(map(repr, prefixes))}, and {given}. Give model=<one of these> "
            "(--model), or format=safetensors for all weights."
        )
    return found[prefixes.index(model)]


def _lightning(state: RunState, order: _Order) -> None:
    with interpreting(state.path):
        tree, changed = as_lightning(state.tree)
    if changed:
        warnings.warn(
            f"{changed} became plain values, since other classes would need torch.load(weights_only=False).",
            stacklevel=3,
        )
    _write_torch(order, tree, state.manifest.num_bytes)


def _torch(state: RunState, order: _Order) -> None:
    with interpreting(state.path):
        weights = _all_converted(_weights(state), order.dtype)
    _write_torch(order, weights, _num_bytes(_written_once(weights)[0].values()))


_WRITERS: dict[str, Callable[[RunState, _Order], None]] = {
    "safetensors": _safetensors,
    "hf": _hugging_face,
    "peft": _peft,
    "lightning": _lightning,
    "torch": _torch,
}


# ---- files ----------------------------------------------------------------------------------------------------------


def _write_torch(order: _Order, tree: Any, needed: int) -> None:
    refuse_full(str(order.target), needed)
    with atomic_path(order.target, overwrite=order.overwrite, may_replace=lambda _: False) as pending:
        with pending.open("wb") as file:
            write_torch_file(file, tree)
        check_torch_file(pending)


def _write_folder(
    order: _Order,
    weights: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    others: Mapping[str, Any],
    name: str = "model",
) -> None:
    """Write a folder of shards, with an index if there are several, and other files (bytes, or JSON) beside them."""
    refuse_full(str(order.target), _num_bytes(weights.values()))
    limit = order.max_shard_bytes or DEFAULT_SHARD_BYTES
    shards = _shards(weights, limit if name == "model" else None)  # peft reads a single file
    total = len(shards)
    names = [f"{name}-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    names = names if total > 1 else [f"{name}.safetensors"]
    files = dict(others)
    if total > 1:
        files[f"{name}.safetensors.index.json"] = {
            "metadata": {"total_size": _num_bytes(weights.values())},
            "weight_map": {key: file for file, keys in zip(names, shards, strict=True) for key in keys},
        }
    with atomic_path(order.target, overwrite=order.overwrite, may_replace=_is_export) as pending:
        pending.mkdir()
        for file, keys in zip(names, shards, strict=True):
            _write_file(pending / file, weights, keys, metadata)
        for file, content in files.items():
            plain = content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode()
            (pending / file).write_bytes(plain)


def _write_file(
    path: Path, weights: Mapping[str, LazyTensor], keys: Sequence[str] | Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    entries = [TensorEntry(key, weights[key].dtype, weights[key].shape) for key in keys]
    with path.open("wb") as file:
        writer = TensorFileWriter(file, entries, metadata)
        for key in keys:
            writer.write(key, weights[key].read())
        writer.close()


def _shards(weights: Mapping[str, LazyTensor], limit: int | None) -> list[list[str]]:
    """Split names in order, so that no shard exceeds ``limit`` bytes unless it is a single tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for key, lazy in weights.items():
        if limit is not None and shards[-1] and size + lazy.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += lazy.nbytes
    return shards


def _num_bytes(tensors: Any) -> int:
    return sum(lazy.nbytes for lazy in tensors)


def _is_export(name: str) -> bool:
    """Return whether exports write files of that name."""
    return name.endswith((".safetensors", ".safetensors.index.json")) or name in (
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        *TOKENIZER_FILES,
    )
