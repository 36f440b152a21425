"""Facts about Hugging Face models and peft adapters within a module that their export needs.

Neither package is imported, unless the module already uses it.
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
"""Types of adapters in layers of a model whose initial values do not depend on its weights."""


def hugging_face_facts(module: nn.Module) -> list[dict[str, Any]]:
    """Return facts about each outermost Hugging Face model in ``module``.

    Returns:
        One JSON value per model::

            {"prefix": "model",                # attribute path; "" if the module itself is one
             "class": "LlamaForCausalLM",
             "config": {...},                  # contents of config.json
             "generation_config": {...},       # contents of generation_config.json, None if there is none
             "tied": [["model.embed_tokens.weight", "lm_head.weight"]],  # the one to write first
             "dtype": "float32"}               # of its first parameter
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
    """Return the model's own class name, without FSDP's dynamic subclass."""
    own = next(c for c in type(model).__mro__ if not any(base.__name__ == "FSDPModule" for base in c.__mro__))
    return own.__name__


def _source_first(names: Sequence[str], model: nn.Module) -> list[str]:
    """Return tied names sorted so that those others are tied to come first."""
    # A mapping (tied name -> source) in recent versions, a list of tied names before.
    followers = getattr(model, "_tied_weights_keys", None) or ()
    return sorted(names, key=lambda name: name in followers)


def peft_facts(module: nn.Module) -> list[dict[str, Any]]:
    """Return facts about the adapters of each ``PeftModel`` in ``module``.

    Returns:
        One JSON value per model::

            {"prefix": "model",                 # attribute path; "" if the module itself is one
             "adapters": {"default": {...}},    # by name, contents of adapter_config.json
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
    """Return the tensors that peft adapters added to ``module``.

    Returns:
        Name in ``module.state_dict()`` -> name of the base tensor that it was copied from (``modules_to_save``), or an
        empty text if it has initial values of its own.
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


def refuse_weights_under_adapters(module: nn.Module, where: str) -> None:
    """Raise if base weights would be loaded under adapters whose initial values depend on other base weights.

    Raises:
        CheckpointError: if there are such adapters in ``module``; ``where`` names the source of the weights.
    """
    configs = (config for facts in peft_facts(module) for config in facts["adapters"].values())
    reasons = [reason for config in configs for reason in _made_from_weights(config)]
    if reasons:
        raise CheckpointError(
            f"The initial values of the module's adapter ({', '.join(reasons)}) depend on the weights that the module "
            f"was built with, and {where} holds others and no adapter. Build the module with these weights "
            "(from_pretrained) and omit init_from, or start from a checkpoint that includes the adapter."
        )


def _made_from_weights(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type") not in LAYER_ADAPTERS:
        yield f"peft_type={config.get('peft_type')}"
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        yield f"init_lora_weights={config['init_lora_weights']}"
    yield from (f"{name}={config[name]}" for name in ("use_dora", "trainable_token_indices") if config.get(name))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return the form of ``adapter_config.json``: sets as lists, paths as absolute texts."""
    base = config.get("base_model_name_or_path")
    config = {**config, "base_model_name_or_path": os.path.abspath(base) if base and os.path.isdir(base) else base}
    plain: dict[str, Any] = json.loads(
        json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )
    return plain


def outermost_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield outermost Hugging Face models, by fully qualified name."""
    found: list[str] = []
    for name, sub in module.named_modules():
        inside = any(not outer or name == outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and is_pretrained_model(sub):
            found.append(name)
            yield name, sub


def is_pretrained_model(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``transformers.PreTrainedModel``."""
    return _is_of(module, "PreTrainedModel", "transformers.")


def is_peft_model(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``peft.PeftModel``."""
    return _is_of(module, "PeftModel", "peft.")


def _is_of(module: nn.Module, name: str, package: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(module).__mro__)
