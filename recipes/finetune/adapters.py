"""Adapters of ``peft``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def needs_weights(adapter: Mapping[str, Any]) -> bool:
    """Return whether initial values of an adapter are computed from the adapted weights."""
    plain = adapter.get("init_lora_weights", True) in (True, "gaussian", "orthogonal")
    # modules_to_save copies whole weights, which four-bit layers do not have.
    copies = bool(adapter.get("quantize") and adapter.get("modules_to_save"))
    return adapter["kind"] == "dora" or copies or not plain


def with_adapter(model: nn.Module, adapter: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Freeze a model and add an adapter.

    Args:
        model: of ``transformers``; its weights may be on the meta device.
        adapter: ``kind`` (``lora``, ``dora`` or ``ia3``) and the arguments of peft's ``LoraConfig`` or ``IA3Config``;
            ``quantize`` is ignored.
        seed: of the initial values, equal on every rank.

    Raises:
        ValueError: if peft refuses the arguments.
    """
    import peft

    options = {key: value for key, value in adapter.items() if value is not None and key != "quantize"}
    kind = options.pop("kind")
    if kind == "ia3":
        config: Any = peft.IA3Config(task_type="CAUSAL_LM", **options)
    else:
        config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=kind == "dora", **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The caller may set the meta device as default; peft puts an adapter on its layer's device.
        adapted: nn.Module = peft.get_peft_model(model, config)
    for name, layer in adapted.named_modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            _initialize(name, layer, config, seed)
    return adapted


def _initialize(name: str, layer: Any, config: Any, seed: int) -> None:
    """Initialize an adapter on the meta device, whose reset is not a module's own."""
    parts = [getattr(layer, part) for part in layer.adapter_layer_names if isinstance(getattr(layer, part), nn.Module)]
    if not any(tensor.is_meta for part in parts for tensor in part.parameters()):
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big"))
        for part in parts:
            part.to_empty(device="cpu")
        if hasattr(layer, "reset_lora_parameters"):
            layer.reset_lora_parameters("default", config.init_lora_weights)
        else:
            layer.reset_ia3_parameters("default")
