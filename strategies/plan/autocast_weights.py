"""Weights that autocast rounds to 16 bit at every use, so that ranks may communicate them in 16 bit."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from trainwright.strategies.plan.tensor_rules import is_transposed

_PRODUCTS = {
    layer.forward
    for layer in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    )
}
# Their fused inference kernels read weights of inner layers, all in one dtype, without autocast.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def exchanged_rounded(module: nn.Module, param_dtype: str | None) -> dict[str, nn.Parameter]:
    """Return the fp32 parameters, by name, that ranks communicate in autocast's dtype.

    By default the weights of linear layers and convolutions with torch's own ``forward``, which autocast rounds anyway.
    Others (norms, embeddings, routers, custom parameters) may need full precision, and gradient hooks would see a
    rounded gradient.

    Args:
        module: a block.
        param_dtype: the option of that name: ``None`` as above, ``"fp32"`` none, others all with at least two dims.
    """
    named = {name: p for name, p in module.named_parameters() if p.dim() > 1 and p.dtype is torch.float32}
    if param_dtype is not None:
        return {} if param_dtype == "fp32" else named
    products = _of_products(module)
    return {name: p for name, p in named.items() if p in products and not p._backward_hooks}


def _of_products(module: nn.Module) -> set[nn.Parameter]:
    fused = {part for outer in module.modules() if isinstance(outer, _FUSED) for part in outer.modules()}
    uses: defaultdict[nn.Parameter, list[bool]] = defaultdict(list)
    for part in module.modules():
        multiplies = part not in fused and (type(part).forward in _PRODUCTS or is_transposed(part))
        for name, parameter in part._parameters.items():
            if parameter is not None:
                uses[parameter].append(multiplies and name == "weight")
    return {parameter for parameter, products in uses.items() if all(products)}
