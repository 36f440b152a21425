"""Tensor plans and caches of Hugging Face models, without importing ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.checkpoint.foreign.hugging_face import outermost_models
from trainwright.strategies.plan.names import matching, parent_of

# Styles of transformers' tensor plans with an equivalent here. Others split modules other than linear layers and
# embeddings, or need computations that the engine lacks.
_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocabulary",
    "packed_colwise": "packed_colwise:2",  # gate and up in one matrix
}
# Styles of experts or of replicated modules, which do not affect their siblings. The tensor engine finds by itself
# whose gradients must be summed (norms of heads).
_NOT_SPLIT = (
    "moe_tp_experts", "grouped_gemm", "ep_router", "replicate", "replicated", "all_reduce",
    "replicated_with_grad_allreduce",
)  # fmt: skip


def tensor_metadata(module: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tensor styles of all Hugging Face models within ``module``.

    Returns:
        Name of a module -> style, and name of a module that is not split -> why. A module with a child of an
        unsupported style is not split at all, since its children only work together.
    """
    styles: dict[str, str] = {}
    whole: dict[str, str] = {}
    for prefix, model in outermost_models(module):
        names = [name for name, _ in model.named_modules() if name]
        # A plan covers variants that this model may lack (dense layers of a mixture of experts).
        pairs = ((name, style) for pattern, style in _plan_of(model).items() for name in matching(names, pattern))
        for name, style in pairs:
            full = f"{prefix}.{name}" if prefix else name
            if style in _STYLES:
                styles[full] = _STYLES[style]
            elif style not in _NOT_SPLIT:
                whole.setdefault(parent_of(full), f"Hugging Face's style {style}")
    styles = {name: style for name, style in styles.items() if parent_of(name) not in whole}
    return styles, whole


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the plan of the whole model: recent versions merge it on the instance, older ones keep the config's."""
    gathered = dict(getattr(model, "_tp_plan", None) or {})
    base_name = getattr(model, "base_model_prefix", "")
    base_plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = f"{base_name}." if base_name and base_name in model._modules else ""
    return {**{prefix + name: style for name, style in base_plan.items()}, **gathered}


def layer_of(block: nn.Module) -> int | None:
    """Return the index of a block in the key-value cache; ``None`` if it uses none."""
    return next((index for sub in block.modules() if isinstance(index := getattr(sub, "layer_idx", None), int)), None)


def caches_every_layer(cache: Any) -> bool:
    """Return whether a cache has keys and values for each layer, and no other states (such as of linear attention)."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or not callable(getattr(cache, "update", None)):
        return False
    return all(hasattr(layer, "keys") and not hasattr(layer, "conv_states") for layer in layers)
