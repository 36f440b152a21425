"""Floating-point operations of a training step, and what devices can do."""

from __future__ import annotations

from trainwright.recipes.gpt.model import GPT

# Dense bfloat16 operations per second, from the makers' data sheets; the first name that a device's name contains.
_PEAKS = {
    "GH200": 989.4e12,
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
}


def flops_per_token(model: GPT) -> float:
    """Operations that one token costs in forward and backward, recomputation left out.

    ``6 N + 12 L H Q T`` (PaLM, arXiv:2204.02311, appendix B), where N counts the parameters that multiply: an embedding
    that is looked up only does not.
    """
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    if model.head is not None:
        parameters -= model.embedding.weight.numel()
    return 6.0 * parameters + 12.0 * config.layers * config.heads * config.head_dim * config.seq_len


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device; ``None`` if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def model_flops_utilization(model: GPT, tokens_per_second: float, device_name: str, devices: int) -> float | None:
    """Part of what the devices can do that the model's own operations make up; ``None`` for an unknown device."""
    peak = peak_flops(device_name)
    return None if peak is None else flops_per_token(model) * tokens_per_second / (peak * devices)
