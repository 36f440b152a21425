"""What must be known of Hugging Face models within a module to write them as ``from_pretrained`` reads them.

``transformers`` is never imported: a model that is one brings everything along.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from trainwright.checkpoint.format.names import tied_names


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
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(module).__mro__
    )
