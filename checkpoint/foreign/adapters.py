"""Export of peft adapters: as peft's files, or merged into the base weights.

The model is rebuilt on the meta device from its configuration, so that peft selects the adapter's tensors and merges
each layer. Tensors are read when they are written, one layer at a time.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign.hugging_face import LAYER_ADAPTERS
from trainwright.checkpoint.foreign.torch_file import LazyTensor
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting

_IN_PYTHON = "merge in Python (merge_and_unload() of peft) and save the model"
_INSTEAD = "Save it in Python (save_pretrained() of peft), or give format=safetensors."
_INSIDE = "base_model.model."
# Options without effect on meta tensors: initial values, and a package that would be imported by name.
_NOT_BUILT = {"init_lora_weights": False, "init_ia3_weights": False, "init_weights": False, "megatron_config": None}
# Layers of peft that can be merged independently.
_MERGED_ALONE = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding", "peft.tuners.ia3.layer.Linear")


@dataclass(frozen=True)
class Adapter:
    """The active adapter of a ``PeftModel``.

    Args:
        name: its name.
        config: contents of ``adapter_config.json``.
        base: facts about the Hugging Face model in it, see :mod:`.hugging_face`.
        model: the ``PeftModel`` on the meta device.
        weights: its tensors in the checkpoint, by their names in ``model``.
        trained: names in ``model`` of trained parameters, including those of the base model.
    """

    name: str
    config: Mapping[str, Any]
    base: Mapping[str, Any]
    model: Any
    weights: Mapping[str, LazyTensor]
    trained: frozenset[str]

    @classmethod
    def of(
        cls,
        facts: Mapping[str, Any],
        models: list[dict[str, Any]],
        weights: Mapping[str, LazyTensor],
        trained: list[str],
        init_from: str | None,
    ) -> Adapter:
        """Build the adapted model of a checkpoint.

        Args:
            facts: of the ``PeftModel``, see :func:`~trainwright.checkpoint.foreign.hugging_face.peft_facts`.
            models: facts of all Hugging Face models of the checkpoint.
            weights: all tensors of the checkpoint, by their names in the module.
            trained: names of all trained parameters in the module.
            init_from: source of the run's initial weights, if the model does not have it.

        Raises:
            CheckpointError: if ``transformers`` or ``peft`` is missing, if not exactly one adapter is active, or if the
                model cannot be rebuilt.
        """
        prefix = f"{facts['prefix']}." if facts["prefix"] else ""
        active = facts["active"]
        if len(active) != 1:
            raise CheckpointError(
                f"The adapters {', '.join(map(repr, active)) or '(none)'} of {facts['prefix'] or 'the module'} are "
                "active, but only one can be exported. Activate one with set_adapter(NAME) of peft and save again."
            )
        if len(facts["adapters"]) > 1:
            left = ", ".join(repr(name) for name in facts["adapters"] if name != active[0])
            warnings.warn(f"The active adapter {active[0]!r} is exported; {left} are skipped.", stacklevel=6)
        config = {**facts["adapters"][active[0]], "inference_mode": True}
        base = next((model for model in models if model["prefix"] == f"{prefix}{_INSIDE}"[:-1]), None)
        kinds = {str(each.get("peft_type")) for each in facts["adapters"].values()}
        if base is None or not kinds.issubset(LAYER_ADAPTERS):
            raise CheckpointError(
                f"The adapter of {facts['prefix'] or 'the module'} ({', '.join(sorted(kinds))}) is not one of those in "
                f"layers of a Hugging Face model that can be exported ({', '.join(LAYER_ADAPTERS)}). {_INSTEAD}"
            )
        config["base_model_name_or_path"] = config.get("base_model_name_or_path") or _folder(init_from)
        own = {name.removeprefix(prefix): lazy for name, lazy in weights.items() if name.startswith(prefix)}
        of_base = frozenset(name.removeprefix(prefix) for name in trained if name.startswith(prefix))
        adapters = {active[0]: config, **facts["adapters"]}  # the active one first
        return cls(active[0], config, base, _built(base, adapters), own, of_base)

    def own(self) -> dict[str, LazyTensor]:
        """Return the contents of ``adapter_model.safetensors``: everything trained, under peft's names."""
        import peft

        self._refuse_others()
        grown = _vocabulary_changed(self.base["config"], self.config["base_model_name_or_path"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = {name: name for name in self.weights}
            found = peft.get_peft_model_state_dict(self.model, names, self.name, save_embedding_layers=grown)
        # Trained base weights that the adapter's configuration does not list.
        others = self.trained.intersection(self.weights).difference(found.values())
        return {key: self.weights[name] for key, name in (found | {name: name for name in others}).items()}

    def merged(self) -> dict[str, LazyTensor]:
        """Return the tensors of the Hugging Face model with the adapter merged, under the model's own names.

        Raises:
            CheckpointError: if peft cannot merge each layer independently.
        """
        self._refuse_others()
        self._refuse_unmergeable()
        found = {}
        for name, lazy in self.weights.items():
            owner, wrapper = self._wrapper_of(name)
            rest = name.removeprefix(f"{owner}.")
            if wrapper is None:
                kept = name
            elif hasattr(wrapper, "modules_to_save"):
                start = f"modules_to_save.{self.name}." if self.name in wrapper.modules_to_save else "original_module."
                if not rest.startswith(start):
                    continue
                kept = f"{owner}.{rest.removeprefix(start)}"
            elif rest.startswith("base_layer."):
                parameter = rest.removeprefix("base_layer.")
                lazy = replace(lazy, key=f"merged/{name}", read=partial(self._merge, owner, parameter, lazy.dtype))
                kept = f"{owner}.{parameter}"
            else:
                continue  # a tensor of the adapter
            found[kept.removeprefix(_INSIDE)] = lazy
        return found

    def _wrapper_of(self, name: str) -> tuple[str, Any]:
        """Return the outermost peft module around a tensor and its name; ``None`` if there is none."""
        parts = name.split(".")
        for length in range(3, len(parts)):
            owner = ".".join(parts[:length])
            module = self.model.get_submodule(owner)
            if hasattr(module, "adapter_layer_names"):
                return owner, module
        return "", None

    def _merge(self, owner: str, parameter: str, dtype: torch.dtype) -> Tensor:
        layer = copy.deepcopy(self.model.get_submodule(owner))
        with torch.no_grad(), interpreting(owner, _IN_PYTHON.capitalize() + ".", "cannot be merged"):
            layer.load_state_dict(
                {name: self.weights[f"{owner}.{name}"].read() for name in layer.state_dict()}, assign=True
            )
            layer.merge(safe_merge=True, adapter_names=[self.name])
            merged: Tensor = layer.get_base_layer().get_parameter(parameter).detach()
        return merged.to(dtype).contiguous()

    def _refuse_others(self) -> None:
        """Raise unless checkpoint and rebuilt model have the same tensors, except for quantized weights."""
        differing = [
            name for name in self.weights.keys() ^ self.model.state_dict().keys() if ".base_layer." not in name
        ]
        if differing:
            raise CheckpointError(
                f"{self.base['class']} with the adapter {self.name!r} has other tensors than the checkpoint "
                f"({', '.join(sorted(differing)[:3])}, ...): the module modified it after building it, or another "
                f"version of transformers or peft wrote it. {_INSTEAD}"
            )

    def _refuse_unmergeable(self) -> None:
        reason = None
        kind = self.config.get("peft_type")
        others = {f"{type(m).__module__}.{type(m).__name__}" for m in self.model.modules() if _is_layer(m)}
        others = {name for name in others if name not in _MERGED_ALONE}
        quantized = [
            n for n, lazy in self.weights.items() if n.endswith(".weight") and not lazy.dtype.is_floating_point
        ]
        if kind not in ("LORA", "IA3") or others:
            reason = f"layers of the kind {', '.join(sorted(others)) or kind} ({kind})"
        elif self.base["config"].get("quantization_config") or quantized:
            reason = "quantized base weights"
        elif self.config.get("layer_replication"):
            reason = "layers that share their base weights (layer_replication)"
        if reason is not None:
            raise CheckpointError(
                f"The adapter {self.name!r} has {reason}, which cannot be merged here. Give format=peft without "
                f"merge, load that with PeftModel.from_pretrained, and {_IN_PYTHON}."
            )


def _is_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is a peft layer that adapts another, not one that keeps a trained copy."""
    return hasattr(module, "adapter_layer_names") and not hasattr(module, "modules_to_save")


def _built(facts: Mapping[str, Any], adapters: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the adapted model on the meta device, with the first adapter active."""
    try:
        import peft
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"Exporting an adapter needs {error.name}, which is not installed. Type: pip install 'trainwright[peft]'"
        ) from error
    cls = getattr(transformers, str(facts["class"]), None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{facts['class']} is not a transformers model; its adapter needs its code to be exported. {_INSTEAD}"
        )
    with interpreting(str(facts["class"]), _INSTEAD, "cannot be built with its adapter"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern training
        config: Any = cls.config_class.from_dict(facts["config"])  # type: ignore[union-attr]
        config._attn_implementation = "eager"  # others may download code
        with torch.device("meta"):
            base = cls(config)
        first, *others = ((name, _config_of(config)) for name, config in adapters.items())
        model: Any = peft.get_peft_model(base, first[1], adapter_name=first[0], low_cpu_mem_usage=True)
        for name, other in others:
            model.add_adapter(name, other, low_cpu_mem_usage=True)
        return model


def _config_of(config: Mapping[str, Any]) -> Any:
    import peft

    changed = {key: value for key, value in _NOT_BUILT.items() if key in config}
    return peft.PeftConfig.from_peft_type(**{**config, **changed, "inference_mode": False})


def _folder(init_from: str | None) -> str | None:
    """Return the folder of a Hugging Face model that weights came from, if it is one."""
    return init_from if init_from and Path(init_from, "config.json").is_file() else None


def _vocabulary_changed(config: Mapping[str, Any], base: str | None) -> bool:
    """Return whether the vocabulary differs from the base model's, if that is on this machine."""
    from transformers import PretrainedConfig

    if not base:
        return False
    try:
        original, _ = PretrainedConfig.get_config_dict(base, local_files_only=True)
    except OSError:
        return False
    return bool(original.get("vocab_size") != config.get("vocab_size"))
