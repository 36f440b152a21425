"""What must be known of Hugging Face models within a module to write them as ``from_pretrained`` reads them.

The same of adapters of peft. Neither package is imported: a model that is of one brings everything along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from trainwright.checkpoint.format.names import ADAPTED, tied_names
from trainwright.core.errors import CheckpointError

LAYER_ADAPTERS = ("LORA", "ADALORA", "IA3", "VERA", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "FOURIERFT")
"""Kinds of adapters that lie in the layers of a model, and begin with values that do not depend on its weights."""


def hugging_face_facts(module: nn.Module) -> list[dict[str, Any]]:
    """What an export needs to know of each Hugging Face model in ``module`` that lies in no other one.

    Returns:
        One JSON value per model, none if there are no such models::

            {"prefix": "model",                # where it stands; "" if the module itself is one
             "class": "LlamaForCausalLM",
             "config": {...},                  # what config.json holds
             "generation_config": {...},       # what generation_config.json holds, None if there is none
             "tied": [["model.embed_tokens.weight", "lm_head.weight"]],  # the one to be written first
             "dtype": "float32"}               # of its parameters, the first one's if they differ
    """
    return [_facts(prefix, model) for prefix, model in outermost_models(module)]


def _facts(prefix: str, model: nn.Module) -> dict[str, Any]:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), None)
    config = json.loads(model.config.to_json_string())  # type: ignore[union-attr, operator]
    name = _class_name(model)
    config["architectures"] = [name]
    config["dtype"] = dtype
    generation = getattr(model, "generation_config", None)
    return {
        "prefix": prefix,
        "class": name,
        "config": config,
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
        "tied": [_source_first(names, model) for names in tied_names(model)],
        "dtype": dtype,
    }


def _class_name(model: nn.Module) -> str:
    """The model's own class: sharding may have put another one before it."""
    own = next(c for c in type(model).__mro__ if not any(base.__name__ == "FSDPModule" for base in c.__mro__))
    return own.__name__


def _source_first(names: Sequence[str], model: nn.Module) -> list[str]:
    """Tied names in the order in which one is chosen to be written: those first that others are tied to."""
    # A mapping (from the tied name to what it is tied to) in recent versions, a list of tied names before.
    followers = getattr(model, "_tied_weights_keys", None) or ()
    return sorted(names, key=lambda name: name in followers)


def peft_facts(module: nn.Module) -> list[dict[str, Any]]:
    """What an export needs to know of the adapters of each ``PeftModel`` in ``module``.

    Returns:
        One JSON value per model, none if there are no such models::

            {"prefix": "model",                 # where it stands; "" if the module itself is one
             "adapters": {"default": {...}},    # by name, what adapter_config.json holds
             "active": ["default"]}
    """
    models: list[tuple[str, Any]] = [(name, sub) for name, sub in module.named_modules() if is_peft_model(sub)]
    return [
        {
            "prefix": name,
            "adapters": {adapter: _plain(config.to_dict()) for adapter, config in model.peft_config.items()},
            "active": list(model.active_adapters),
        }
        for name, model in models
    ]


def adapter_tensors(module: nn.Module) -> dict[str, str]:
    """The tensors that adapters of peft have put into ``module``.

    Returns:
        Name in ``module.state_dict()`` -> name of the tensor of the base model that it begins as a copy of
        (``modules_to_save``), or an empty text if it begins with a value of its own.
    """
    found: dict[str, str] = {}
    outer = ""
    for prefix, layer in module.named_modules():
        if not hasattr(layer, "adapter_layer_names") or (outer and prefix.startswith(outer)):
            continue
        outer = f"{prefix}."
        for name in layer.state_dict():
            part, _, rest = name.partition(".")
            if part == "modules_to_save":
                found[outer + name] = f"{outer}original_module.{rest.partition('.')[2]}"
            elif part not in ADAPTED:
                found[outer + name] = ""
    return found


def refuse_late_weights(module: nn.Module, where: str) -> None:
    """Refuse to read the base weights of adapters that have made their initial values from other ones.

    Raises:
        CheckpointError: if there are such adapters in ``module``; ``where`` says what is read.
    """
    configs = (config for facts in peft_facts(module) for config in facts["adapters"].values())
    reasons = [reason for config in configs for reason in _made_from_weights(config)]
    if reasons:
        raise CheckpointError(
            f"The adapter of the module ({', '.join(reasons)}) has made its initial values from the weights that the "
            f"module was built with, and {where} holds other ones and no adapter. Build the module with these weights "
            "(from_pretrained) and leave out init_from, or begin from a checkpoint with the adapter in it."
        )


def _made_from_weights(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type") not in LAYER_ADAPTERS:
        yield f"peft_type={config.get('peft_type')}"
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        yield f"init_lora_weights={config['init_lora_weights']}"
    yield from (f"{name}={config[name]}" for name in ("use_dora", "trainable_token_indices") if config.get(name))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As ``adapter_config.json`` has it: sets are lists, paths are texts, that of a folder is absolute."""
    base = config.get("base_model_name_or_path")
    config = {**config, "base_model_name_or_path": os.path.abspath(base) if base and os.path.isdir(base) else base}
    plain: dict[str, Any] = json.loads(
        json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )
    return plain


def outermost_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Hugging Face models that lie in no other one, by fully qualified name."""
    found: list[str] = []
    for name, sub in module.named_modules():
        inside = any(not outer or name == outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and is_pretrained_model(sub):
            found.append(name)
            yield name, sub


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether ``module`` is a ``transformers.PreTrainedModel``."""
    return _is_of(module, "PreTrainedModel", "transformers.")


def is_peft_model(module: nn.Module) -> bool:
    """Whether ``module`` is a ``peft.PeftModel``."""
    return _is_of(module, "PeftModel", "peft.")


def _is_of(module: nn.Module, name: str, package: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(module).__mro__)
