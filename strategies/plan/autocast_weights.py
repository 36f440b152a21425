"""Weights that autocast rounds to 16 bit wherever they are used, so that ranks may exchange them rounded."""

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
# Their kernels for inference read weights of the layers within, all in one dtype, and autocast casts none of them.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def exchanged_rounded(module: nn.Module, param_dtype: str | None) -> dict[str, nn.Parameter]:
    """Return the fp32 parameters, by name, that ranks exchange in autocast's dtype.

    By default the weights of linear layers and convolutions whose ``forward`` is torch's own: autocast rounds these
    anyway. What else a module does with a parameter (norms, embeddings, routers, ``nn.Parameter`` of the user's) may
    need all of its bits. A weight with a gradient hook is left out, which would see a rounded gradient.

    Args:
        module: a block.
        param_dtype: the option of that name: ``None`` as above, ``"fp32"`` none, any other all of two dimensions or
            more.
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
