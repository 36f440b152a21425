"""Tensor, sequence and loss parallelism of a module written for one device.

A rank computes with its parts of split weights, as plain tensors, and explicit collectives (Megatron-LM,
arXiv:1909.08053; its sequence parallelism, arXiv:2205.05198). Modules keep their classes; ``forward`` is replaced on
the instance. Parameters are read when a forward runs, so they may be replaced at any time.

Communication per pair of a colwise and a rowwise projection, for activations of ``n`` elements:

===================  ==========================================  ==========================================
                     forward                                     backward
===================  ==========================================  ==========================================
plain                all-reduce of ``n``                         all-reduce of ``n``
sequence parallel    all-gather and reduce-scatter of ``n``      reduce-scatter and all-gather of ``n``
===================  ==========================================  ==========================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.strategies.contract.collectives import differentiable as collectives
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.randomness.split import SplitRandomness, draws_randomly
from trainwright.strategies.plan import tensor_rules as rules
from trainwright.strategies.plan.arguments import arguments, call_of, first_tensor
from trainwright.strategies.plan.model_plan import ModelPlan, base_style
from trainwright.strategies.plan.names import inside_any, parent_of
from trainwright.strategies.tensor.sharded_logits import ShardedLogits
from trainwright.strategies.tensor.split_attention import attend

_Forward = Callable[..., Any]
# Dim along which sequence parallelism slices hidden states. With batch_first=False it is the batch, which is fine too:
# nothing between projections mixes positions or samples.
_SEQUENCE = 1


class TensorParallel:
    """Tensor parallelism of a module over a process group.

    Args:
        module: unsplit, accepted by ``validate_tensor``. Parameters may be real, on the meta device, or plain
            attributes of the right shape.
        plan: splits of modules, see :class:`ModelPlan`.
        group: ranks of the tensor axis. Outside of split modules all compute the same.
        sequence_parallel: slice activations between split modules of the blocks along the sequence, in training (while
            ``module.training``). Off: every rank holds them whole.
        loss_parallel: heads (``colwise_gather``) return :class:`ShardedLogits` when gradients are recorded, so that
            ``F.cross_entropy`` works on split classes. Off: whole logits.

    Attributes:
        cuts: fully qualified name of each split parameter -> its split.
        random: generators of split regions.
        splitting: the module that currently draws from this rank's own generator.
        summed: fully qualified names of replicated parameters whose gradients must be summed over tensor ranks: those
            applied to slices of the sequence or to split heads (a norm of each head's queries).
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ModelPlan,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
    ) -> None:
        self._module = module
        self._plan = plan
        self._group = group
        self._sequence = sequence_parallel
        self._loss = loss_parallel
        self.random = SplitRandomness(group.rank())
        self._sites: dict[str, _Site] = {}
        self.splitting: _Site | None = None
        self.cuts: dict[str, Cut] = {
            name: Cut(group, split.dim, split.sections) for name, split in rules.plan_splits(module, plan).items()
        }
        self.summed = self._find_summed()

    @property
    def slices_sequence(self) -> bool:
        """True if hidden states between blocks are slices of the sequence, which is only so in training."""
        return self._sequence and self._module.training

    def apply(self, first_block: nn.Module | None, last_block: nn.Module | None) -> None:
        """Replace forwards and divide attributes that count heads; to be called once.

        The caller replaces the parameters in :attr:`cuts` by their parts, before or after.

        Args:
            first_block: whose input sequence parallelism slices; ``None``: this rank receives slices.
            last_block: whose output is gathered; ``None``: this rank sends slices. Both are unused without
                ``sequence_parallel``.
        """
        self._divide_heads()
        for name, style in self._plan.tensor.items():
            part = self._module.get_submodule(name)
            if isinstance(part, nn.MultiheadAttention):
                self._patch_attention(part, name)
            elif not isinstance(self._parent(name), nn.MultiheadAttention):
                self._patch(part, name, style)
        for name in self._plan.gathered:
            part = self._module.get_submodule(name)
            _replace_forward(part, self._on_all_features(part))
        for name, site in self._sites.items():
            if name:  # the root may be called through any method
                _replace_forward(site.module, site.around(site.module.forward))
        self._disable_fused_paths()
        if self._sequence:
            self._patch_region(first_block, last_block)

    # -----------------------------------------------------------------------------------------------------------------
    # Structure

    def _find_summed(self) -> frozenset[str]:
        if self._sequence:
            names = [name for name, _ in self._module.named_parameters(remove_duplicate=False)]
            return frozenset(n for n in names if n not in self.cuts and inside_any(n, self._plan.blocks))
        return frozenset(self._plan.summed)

    def _parent(self, name: str) -> nn.Module:
        return self._module.get_submodule(parent_of(name))

    def _divide_heads(self) -> None:
        size = self._group.size()
        for name, attributes in self._plan.heads.items():
            part = self._module.get_submodule(name)
            for attribute in attributes:
                value = getattr(part, attribute)
                if not isinstance(value, int) or value % size:
                    raise ValueError(f"{name}.{attribute} = {value!r} cannot be split over {size} tensor ranks.")
                setattr(part, attribute, value // size)

    def _site(self, name: str) -> _Site:
        """Return the site in which the projection ``name`` shares its input with others."""
        key = rules.site_name(self._module, name)
        if key not in self._sites:
            parts = self._group.size() if key in self._plan.narrow else 1
            self._sites[key] = _Site(self, self._module.get_submodule(key), parts)
        return self._sites[key]

    # -----------------------------------------------------------------------------------------------------------------
    # Projections

    def _patch(self, part: nn.Module, name: str, style: str) -> None:
        makers: dict[str, Callable[[Any, str], _Forward]] = {
            "vocabulary": self._vocabulary, "rowwise": self._rowwise, "colwise_gather": self._head
        }  # fmt: skip
        _replace_forward(part, makers.get(base_style(style), self._colwise)(part, name))

    def _colwise(self, part: nn.Module, name: str) -> _Forward:
        project = _projection(part)
        site = self._site(name)
        in_blocks = inside_any(name, self._plan.blocks)
        takes_slices = in_blocks and not inside_any(name, self._plan.whole_inputs)

        def forward(x: Tensor) -> Tensor:
            x = site.unnarrowed(x)
            if in_blocks and self.slices_sequence:
                if takes_slices:
                    x = site.share(x, self._gather_input)
            else:
                x = site.share(x, self._copy)
            site.enter_split(x.device)
            y: Tensor = project(x)
            return y

        return forward

    def _copy(self, x: Tensor) -> Tensor:
        return collectives.copy_to(_autocast_input(x), self._group)

    def _gather_input(self, x: Tensor) -> Tensor:
        return self._gather(_autocast_input(x))

    def _rowwise(self, part: nn.Module, name: str) -> _Forward:
        project = _projection(part, with_bias=False)
        in_blocks = inside_any(name, self._plan.blocks)

        def forward(x: Tensor) -> Tensor:
            if self.splitting is not None:  # random numbers are common again, unless the whole block is sliced
                self.splitting.leave_split()
            y = self._reduce(project(x), in_blocks)
            bias = cast(Tensor | None, getattr(part, "bias", None))
            return y if bias is None else y + bias.to(y.dtype)

        return forward

    def _reduce(self, partial: Tensor, in_blocks: bool) -> Tensor:
        if in_blocks and self.slices_sequence:
            self._check_length(partial)
            return collectives.reduce_scatter(partial, _SEQUENCE, self._group)
        return collectives.reduce_from(partial, self._group)

    def _on_all_features(self, part: nn.Module) -> _Forward:
        forward = part.forward

        def run(x: Tensor) -> Tensor:
            if x.shape[-1] == len(next(part.parameters())):
                return cast(Tensor, forward(x))
            y: Tensor = forward(collectives.gather(x, -1, self._group))
            return y.chunk(self._group.size(), -1)[self._group.rank()]

        return run

    def _head(self, part: nn.Module, _: str) -> _Forward:
        project = _projection(part)

        def forward(x: Tensor) -> Tensor:
            logits: Tensor = project(self._copy(x))
            if self._loss and torch.is_grad_enabled():
                return ShardedLogits.wrap(logits, self._group)
            return collectives.gather_same(logits, -1, self._group)

        return forward

    def _vocabulary(self, part: nn.Embedding, _: str) -> _Forward:
        look_up: _Forward = (
            part.forward if rules.has_own_forward(part) else functools.partial(_look_up, part, self._group)
        )

        def forward(ids: Tensor) -> Tensor:
            rows = part.weight.shape[0]
            local = ids - self._group.rank() * rows
            missing = (local < 0) | (local >= rows)
            found = look_up(local.masked_fill(missing, 0))
            return collectives.reduce_from(found.masked_fill(missing[..., None], 0), self._group)

        return forward

    # -----------------------------------------------------------------------------------------------------------------
    # nn.MultiheadAttention

    def _patch_attention(self, part: nn.MultiheadAttention, name: str) -> None:
        in_blocks = inside_any(name, self._plan.blocks)
        takes_whole = inside_any(parent_of(name), self._plan.whole_inputs)

        def enter(*inputs: Tensor) -> tuple[Tensor, ...]:
            """Prepare queries, keys and values for the projections; repeated tensors are prepared once."""
            sliced = in_blocks and self.slices_sequence
            entered: dict[int, Tensor] = {}
            for i, x in enumerate(inputs):
                if id(x) in entered:
                    continue
                if not sliced:
                    entered[id(x)] = self._copy(x)
                elif takes_whole:
                    entered[id(x)] = x
                else:  # a memory of a different length is not sliced
                    is_slice = i == 0 or x.shape[_SEQUENCE] == inputs[0].shape[_SEQUENCE]
                    entered[id(x)] = self._gather_input(x) if is_slice else self._copy(x)
            return tuple(entered[id(x)] for x in inputs)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = None,
            need_weights: bool = True,
            attn_mask: Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, Tensor | None]:
            query, key, value = enter(query, key, value)
            with self.random.region(query.device, part.training and part.dropout > 0):
                mixed, weights = attend(
                    part, self._group, query, key, value, key_padding_mask, attn_mask, need_weights, is_causal
                )
            if weights is not None and average_attn_weights:
                weights = collectives.reduce_from(weights.mean(-3) / self._group.size(), self._group)
            elif weights is not None:
                weights = collectives.gather_same(weights, weights.dim() - 3, self._group)
            out = part.out_proj
            y = self._reduce(F.linear(mixed, out.weight), in_blocks)
            return (y if out.bias is None else y + out.bias.to(y.dtype)), weights

        _replace_forward(part, forward)

    def _disable_fused_paths(self) -> None:
        """Disable fused paths of torch's encoder, which read split weights directly in evaluation."""
        split = tuple(self._plan.tensor)
        for name, part in self._module.named_modules():
            if not any(inside_any(other, (name,)) for other in split) and name:
                continue
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False
            elif isinstance(part, nn.TransformerEncoderLayer):
                part.dropout1.register_forward_pre_hook(lambda *_: None)  # any hook disables the fused path

    # -----------------------------------------------------------------------------------------------------------------
    # Regions

    def _patch_region(self, first: nn.Module | None, last: nn.Module | None) -> None:
        for name in self._plan.whole_inputs:
            part = self._module.get_submodule(name)
            if not isinstance(part, nn.MultiheadAttention) and inside_any(name, self._plan.blocks):
                _replace_forward(part, self._changing(part.forward, self._gather, name))
        for name in self._plan.blocks:
            block = self._module.get_submodule(name)
            if draws_randomly(block):
                _replace_forward(block, self._with_own_randomness(block.forward))
        if first is not None:
            _replace_forward(first, self._changing(first.forward, self._slice, "the first block"))
        if last is not None:
            _replace_forward(last, self._joining(last.forward))

    def _changing(self, forward: _Forward, change: Callable[[Tensor], Tensor], where: str) -> _Forward:
        """Return ``forward`` with its first tensor changed while the sequence is sliced."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.slices_sequence:
                args, kwargs = _change_first_tensor(args, kwargs, change, where)
            return forward(*args, **kwargs)

        return run

    def _with_own_randomness(self, forward: _Forward) -> _Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.slices_sequence:
                return forward(*args, **kwargs)
            device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            with self.random.region(device):
                return forward(*args, **kwargs)

        return run

    def _gather(self, x: Tensor) -> Tensor:
        return collectives.gather(x, _SEQUENCE, self._group)

    def _slice(self, x: Tensor) -> Tensor:
        self._check_length(x)
        return collectives.scatter(x, _SEQUENCE, self._group)

    def _joining(self, forward: _Forward) -> _Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not self.slices_sequence:
                return output
            if isinstance(output, Tensor):
                return collectives.gather_same(output, _SEQUENCE, self._group)
            if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
                return (collectives.gather_same(output[0], _SEQUENCE, self._group), *output[1:])
            raise TypeError(
                f"sequence_parallel=true: the last block returned a {type(output).__name__}; it must return the hidden "
                "states, or a tuple that begins with them. Set sequence_parallel=false."
            )

        return run

    def _check_length(self, x: Tensor) -> None:
        size = self._group.size()
        if x.dim() < 3 or x.shape[_SEQUENCE] % size:
            raise ValueError(
                f"sequence_parallel=true: hidden states of shape {tuple(x.shape)} cannot be sliced along dim "
                f"{_SEQUENCE} for {size} tensor ranks; they must be (batch, sequence, features) with a sequence that "
                f"is a multiple of {size}. Pad the sequence, or set sequence_parallel=false."
            )


class _Site:
    """A module in whose forward colwise projections share an input and activations are split.

    Args:
        engine: of its projections.
        module: the module.
        parts: factor by which the features of its first input are narrowed for code that reads their width; projections
            get all features.
    """

    def __init__(self, engine: TensorParallel, module: nn.Module, parts: int = 1) -> None:
        self.module = module
        self._parts = parts
        self._narrowed: tuple[Tensor, Tensor] | None = None
        self._engine = engine
        self._random = engine.random
        self._draws = draws_randomly(module)
        self._is_open = False
        self._is_split = False
        self._given: tuple[Tensor, int] | None = None
        self._shared: Tensor | None = None

    def unnarrowed(self, x: Tensor) -> Tensor:
        """Return the module's full input if ``x`` is its narrowed one."""
        return self._narrowed[1] if self._narrowed is not None and x is self._narrowed[0] else x

    def share(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``change(x)``, computed once (one collective) for all projections of the same tensor."""
        if not self._is_open:
            return change(x)
        # Versions cannot be traced: compiled code must not modify the input between two projections.
        version = 0 if torch.compiler.is_compiling() else x._version
        if self._given is None or self._shared is None or self._given[0] is not x or self._given[1] != version:
            self._given, self._shared = (x, version), change(x)
        return self._shared

    def enter_split(self, device: torch.device) -> None:
        """Use per-rank random numbers, since activations are split from now on."""
        if self._is_open and self._draws and self.module.training and not self._is_split:
            self._is_split = self._random.enter(device)
            self._engine.splitting = self if self._is_split else None

    def leave_split(self) -> None:
        """Use common random numbers, since activations are whole again."""
        if self._is_split:
            self._is_split, self._engine.splitting = False, None
            self._random.leave()

    def _narrow(self, x: Tensor) -> Tensor:
        part = x.narrow(-1, 0, x.shape[-1] // self._parts)
        self._narrowed = part, x
        return part

    def around(self, forward: _Forward) -> _Forward:
        """Return ``forward`` as one use of the site."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_open:  # recursive call
                return forward(*args, **kwargs)
            self._is_open = True
            try:
                if self._parts > 1:
                    args, kwargs = _change_first_tensor(args, kwargs, self._narrow, "a module that is split")
                return forward(*args, **kwargs)
            finally:
                self._is_open, self._given, self._shared, self._narrowed = False, None, None, None
                self.leave_split()

        return run


def _replace_forward(part: nn.Module, forward: _Forward) -> None:
    """Set ``forward`` on the instance, with the signature of the original."""
    part.forward = functools.wraps(part.forward)(forward)


def _projection(part: nn.Module, with_bias: bool = True) -> _Forward:
    """Return the function of a projection, which reads its current parameters."""
    if rules.is_transposed(part):
        return functools.partial(_transposed_projection, part, with_bias)
    if with_bias or rules.has_own_forward(part):
        return part.forward
    return lambda x: F.linear(x, cast(Tensor, part.weight))


def _transposed_projection(part: nn.Module, with_bias: bool, x: Tensor) -> Tensor:
    weight = cast(Tensor, part.weight)
    return F.linear(x, weight.t(), cast(Tensor, part.bias) if with_bias else None)


def _autocast_input(x: Tensor) -> Tensor:
    """Cast the input of a projection to autocast's dtype, so that it and its gradient are communicated in it."""
    kind = x.device.type
    autocast = x.is_floating_point() and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if autocast else x


def _look_up(part: nn.Embedding, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    rows = part.weight.shape[0]
    padding = None if part.padding_idx is None else part.padding_idx - group.rank() * rows
    # Only the rank with the padding row masks its gradient. Row 0 as a substitute of missing rows has zero gradient.
    return F.embedding(ids, part.weight, padding if padding is not None and 0 <= padding < rows else None)


def _change_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = arguments(args, kwargs)
    place = first_tensor(given, f"{where} was called without a tensor, but tensor parallelism splits its first tensor.")
    return call_of({**given, place: change(given[place])})
