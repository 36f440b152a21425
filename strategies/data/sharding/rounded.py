"""Weights that autocast rounds at every use, which FSDP2 gathers in 16 bit, beside others of the same block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from trainwright.core.torch_internals import FSDPParamGroup
from trainwright.strategies.data.sharding.gathering import all_parameter_groups, drop_gathered
from trainwright.strategies.plan.tensor_rules import is_transposed


class RoundedGroup(FSDPParamGroup):
    """FSDP2 parameter group that gathers some weights in 16 bit while autocast is on.

    Autocast rounds a weight at each use; rounded before the all-gather, it has the same bits at half the bytes. FSDP2's
    ``param_dtype`` applies to all parameters of a group permanently: norms would lose bits, and a forward without
    autocast would get weights of another dtype.
    """

    _dtype: torch.dtype
    _rounded: list[Any]
    _rounds: bool
    # Whether the forward of the coming backward rounded weights; None: no backward is due.
    _recorded: bool | None
    # Gathered tensors of the unused dtype: FSDP2 creates a parameter's only once.
    _others: dict[Any, tuple[list[torch.Tensor], nn.Parameter | None]]

    @classmethod
    def adopt(cls, group: Any, rounded: list[Any], dtype: torch.dtype) -> None:
        """Turn ``group`` into this class.

        Args:
            group: of FSDP2, with a ``reduce_dtype`` and no ``param_dtype`` in its policy.
            rounded: its parameters (FSDP2's objects) gathered as ``dtype``.
            dtype: of 16 bit.
        """
        group.__class__ = cls
        group._dtype, group._rounded, group._rounds, group._recorded, group._others = dtype, rounded, True, None, {}

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        self._choose_dtype()

    def _choose_dtype(self) -> None:
        for parameter in self._rounded:
            parameter.param_dtype = self._dtype if self._rounds else None

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather as autocast is in this forward; its backward gathers the same.

        Raises:
            RuntimeError: if one backward follows forwards with and without autocast.
        """
        device = self.device.type
        rounds = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is self._dtype
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not recomputed in backward
            if self._recorded is not None and self._recorded is not rounds:
                raise RuntimeError(
                    f"{self._module_fqn} runs with and without autocast before one backward, but its weights are "
                    "gathered in one dtype only. Type strategy.param_dtype=fp32."
                )
            self._recorded = rounds
        self._round(rounds)
        return super().pre_forward(module, args, kwargs)

    def pre_backward(self, *args: Any) -> None:
        """Gather as in the forward, whatever ran without gradients in between."""
        if self._recorded is not None:
            self._round(self._recorded)
        super().pre_backward(*args)

    def _round(self, rounds: bool) -> None:
        if rounds is self._rounds:
            return
        drop_gathered(self)
        self._to_sharded()
        self._rounds = rounds
        self._choose_dtype()
        for parameter in self._rounded:
            others = self._others.pop(parameter, ([], None))
            self._others[parameter] = parameter.all_gather_outputs, parameter.__dict__.pop("_unsharded_param", None)
            parameter.all_gather_outputs = others[0]
            if others[1] is not None:
                parameter._unsharded_param = others[1]

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients of both dtypes as ``reduce_dtype``; FSDP2 accepts one dtype only."""
        for parameter in self.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
        self._recorded = None
        super().post_backward(*unused)


def gather_rounded(block: nn.Module, weights: Collection[str], dtype: torch.dtype) -> None:
    """Gather some parameters of a block as ``dtype`` while autocast to it is on.

    Args:
        block: split by ``fully_shard``, possibly with nested modules, with a ``reduce_dtype`` and no ``param_dtype``.
        weights: their names in it.
        dtype: of 16 bit.
    """
    chosen = {p for name, p in block.named_parameters(remove_duplicate=False) if name in weights}
    for group in all_parameter_groups(block):
        rounded = [parameter for parameter in group.fsdp_params if parameter.sharded_param in chosen]
        if rounded:
            RoundedGroup.adopt(group, rounded, dtype)


_PRODUCTS = {
    nn.Linear.forward,
    *(getattr(nn, f"{kind}{dims}d").forward for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)),
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
