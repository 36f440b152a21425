"""Tensor, sequence and loss parallelism of a module that was written for one device.

A rank computes with its part of each split weight, as plain tensors, and with explicit collectives between
(Megatron-LM, arXiv:1909.08053; its sequence parallelism, arXiv:2205.05198). The user's modules keep their classes;
``forward`` is exchanged on the instance. Parameters are read when a forward runs, so whoever owns them may exchange
them at any time.

What travels, per pair of a colwise and a rowwise projection, with activations of ``n`` elements:

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
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import inside_any, parent_of
from trainwright.strategies.plan.tensor_rules import validate_tensor
from trainwright.strategies.tensor.sharded_logits import ShardedLogits
from trainwright.strategies.tensor.split_attention import attend

__all__ = ["TensorParallel", "validate_tensor"]

_Forward = Callable[..., Any]
# The dimension along which sequence parallelism slices hidden states. With batch_first=False it is the batch, which is
# as good: nothing between the projections mixes positions or samples.
_SEQUENCE = 1


class TensorParallel:
    """Splits the projections of a module over the ranks of a group.

    Args:
        module: the whole module, as :func:`validate_tensor` accepted it. Parameters may be real, on the meta device, or
            plain attributes of the right shape.
        plan: which module is split how, see :class:`ModelPlan`.
        group: ranks of the tensor axis. Outside of split modules all compute the same.
        sequence_parallel: keep the activations between split modules of the blocks split along the sequence, in
            training (while ``module.training``). Off: every rank holds them whole.
        loss_parallel: heads (``colwise_gather``) return :class:`ShardedLogits` where gradients are recorded, so that
            ``F.cross_entropy`` works on split classes. Off: whole logits.

    Attributes:
        cuts: fully qualified name of a parameter -> how it is split, for every parameter that is.
        random: the generators of split regions.
        splitting: the part of the module that draws on this rank's own generator at present.
        summed: fully qualified names of whole parameters whose gradient is a part of a sum over the tensor ranks: those
            that work on slices of the sequence, or beside heads that are split (a norm of each head's queries).
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
        self.summed: frozenset[str] = self._find_summed() if group.size() > 1 else frozenset()

    @property
    def slices_sequence(self) -> bool:
        """Whether hidden states between the blocks are slices of the sequence at present: in training only."""
        return self._sequence and self._module.training and self._group.size() > 1

    def apply(self, first_block: nn.Module | None, last_block: nn.Module | None) -> None:
        """Exchange the forwards and divide the attributes that count heads.

        Call once. The parameters in :attr:`cuts` are exchanged for their parts by the caller, before or after.

        Args:
            first_block: where sequence parallelism begins to slice; ``None``: what arrives at this rank is sliced.
            last_block: whose output is made whole again; ``None``: what leaves this rank stays sliced. Both are unused
                without ``sequence_parallel``.
        """
        if self._group.size() == 1:
            return
        self._divide_heads()
        for name, style in self._plan.tensor.items():
            part = self._module.get_submodule(name)
            if isinstance(part, nn.MultiheadAttention):
                self._patch_attention(part, name)
            elif not isinstance(self._parent(name), nn.MultiheadAttention):
                self._patch(part, name, style)
        self._open_sites()
        self._disable_fused_paths()
        if self._sequence:
            self._patch_region(first_block, last_block)

    # -----------------------------------------------------------------------------------------------------------------
    # What is where

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
        """The place where the projection ``name`` shares its input with others."""
        key = rules.site_name(self._module, name)
        if key not in self._sites:
            parts = self._group.size() if key in self._plan.narrow else 1
            self._sites[key] = _Site(self, self._module.get_submodule(key), parts)
        return self._sites[key]

    # -----------------------------------------------------------------------------------------------------------------
    # Projections

    def _patch(self, part: nn.Module, name: str, style: str) -> None:
        kind, _ = rules.parse_style(style)
        makers: dict[str, Callable[[Any, str], _Forward]] = {
            "vocabulary": self._vocabulary, "rowwise": self._rowwise, "colwise_gather": self._head
        }  # fmt: skip
        _exchange(part, makers.get(kind, self._colwise)(part, name))

    def _takes_slices(self, name: str) -> bool:
        """Whether the input of a projection is sliced under sequence parallelism."""
        return inside_any(name, self._plan.blocks) and not inside_any(name, self._plan.whole_inputs)

    def _colwise(self, part: nn.Module, name: str) -> _Forward:
        project = _projection(part)
        site = self._site(name)
        in_blocks, takes_slices = inside_any(name, self._plan.blocks), self._takes_slices(name)

        def forward(x: Tensor) -> Tensor:
            x = site.given(x)
            if in_blocks and self.slices_sequence:
                if takes_slices:
                    x = site.share(x, self._gather_input)
            else:
                x = site.share(x, self._copy)
            site.begin(x.device)
            y: Tensor = project(x)
            return y

        return forward

    def _copy(self, x: Tensor) -> Tensor:
        return collectives.copy_to(_as_multiplied(x), self._group)

    def _gather_input(self, x: Tensor) -> Tensor:
        return self._gather(_as_multiplied(x))

    def _rowwise(self, part: nn.Module, name: str) -> _Forward:
        project = _projection(part, with_bias=False)
        in_blocks = inside_any(name, self._plan.blocks)

        def forward(x: Tensor) -> Tensor:
            self._end_split()
            y = self._reduce(project(x), in_blocks)
            bias = cast(Tensor | None, getattr(part, "bias", None))
            return y if bias is None else y + bias.to(y.dtype)

        return forward

    def _reduce(self, partial: Tensor, in_blocks: bool) -> Tensor:
        if in_blocks and self.slices_sequence:
            self._check_length(partial)
            return collectives.reduce_scatter(partial, _SEQUENCE, self._group)
        return collectives.reduce_from(partial, self._group)

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
    # Attention of torch

    def _patch_attention(self, part: nn.MultiheadAttention, name: str) -> None:
        in_blocks = inside_any(name, self._plan.blocks)
        takes_whole = inside_any(parent_of(name), self._plan.whole_inputs)

        def enter(*inputs: Tensor) -> tuple[Tensor, ...]:
            """Queries, keys and values as the projections need them; a tensor given thrice is entered once."""
            sliced = in_blocks and self.slices_sequence
            entered: dict[int, Tensor] = {}
            for i, x in enumerate(inputs):
                if id(x) in entered:
                    continue
                if not sliced:
                    entered[id(x)] = self._copy(x)
                elif takes_whole:
                    entered[id(x)] = x
                else:  # a memory of another length is not sliced: the region slices one sequence
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

        _exchange(part, forward)

    def _disable_fused_paths(self) -> None:
        """Keep torch's encoder from reading split weights itself in evaluation."""
        split = tuple(self._plan.tensor)
        for name, part in self._module.named_modules():
            if not any(inside_any(other, (name,)) for other in split) and name:
                continue
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False
            elif isinstance(part, nn.TransformerEncoderLayer):
                part.dropout1.register_forward_pre_hook(_nothing)  # with any hook inside, the layer takes its own code

    # -----------------------------------------------------------------------------------------------------------------
    # Regions

    def _open_sites(self) -> None:
        for name, site in self._sites.items():
            if name:  # the root's own forward is the user's; who calls which part of it is not known
                _exchange(site.module, site.around(site.module.forward))

    def _end_split(self) -> None:
        """Draw as all tensor ranks do again, unless the whole block is sliced."""
        if self.splitting is not None:
            self.splitting.end()

    def _patch_region(self, first: nn.Module | None, last: nn.Module | None) -> None:
        for name in self._plan.whole_inputs:
            part = self._module.get_submodule(name)
            if not isinstance(part, nn.MultiheadAttention) and inside_any(name, self._plan.blocks):
                _exchange(part, self._changing(part.forward, self._gather, name))
        for name in self._plan.blocks:
            block = self._module.get_submodule(name)
            if draws_randomly(block):
                _exchange(block, self._with_own_randomness(block.forward))
        if first is not None:
            _exchange(first, self._changing(first.forward, self._slice, "the first block"))
        if last is not None:
            _exchange(last, self._joining(last.forward))

    def _changing(self, forward: _Forward, change: Callable[[Tensor], Tensor], where: str) -> _Forward:
        """``forward``, given its first tensor changed where the sequence is sliced."""

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
    """One module in whose forward several colwise projections share an input, and split activations live.

    Args:
        engine: whose projections they are.
        module: the module.
        parts: into how many parts the features of its first input are cut for its own code, which takes the width of
            what is split from there. Projections are given all of them.
    """

    def __init__(self, engine: TensorParallel, module: nn.Module, parts: int = 1) -> None:
        self.module = module
        self._parts = parts
        self._narrowed: tuple[Tensor, Tensor] | None = None
        self._engine = engine
        self._random = engine.random
        self._draws = draws_randomly(module)
        self._is_open = False
        self._began = False
        self._given: tuple[Tensor, int] | None = None
        self._shared: Tensor | None = None

    def given(self, x: Tensor) -> Tensor:
        """What was given to the module, where its code hands on the part that it was shown."""
        return self._narrowed[1] if self._narrowed is not None and x is self._narrowed[0] else x

    def share(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """``change(x)``, once for all projections that are given the same tensor: one collective for all of them."""
        if not self._is_open:
            return change(x)
        # A compiler cannot trace versions: there, nothing may change the input in place between two projections.
        version = 0 if torch.compiler.is_compiling() else x._version
        if self._given is None or self._shared is None or self._given[0] is not x or self._given[1] != version:
            self._given, self._shared = (x, version), change(x)
        return self._shared

    def begin(self, device: torch.device) -> None:
        """From here on activations are split: random numbers differ between the ranks."""
        if self._is_open and self._draws and self.module.training and not self._began:
            self._began = self._random.enter(device)
            self._engine.splitting = self if self._began else None

    def end(self) -> None:
        """From here on activations are whole again."""
        if self._began:
            self._began, self._engine.splitting = False, None
            self._random.leave()

    def _narrow(self, x: Tensor) -> Tensor:
        part = x.narrow(-1, 0, x.shape[-1] // self._parts)
        self._narrowed = part, x
        return part

    def around(self, forward: _Forward) -> _Forward:
        """``forward`` as one use of the site."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_open:  # called by itself
                return forward(*args, **kwargs)
            self._is_open = True
            try:
                if self._parts > 1:
                    args, kwargs = _change_first_tensor(args, kwargs, self._narrow, "a module that is split")
                return forward(*args, **kwargs)
            finally:
                self._is_open, self._given, self._shared, self._narrowed = False, None, None, None
                self.end()

        return run


def _exchange(part: nn.Module, forward: _Forward) -> None:
    """Set ``forward`` on the instance; whoever asks for its signature gets that of the one before."""
    part.forward = functools.wraps(part.forward)(forward)


def _projection(part: nn.Module, with_bias: bool = True) -> _Forward:
    """What a projection computes, from the parameters that it holds when it runs."""
    if rules.is_transposed(part):
        return functools.partial(_transposed_projection, part, with_bias)
    if with_bias or rules.has_own_forward(part):
        return part.forward
    return lambda x: F.linear(x, cast(Tensor, part.weight))


def _transposed_projection(part: nn.Module, with_bias: bool, x: Tensor) -> Tensor:
    weight = cast(Tensor, part.weight)
    return F.linear(x, weight.t(), cast(Tensor, part.bias) if with_bias else None)


def _as_multiplied(x: Tensor) -> Tensor:
    """The input of a projection in the dtype that autocast gives it, so that it and its gradient travel in that."""
    kind = x.device.type
    autocast = x.is_floating_point() and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if autocast else x


def _look_up(part: nn.Embedding, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    rows = part.weight.shape[0]
    padding = None if part.padding_idx is None else part.padding_idx - group.rank() * rows
    # Only the rank that holds the padding row keeps gradients from it. Where row 0 stands in for a missing one, its
    # gradient is zero anyway.
    return F.embedding(ids, part.weight, padding if padding is not None and 0 <= padding < rows else None)


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _change_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = arguments(args, kwargs)
    place = first_tensor(given, f"{where} was called without a tensor, and tensor parallelism splits what it is given.")
    return call_of({**given, place: change(given[place])})
