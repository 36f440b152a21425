"""Import of checkpoints of other tools: safetensors, Hugging Face, Lightning, torch, DeepSpeed.

Files are memory-mapped or read tensor by tensor, so models larger than this machine's memory can be imported.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.foreign.deepspeed.merge import FlatTensor
from trainwright.checkpoint.foreign.deepspeed.reading import DeepSpeedCheckpoint, is_deepspeed, read_deepspeed
from trainwright.checkpoint.foreign.lightning_file import with_cursors
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import MANIFEST
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.format.tree import encode, encode_supported, reference, with_types
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.store.paths import join_path, local_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.checkpoint.write.objects import HYPER_PARAMETERS
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting, parse_json
from trainwright.core.text.sizes import size_text

_MOST_EXPANDED = 1 << 30
_SECTIONS = {"state_dict": "weights", "current_model_state": "current_weights"}


class StreamedTensor(TensorParts):
    """A whole tensor that is read when it is written.

    Args:
        shape: its shape.
        dtype: its dtype.
        read: returns the tensor, on the CPU.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        # Shape and size for planning.
        stand_in = torch.empty(tuple(shape), dtype=dtype, device="meta")
        super().__init__(shape, dtype, [((0,) * len(tuple(shape)), stand_in)])
        self._read = read

    def part_at(self, offsets: Sequence[int] | None) -> Tensor:
        """Read the whole tensor."""
        super().part_at(offsets)
        return self._read()


class Encoder:
    """Encoder of loaded values into the tree of a checkpoint.

    Attributes:
        tensors: tensors that the tree refers to, by key.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorParts] = {}
        self._first: dict[tuple[Any, ...], str] = {}

    def entry(self, key: str, value: Any) -> Any:
        """Encode one entry of Lightning's checkpoint dict."""
        if key in _SECTIONS:
            return self.weights(value, _SECTIONS[key])
        if key in HYPER_PARAMETERS:
            return self.hyper_parameters(value, key)
        return encode(value, self.put, key)

    def put(self, path: str, tensor: Tensor) -> str:
        """Add a tensor other than a weight."""
        key = f"tree/{path}"
        self.tensors[key] = TensorParts.whole(_with_values(path, tensor.detach()))
        return key

    def weights(self, state: Mapping[str, Any], section: str) -> dict[str, Any]:
        """Encode a ``state_dict``; names of one tensor share a key."""
        tree: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                tree[name] = encode(value, self.put, f"{section}/{name}")
                continue
            value = _with_values(name, value.detach())
            memory = (section, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            # Empty tensors may share a data pointer.
            key = self._first.setdefault(memory, f"{section}/{name}") if value.numel() else f"{section}/{name}"
            self.tensors.setdefault(key, TensorParts.whole(value))
            tree[name] = reference(key)
        return tree

    def hyper_parameters(self, values: Any, section: str) -> Any:
        """Encode hyper-parameters; skip those that a checkpoint cannot hold, with a warning."""
        if isinstance(values, Namespace):
            values = vars(values)
        if not isinstance(values, dict):
            return encode(values, self.put, section)
        tree, left_out = encode_supported(values, self.put, section)
        if left_out:
            warnings.warn(
                f"The hyper-parameters {with_types(left_out)} are skipped, since a checkpoint holds plain values. Pass "
                "them to load_from_checkpoint(path, name=value).",
                stacklevel=2,
            )
        return tree


def _with_values(path: str, tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it has a value per element.

    Raises:
        CheckpointError: if it is a meta, sparse or quantized tensor, or expands a few stored values implausibly.
    """
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain:
        raise CheckpointError(
            f"{path} is a tensor on {tensor.device} with layout {tensor.layout}, which a checkpoint cannot hold. "
            "Save it as a dense CPU tensor."
        )
    size = tensor.numel() * tensor.element_size()
    if size > max(_MOST_EXPANDED, 16 * tensor.untyped_storage().nbytes()):
        raise CheckpointError(
            f"{path} of shape {tuple(tensor.shape)} would take {size_text(size)}, but stores only "
            f"{size_text(tensor.untyped_storage().nbytes())}. Save it before it is expanded."
        )
    return tensor


def about(kind: str, step: Any = 0, epoch: Any = 0) -> dict[str, Any]:
    """Return the manifest's description of an import.

    Args:
        kind: ``"run state"`` or ``"weights"``.
        step: optimizer steps done.
        epoch: epochs done.
    """
    return {
        "kind": kind,
        "step": int(step),
        "epoch": int(epoch),
        "world_size": 1,
        "data_ranks": 1,
        "layout": {},
        "strategy": "import",
        "versions": {name: version(name) for name in ("trainwright", "torch")},
        "metrics": {},
    }


# Prefix that Lightning's DeepSpeed strategy adds to names of the user's module.
_WRAPPER = "_forward_module."
WEIGHTS = "state_dict"
# Common keys of a model's weights in larger files.
_NESTED = (WEIGHTS, "model_state_dict", "model", "module")
# torchtitan stores weights at the top level beside it.
_BESIDE = "optimizer"
_LIGHTNING = "pytorch-lightning_version"
_KINDS = (
    "a .safetensors file or a folder of them, a Hugging Face folder, a Lightning .ckpt file, a torch file with "
    "{name: tensor}, or a folder of DeepSpeed"
)


def import_checkpoint(source: str, to: str | Path, *, trust: bool = False, overwrite: bool = False) -> Path | str:
    """Write a checkpoint of this package from another tool's file or folder, which is not modified.

    Weights keep their names. A Lightning ``.ckpt`` keeps everything, and a DeepSpeed folder its optimizer: resume the
    run from these with ``ckpt_path=<to>``. Other kinds have weights only: start from them with ``init_from=<to>``.

    Args:
        source: a ``.safetensors`` file or a folder of them (a ``config.json`` beside them is kept), a Lightning
            ``.ckpt``, a torch file with ``{name: tensor}``, or a DeepSpeed folder; local or any fsspec path except web
            addresses.
        to: folder of the new checkpoint, local or any fsspec path.
        trust: load files whose objects run code. Off: refuse them. DeepSpeed's are read as data either way.
        overwrite: replace an existing checkpoint; off: refuse if ``to`` exists.

    Returns:
        The checkpoint's path: a :class:`~pathlib.Path`, or a text if ``to`` is remote.

    Raises:
        CheckpointError: if ``source`` is none of these, cannot be read, would need ``trust``, or holds values that a
            checkpoint cannot.
    """
    source, target = os.fspath(source), os.fspath(to)
    if source.startswith(("http://", "https://")):
        raise CheckpointError(f"{source} is on a web server: download it first, then import the local file.")
    taken = Folder(target)
    if not overwrite and (taken.exists() or taken.is_file()):
        raise CheckpointError(f"{target} already exists. Give another path, or overwrite=True (--overwrite).")
    with interpreting(source, "Give another file."):
        content = _content(source, trust)
    write(content, target)
    return target if "://" in target else Path(local_path(target))


def _content(source: str, trust: bool) -> Content:
    folder = Folder(source)
    if folder.is_file() and folder.exists():
        return _of_state_file(source)
    if folder.is_file():
        return _of_safetensors(source) if source.endswith(".safetensors") else _of_torch_file(source, trust)
    if not folder.exists():
        raise CheckpointError(f"{source} does not exist. Give {_KINDS}.")
    names = folder.names()
    if MANIFEST in names:
        raise CheckpointError(f"{source} is already a checkpoint of Trainwright; copy it, or export it.")
    if any(name.endswith(".safetensors") for name in names):
        return _of_safetensors(source)
    return _of_folder(source, names, trust)


def _of_folder(source: str, names: Sequence[str], trust: bool) -> Content:
    if is_deepspeed(source):
        return of_deepspeed(source)
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise CheckpointError(f"{source} is a folder with {', '.join(sorted(pickled)[:5])}; give one of these files.")
    # Folders of torch.distributed.checkpoint are handled there.
    return _of_torch_file(source, trust)


def _of_state_file(source: str) -> Content:
    """Return the contents of a run state in one file."""
    state = RunState.open(source)
    assert isinstance(state.tree, dict)  # validates the tree before it is copied
    return Content(state.plain_tree, _streamed_from(state), dict(state.about))


def _streamed_from(source: TensorSource, prefix: str = "") -> dict[str, TensorParts]:
    """Return all tensors of a source, by key after ``prefix``."""
    return {
        f"{prefix}{key}": StreamedTensor(source.shape(key), source.dtype(key), partial(source.read, key))
        for key in source.keys()  # noqa: SIM118 - a source is no dict
    }


# ---- safetensors and Hugging Face -----------------------------------------------------------------------------------


def _of_safetensors(source: str) -> Content:
    tensors = SafetensorsFolder(source)
    state = {key: reference(f"weights/{key}") for key in tensors.keys()}  # noqa: SIM118 - a source is no dict
    facts = _hugging_face(tensors)
    description = about("weights") | ({} if facts is None else {"hugging_face": [facts]})
    return Content({WEIGHTS: state, "epoch": 0, "global_step": 0}, _streamed_from(tensors, "weights/"), description)


def _hugging_face(tensors: SafetensorsFolder) -> dict[str, Any] | None:
    """Return facts about a Hugging Face model from the files beside its weights; see :mod:`.hugging_face`."""
    config = _json_beside(tensors, "config.json")
    architectures = config.get("architectures") if config else None
    if not config or not isinstance(architectures, list) or not architectures:
        return None
    return {
        "prefix": "",
        "class": str(architectures[0]),
        "config": config,
        "generation_config": _json_beside(tensors, "generation_config.json"),
        "tied": [],
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "") or None,
    }


def _json_beside(tensors: SafetensorsFolder, name: str) -> dict[str, Any] | None:
    folder = tensors.folder
    if name not in folder.names():
        return None
    with interpreting(join_path(folder.path, name), "Remove or replace it."):
        content = parse_json(folder.read(name))
    return content if isinstance(content, dict) else None


# ---- Lightning and torch --------------------------------------------------------------------------------------------


def _of_torch_file(source: str, trust: bool) -> Content:
    loaded = load_pickled(source, trust=trust)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{source} holds a {type(loaded).__name__}, not a mapping of tensors. Give {_KINDS}.")
    if isinstance(loaded.get(WEIGHTS), Mapping) and _LIGHTNING in loaded:
        return _of_lightning(loaded)
    weights = _weights_of(loaded, source)
    encoder = Encoder()
    tree = {WEIGHTS: encoder.weights(weights, "weights"), "epoch": 0, "global_step": 0}
    return Content(tree, encoder.tensors, about("weights"))


def _of_lightning(loaded: Mapping[str, Any]) -> Content:
    encoder = Encoder()
    tree = {key: encoder.entry(key, value) for key, value in with_cursors(loaded).items()}
    kind = "run state" if "optimizer_states" in loaded else "weights"
    description = about(kind, loaded.get("global_step", 0), loaded.get("epoch", 0))
    description["versions"]["lightning"] = str(loaded[_LIGHTNING])
    return Content(tree, encoder.tensors, description)


def _weights_of(loaded: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
        return loaded
    nested = [key for key in _NESTED if isinstance(loaded.get(key), Mapping) and _has_tensors(loaded[key])]
    if not nested and _has_tensors(loaded) and isinstance(loaded.get(_BESIDE), Mapping):
        weights = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
        _warn_skipped(source, "the weights at its top level", [key for key in loaded if key not in weights])
        return weights
    if not nested:
        kinds = sorted({type(value).__name__ for value in loaded.values()})
        raise CheckpointError(
            f"{source} holds no recognized weights: values of the types {', '.join(kinds) or 'none'} under "
            f"{', '.join(map(str, list(loaded)[:8]))}. Save {{name: tensor}} with torch.save, and import that."
        )
    _warn_skipped(source, f"the weights under {nested[0]!r}", [key for key in loaded if key != nested[0]])
    found: Mapping[str, Any] = loaded[nested[0]]
    return found


def _warn_skipped(source: str, taken: str, others: Sequence[object]) -> None:
    if others:
        skipped = ", ".join(map(str, others))
        warnings.warn(f"From {source} {taken} are imported; skipped: {skipped}.", stacklevel=3)


def _has_tensors(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values.values())


def of_deepspeed(source: str) -> Content:
    """Return the contents of a DeepSpeed folder for a checkpoint; tensors are read when they are written.

    Raises:
        CheckpointError: as :func:`~trainwright.checkpoint.foreign.deepspeed.reading.read_deepspeed`.
    """
    found = read_deepspeed(source)
    if found.left_out:
        warnings.warn(f"From {source} these are skipped: {'; '.join(found.left_out)}.", stacklevel=2)
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
                f"{source} was not saved by Lightning, so it does not have the position in the data: a run that "
                "resumes from the import counts steps and epochs from 0, with the optimizer's state.",
                stacklevel=2,
            )
    description = about("run state" if found.optimizer else "weights", found.global_step, found.epoch)
    description["world_size"], description["strategy"] = found.ranks, f"deepspeed_stage_{found.stage}"
    description["versions"]["deepspeed"] = found.version
    return Content(tree, encoder.tensors, description)


def _schedulers(found: DeepSpeedCheckpoint, encoder: Encoder) -> list[Any]:
    """Return the state of a torch scheduler that the user gave to DeepSpeed; DeepSpeed's own are skipped."""
    state = found.lr_scheduler
    if state is None:
        return []
    if "last_epoch" in state:
        return [encode(state, encoder.put, "lr_schedulers/0")]
    warnings.warn(
        f"{found.path} has the state of a scheduler of DeepSpeed ({', '.join(state)}), which is skipped: set "
        "last_epoch of the scheduler that replaces it.",
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
