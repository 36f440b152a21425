"""What a Hugging Face model says about itself. ``transformers`` is never imported: a model brings it along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trainwright.checkpoint.foreign.hugging_face import outermost_models
from trainwright.strategies.plan.names import matching, parent_of

# Styles of transformers' tensor plans that mean the same here. Others split what is no linear layer or embedding, or
# need a computation that our engine does not have.
_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocabulary",
    "packed_colwise": "packed_colwise:2",  # gate and up in one matrix
}
# Said about experts or about what is not split: the modules beside them keep their styles. Whose gradients have to be
# summed (norms of heads) the tensor engine sees for itself.
_NOT_SPLIT = (
    "moe_tp_experts", "grouped_gemm", "ep_router", "replicate", "replicated", "all_reduce",
    "replicated_with_grad_allreduce",
)  # fmt: skip


def tensor_metadata(module: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Tensor styles of all Hugging Face models within ``module``.

    Returns:
        Name of a module -> style, and name of a module that stays whole -> why. A module one of whose children has a
        style that cannot be had here stays whole with all of its children, since these only work together.
    """
    styles: dict[str, str] = {}
    whole: dict[str, str] = {}
    for prefix, model in outermost_models(module):
        for name, style in _expanded(model, _plan_of(model)):
            full = f"{prefix}.{name}" if prefix else name
            if style in _STYLES:
                styles[full] = _STYLES[style]
            elif style not in _NOT_SPLIT:
                whole.setdefault(parent_of(full), f"Hugging Face's style {style}")
    styles = {name: style for name, style in styles.items() if parent_of(name) not in whole}
    return styles, whole


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    """The plan of the whole model: recent versions gather it on the instance, older ones leave it where it was said."""
    gathered = dict(getattr(model, "_tp_plan", None) or {})
    base_name = getattr(model, "base_model_prefix", "")
    base_plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = f"{base_name}." if base_name and base_name in model._modules else ""
    return {**{prefix + name: style for name, style in base_plan.items()}, **gathered}


def _expanded(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        # A model's plan covers variants that this one may not have (dense layers of a mixture of experts).
        for name in matching(names, pattern):
            yield name, style


def layer_of(block: nn.Module) -> int | None:
    """Return the index of a block in a cache of keys and values; ``None`` if nothing in it uses one."""
    return next((index for sub in block.modules() if isinstance(index := getattr(sub, "layer_idx", None), int)), None)


def caches_every_layer(cache: Any) -> bool:
    """Return whether a cache has keys and values for each layer, and no other states (of linear attention)."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or not callable(getattr(cache, "update", None)):
        return False
    return all(hasattr(layer, "keys") and not hasattr(layer, "conv_states") for layer in layers)
