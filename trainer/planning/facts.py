"""What one pass of a module costs: operations, bytes that it keeps for backward, bytes that its parts send.

Nothing of this is a formula about transformers. The module's own `training_step` runs once forward and once backward on
tensors that have shapes and no memory (torch's `FakeTensorMode`), cut by the very engines that cut it on ranks, over a
process group of which nobody else is there (torch's fake backend). What is counted while it runs:

- operations, by torch's table of them (`torch.utils.flop_counter`),
- every storage that is alive, from the operation that makes it to the last reference to it, by the block that made it,
- what collectives along the tensor and the context axis send.

Of repeated blocks that are equal one runs, and counts as often as there are such blocks; so 80 layers take as long as
one. Two runs, with two and with three samples, tell what grows with the batch from what does not.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.callbacks.monitor.flops import operations_of
from trainwright.strategies.blocks import checkpoint_activations, find_blocks
from trainwright.strategies.communication.axes import name_of
from trainwright.strategies.communication.calls import Call, listen
from trainwright.strategies.communication.costs import least_bytes
from trainwright.strategies.communication.meter import Sent
from trainwright.strategies.engines import EngineOptions, Engines
from trainwright.strategies.groups import LayoutGroups
from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.form import Form, take_apart
from trainwright.trainer.planning.experts import EVEN, Routing, assume_routing

# Attributes in which equal blocks differ: their place in the model.
_PLACE = re.compile(r"(^|_)(idx|index|layer_id|layer_number|layer_idx|depth|name)$")
# Bytes of parameters up to which a module that reads values is run with real ones.
_REAL_BYTES = 2**29


@dataclass(frozen=True)
class Bytes:
    """Bytes of a micro-batch, in the number of its samples."""

    constant: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: float) -> float:
        """Bytes for so many samples."""
        return self.constant + self.per_sample * samples

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.constant + other.constant, self.per_sample + other.per_sample)

    def __sub__(self, other: Bytes) -> Bytes:
        return self + other.times(-1)

    def times(self, factor: float) -> Bytes:
        """So many of them."""
        return Bytes(self.constant * factor, self.per_sample * factor)


@dataclass(frozen=True)
class Cut:
    """How a pass is split over ranks that work on the same samples, and what of it is computed twice.

    Args:
        tensor: ranks that split each weight; 1 is off.
        context: ranks that split the sequence; 1 is off.
        sequence_parallel: whether the tensor axis splits activations along the sequence.
        loss_parallel: whether logits stay split.
        checkpointing: ``"none"``, ``"full"`` (every block is computed again in backward) or ``"selective"``.
        checkpoint_modules: of ``"selective"``.
        attention, balance: of the context axis.
        expert: ranks that hold different experts; 1 is off.
        routing: how evenly tokens are spread over them.
    """

    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    checkpointing: str = "none"
    checkpoint_modules: tuple[str, ...] | None = None
    attention: str = "ring"
    balance: bool = True
    expert: int = 1
    routing: Routing = EVEN


@dataclass(frozen=True)
class Part:
    """What a part of a pass costs one rank: a block, or what stands before or after the blocks.

    Args:
        flops: operations of forward, for one sample.
        backward: operations of backward, for one sample; what is computed again included.
        kept: bytes that are alive when the loss is there, parameters excluded.
        sent: (axis, kind of collective) -> what one sample's forward and backward send.
        sent_forward: of that, what forward sends.
        outputs: bytes that layers with weights of their own return; as large are the gradients of these.
        calls: operations of torch that forward runs, whatever the number of samples; each costs time of its own.
        backward_calls: those of backward; what is computed again included.
        moved: bytes that operations of forward without arithmetic of matrices read and write.
        backward_moved: those of backward; what is computed again included.
    """

    flops: float = 0.0
    backward: float = 0.0
    kept: Bytes = Bytes()
    sent: Mapping[tuple[str, str], Sent] = field(default_factory=dict)
    sent_forward: Mapping[tuple[str, str], Sent] = field(default_factory=dict)
    outputs: Bytes = Bytes()
    calls: float = 0.0
    backward_calls: float = 0.0
    moved: Bytes = Bytes()
    backward_moved: Bytes = Bytes()

    def with_excess(self, block: Part, alike: Part) -> Part:
        """With what ``block`` costs more than ``alike``."""
        sent, forward = dict(self.sent), dict(self.sent_forward)
        for own, more, usual in ((sent, block.sent, alike.sent), (forward, block.sent_forward, alike.sent_forward)):
            for key, each in more.items():
                less = usual.get(key, Sent())
                rest = Sent(
                    max(each.calls - less.calls, 0),
                    max(each.bytes - less.bytes, 0.0),
                    max(each.least - less.least, 0.0),
                )
                own[key] = own.get(key, Sent()) + rest
        return replace(self, kept=self.kept + block.kept - alike.kept, sent=sent, sent_forward=forward)

    def again(self, boundary: Bytes) -> Part:
        """The same block where only what enters it is kept, and all is computed again in backward."""
        sent = {key: _more(each, self.sent_forward.get(key)) for key, each in self.sent.items()}
        calls = self.backward_calls + self.calls
        return replace(
            self,
            backward=self.backward + self.flops,
            kept=boundary,
            sent=sent,
            backward_calls=calls,
            backward_moved=self.backward_moved + self.moved,
        )

    def over(self, one: Part, alone: Part) -> Part:
        """This block where ``alone``, which is split, stands for ``one``, which is not.

        Args:
            one: the whole block.
            alone: the same, split along another axis than this one.
        """
        return Part(
            flops=_scaled(self.flops, alone.flops, one.flops),
            backward=_scaled(self.backward, alone.backward, one.backward),
            kept=_scaled_bytes(self.kept, alone.kept, one.kept),
            sent={**_shrunk(self.sent, alone, one), **_shrunk(alone.sent, self, one)},
            sent_forward={**_shrunk(self.sent_forward, alone, one), **_shrunk(alone.sent_forward, self, one)},
            outputs=_scaled_bytes(self.outputs, alone.outputs, one.outputs),
            calls=max(self.calls + alone.calls - one.calls, one.calls),
            backward_calls=max(self.backward_calls + alone.backward_calls - one.backward_calls, one.backward_calls),
            moved=_scaled_bytes(self.moved, alone.moved, one.moved),
            backward_moved=_scaled_bytes(self.backward_moved, alone.backward_moved, one.backward_moved),
        )


def _more(sent: Sent, other: Sent | None) -> Sent:
    return sent if other is None else sent + other


def _scaled(value: float, part: float, whole: float) -> float:
    return value * part / whole if whole else value


def _scaled_bytes(value: Bytes, part: Bytes, whole: Bytes) -> Bytes:
    """What does not grow with the batch is weights, or little: the smaller of the two."""
    constant = min(value.constant, part.constant) if whole.constant else max(value.constant, part.constant)
    return Bytes(constant, _scaled(value.per_sample, part.per_sample, whole.per_sample))


def _shrunk(sent: Mapping[tuple[str, str], Sent], part: Part, whole: Part) -> dict[tuple[str, str], Sent]:
    """What is sent of activations of which the other axis leaves a part."""
    factor = _scaled(1.0, part.kept.per_sample, whole.kept.per_sample)
    return {key: Sent(each.calls, each.bytes * factor, each.least * factor) for key, each in sent.items()}


@dataclass(frozen=True)
class Pass:
    """What forward and backward of a micro-batch cost one rank, under one :class:`Cut`.

    Args:
        before, after: what stands before the blocks and after them, the loss included.
        blocks: one for each kind of block.
        boundary: bytes of what one block hands to the next.
        forward_block: bytes that come on top of what is kept while forward goes through a block.
        forward_peak: bytes that come on top of all that is kept while forward goes on.
        head_peak: bytes that come on top of all that is kept while backward goes through what follows the blocks.
        entry: bytes on top of what blocks (and what is before them) keep when backward enters the last block.
        block_peak: bytes that come on top of that within the backward of a block, gradients of its weights included.
        accumulating_peak: the same where each gradient of a weight is added to an earlier one, and gone, once it is
            made.
        is_real: whether it was run with values, because the module reads them.
    """

    before: Part
    blocks: tuple[Part, ...]
    after: Part
    boundary: Bytes
    forward_block: Bytes
    forward_peak: Bytes
    head_peak: Bytes
    entry: Bytes
    block_peak: Bytes
    accumulating_peak: Bytes
    is_real: bool = False

    def again(self) -> Pass:
        """The same pass with every block computed again in backward (activation checkpointing of all blocks)."""
        blocks = tuple(block.again(self.boundary) for block in self.blocks)
        most = max((block.kept for block in self.blocks), key=lambda kept: kept.of(1), default=self.boundary)
        more = most - self.boundary
        return replace(
            self,
            blocks=blocks,
            block_peak=self.block_peak + more,
            accumulating_peak=self.accumulating_peak + more,
        )

    def over(self, one: Pass, alone: Pass) -> Pass:
        """The pass split along this one's axis and along that of ``alone``; ``one`` is split along neither.

        Activations, operations and what is sent shrink by both factors: near enough for a search, and measured where
        it matters (:meth:`ModelFacts.of`).
        """
        peaks = {
            name: _scaled_bytes(getattr(self, name), getattr(alone, name), getattr(one, name))
            for name in (
                "boundary",
                "forward_block",
                "forward_peak",
                "head_peak",
                "entry",
                "block_peak",
                "accumulating_peak",
            )  # fmt: skip
        }
        return Pass(
            before=self.before.over(one.before, alone.before),
            blocks=tuple(a.over(b, c) for a, b, c in zip(self.blocks, one.blocks, alone.blocks, strict=True)),
            after=self.after.over(one.after, alone.after),
            **peaks,
            is_real=self.is_real,
        )


class FactsError(ValueError):
    """The module, or a batch of it, cannot be run without a Trainer and without memory; the message says why."""


class ModelFacts:
    """The costs of a module, measured as they are asked for.

    Args:
        module: whole, on the meta device.
        batch: one batch as the data module gives it; any number of samples.
        samples: number of its samples.
        precision: of the group ``precision``.
        plan: parts of the plan of the model from the configuration (``strategy.plan``).
        blocks: patterns of the repeated blocks; ``None``: they are found.
        real: makes the module with memory on the CPU, for a module that reads values; ``None``: it cannot be made so.

    Attributes:
        blocks: names of the repeated blocks, in order.
        kinds: for each of them, which of :attr:`Pass.blocks` it is.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        samples: int,
        precision: str = "32",
        plan: Mapping[str, Any] | None = None,
        blocks: Sequence[str] | None = None,
        real: Callable[[], LightningModule] | None = None,
    ) -> None:
        self.module, self.precision = module, precision
        self._batch, self._samples, self._real = batch, samples, real
        self._plan = dict(plan or {})
        found = list(blocks) if blocks is not None else self._plan.get("blocks")
        self.blocks = _block_names(module, found)
        self.kinds = _kinds([module.get_submodule(name) for name in self.blocks])
        self._passes: dict[Cut, Pass] = {}
        self._near: dict[Cut, Pass] = {}
        self._without_values: bool | None = None

    def of(self, cut: Cut) -> Pass:
        """What a pass costs one rank.

        Raises:
            FactsError: if the module cannot be run so.
        """
        if cut not in self._passes:
            self._passes[cut] = self._measure(cut)
        return self._passes[cut]

    def near(self, cut: Cut) -> Pass:
        """As :meth:`of`, put together from passes that are split along one axis at a time; faster.

        Raises:
            FactsError: if the module cannot be run so.
        """
        for known in (self._passes, self._near):
            if cut in known:
                return known[cut]
        if cut.checkpointing == "full":
            found = self.near(replace(cut, checkpointing="none")).again()
        elif cut.expert > 1 and cut.tensor * cut.context > 1:
            plain = replace(cut, tensor=1, context=1, sequence_parallel=False, loss_parallel=False)
            dense = replace(plain, expert=1)
            found = self.near(replace(cut, expert=1)).over(self.of(dense), self.of(plain))
        elif cut.tensor > 1 and cut.context > 1:
            plain = replace(cut, tensor=1, context=1, sequence_parallel=False, loss_parallel=False)
            tensor, context = replace(cut, context=1), replace(plain, context=cut.context)
            found = self.of(tensor).over(self.of(plain), self.of(context))
        else:
            return self.of(cut)
        self._near[cut] = found
        return found

    def reduced(self, each: int = 2) -> tuple[LightningModule, list[str]]:
        """The module with so many blocks of each kind, and their names; what is true of these is true of all.

        The others are shells without parameters.
        """
        kept: list[int] = []
        for kind in sorted(set(self.kinds)):
            kept += [index for index, other in enumerate(self.kinds) if other == kind][:each]
        return self._without(self.module, set(kept), _Last()), [self.blocks[index] for index in sorted(kept)]

    def resized(self, samples: int) -> Any:
        """A batch of so many samples, without memory or values; only within a mode of torch's fake tensors."""

        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape = list(leaf.shape)
            if shape and shape[0] == self._samples:
                shape[0] = samples
            return torch.zeros(shape, dtype=leaf.dtype, device="cpu")

        return pytree.tree_map(like, self._batch)

    def handed_on(self, cut: Cut, samples: int) -> Form:
        """What a block within the model returns, without its tensors.

        Args:
            cut: how a pass is split.
            samples: of a micro-batch.

        Raises:
            TypeError: if it is nothing that a pipeline can hand on.
        """
        found: list[Form] = []
        with self._prepared(cut, samples, self._without_values is False) as (module, blocks, batch, _):
            place = self._representatives([place for place, _ in blocks])[0]
            source = f"The block {self.blocks[place]!r}"
            dict(blocks)[place].register_forward_hook(
                lambda block, args, output: found.append(take_apart(output, source)[0])
            )
            with autocast_of(self.precision):
                module.training_step(batch, 0)
        return found[0]

    def _measure(self, cut: Cut) -> Pass:
        reason: Exception | None = None
        if self._without_values is not False:
            try:
                measured = self._twice(cut, with_values=False)
            except Exception as error:  # whatever the user's code raises where tensors have no values
                reason = error
                if self._without_values:
                    raise self._error(error) from error
            else:
                self._without_values = True
                return measured
        if self._real is None or _bytes_of(self.module) > _REAL_BYTES:
            raise self._error(reason)
        try:
            measured = self._twice(cut, with_values=True)
        except Exception as error:
            raise self._error(reason or error) from error
        self._without_values = False
        return measured

    def _error(self, error: Exception | None) -> FactsError:
        lines = str(error).strip().splitlines() or [repr(error)]
        return FactsError(
            f"training_step of {type(self.module).__name__} cannot be run without a Trainer and without memory, so "
            f"what it costs is not known: {type(error).__name__}: {lines[0]}"
        )

    def _twice(self, cut: Cut, with_values: bool) -> Pass:
        # Not with one: views that are contiguous for one sample alone hold on to more than they show.
        two, three = (self._run(cut, samples, with_values) for samples in (2, 3))
        active = [place for place, _ in two.blocks]
        return _pass_of(two, three, self._representatives(active), is_real=with_values)

    def _run(self, cut: Cut, samples: int, with_values: bool) -> _Run:
        with self._prepared(cut, samples, with_values) as (module, blocks, batch, layout):
            return _Run(module, blocks, batch, layout, self.precision)

    @contextlib.contextmanager
    def _prepared(self, cut: Cut, samples: int, with_values: bool) -> Iterator[_Sample]:
        """The module with the blocks that run, cut, where it can run: within torch's fake mode unless it has values."""
        active = self._active(cut)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet())
            shard = cut.expert // math.gcd(cut.expert, cut.context)
            layout = Layout(shard=shard, context=cut.context, tensor=cut.tensor, expert=cut.expert)
            stack.enter_context(_alone_among(layout.world_size))
            if not with_values:
                from torch._subclasses.fake_tensor import FakeTensorMode

                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            last = _Last()
            module = self._sample(active, last, with_values)
            batch = self._real_batch(samples) if with_values else self.resized(samples)
            stack.enter_context(default_dtype(self.precision))
            if layout.world_size > 1:
                _cut_module(module, layout, cut, {**self._plan, "blocks": [self.blocks[i] for i in sorted(active)]})
            chosen = [module.get_submodule(self.blocks[i]) for i in sorted(active)]
            checkpoint_activations(module, cut.checkpointing, chosen, cut.checkpoint_modules)  # type: ignore[arg-type]
            for block in chosen:
                block.register_forward_hook(last.remember)  # after the engines' own, which exchange outputs
            yield module, list(zip(sorted(active), chosen, strict=True)), batch, layout

    def _active(self, cut: Cut) -> set[int]:
        """Places of the blocks that run: one of each kind, and where activations are sliced, the first and the last."""
        chosen = {self.kinds.index(kind) for kind in set(self.kinds)}
        if not self.blocks or (cut.context == 1 and not (cut.sequence_parallel and cut.tensor > 1)):
            return chosen
        ends = {0, len(self.blocks) - 1}
        between = {
            kind: [i for i, k in enumerate(self.kinds) if k == kind and i not in ends] for kind in set(self.kinds)
        }
        return ends | {places[0] for places in between.values() if places} | (chosen - ends)

    def _representatives(self, active: Sequence[int]) -> list[int]:
        """For each kind, the place of the block that stands for it: one between others, if there is one."""
        return [
            min((i for i in active if self.kinds[i] == kind), key=lambda i: (i in (active[0], active[-1]), i))
            for kind in sorted(set(self.kinds))
        ]

    def _sample(self, active: set[int], last: _Last, with_values: bool) -> LightningModule:
        """The module with those blocks alone; the others are shells that hand on what the last one gave."""
        module = self._real() if with_values and self._real is not None else self.module
        sample = self._without(module, active, last)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else None
        if not with_values:
            _give_storage(sample, dtype)
        elif dtype is not None:
            sample.to(dtype)
        sample.train()
        sample.__dict__["log"] = sample.__dict__["log_dict"] = _ignore
        return sample

    def _without(self, module: LightningModule, active: set[int], last: _Last) -> LightningModule:
        memo: dict[int, Any] = {}
        for index, name in enumerate(self.blocks):
            if index not in active:
                block = module.get_submodule(name)
                memo[id(block)] = _shell(block, last)
        trainer, module._trainer = module._trainer, None
        try:
            return copy.deepcopy(module, memo)
        finally:
            module._trainer = trainer

    def _real_batch(self, samples: int) -> Any:
        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != self._samples:
                return leaf
            return leaf[torch.arange(samples) % self._samples]

        return pytree.tree_map(like, self._batch)


# ---------------------------------------------------------------------------------------------------------------------
# The module


def _block_names(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    found = find_blocks(module, patterns)
    runs: dict[str, list[str]] = {}
    for name in found:
        runs.setdefault(name.rpartition(".")[0], []).append(name)
    if not runs:
        return []
    # Of several lists the heaviest is the model; the others count with what is outside.
    weight = {parent: sum(_numel(found[name]) for name in names) for parent, names in runs.items()}
    return runs[max(weight, key=lambda parent: weight[parent])]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """For each block the number of its kind: equal ones have the same classes, shapes and settings within."""
    known: dict[tuple[Any, ...], int] = {}
    return [known.setdefault(_likeness(block), len(known)) for block in blocks]


def _likeness(block: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, float, str)) and not key.startswith("_") and not _PLACE.search(key)
        )
        shapes = tuple(
            (key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None
        )
        parts.append((name, type(module), settings, shapes))
    return tuple(parts)


# A module, its blocks that run with their places, a batch, and a layout of the ranks that the module is cut for.
_Sample = tuple[LightningModule, list[tuple[int, nn.Module]], Any, Layout]


class _Last:
    """What the last block that ran has returned."""

    def __init__(self) -> None:
        self.output: Any = None

    def remember(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __deepcopy__(self, memo: Any) -> _Last:
        return self


def _shell(block: nn.Module, last: _Last) -> nn.Module:
    """A block of the same class and settings without parameters, that hands on what the last real one gave."""
    shell = copy.copy(block)
    shell.__dict__ = {**block.__dict__}
    for kind in ("_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        shell.__dict__[kind] = {}
    shell.__dict__["forward"] = last
    return shell


def _give_storage(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Exchange meta tensors for such that say they are on the CPU, ties kept; within a fake mode.

    Args:
        module: on the meta device.
        dtype: that floating-point tensors get; ``None``: their own.
    """
    made: dict[int, Any] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        found: Tensor = made[id(tensor)]
        return found

    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = real(tensor)  # type: ignore[assignment]
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and value.is_meta:
                object.__setattr__(part, name, real(value))


def _cut_module(module: LightningModule, layout: Layout, cut: Cut, plan: Mapping[str, Any]) -> None:
    options = EngineOptions(
        sequence_parallel=cut.sequence_parallel and cut.tensor > 1,
        loss_parallel=cut.loss_parallel and cut.tensor > 1,
        attention=cut.attention,
        balance=cut.balance,
        plan=plan,
    )
    engines = Engines(module, layout, LayoutGroups(layout, "cpu"), options, torch.device("cpu"))
    engines.apply()
    assume_routing(engines.dispatchers, cut.routing)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """In place of ``log`` and ``log_dict``, which want a Trainer."""


# ---------------------------------------------------------------------------------------------------------------------
# Around it


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is said of what is tried: torch logs what fails without values, a user's step may print."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _alone_among(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many of which there are no others: collectives return at once.

    Raises:
        FactsError: if the process has met real ranks already.
    """
    if ranks == 1:
        yield
        return
    with fake_world(ranks):
        yield


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A default process group of so many ranks of which this is one and the others are not there.

    Args:
        ranks: of the group.
        rank: this one.

    Raises:
        FactsError: if the process has met real ranks already.
    """
    if dist.is_initialized():
        raise FactsError("this process has met other ranks already; plan before they meet, from the launching process")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainwright.strategies.groups import forget_meshes

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextlib.contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """New tensors get the dtype that they get in a run of this precision."""
    if precision != "bf16-true":
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast_of(precision: str) -> Any:
    """The context of a forward pass under a precision of the group of that name."""
    if precision in ("bf16-mixed", "16-mixed"):
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        return torch.autocast("cpu", dtype, cache_enabled=False)  # as the strategies' plugin does
    return contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------------------------------
# Counting

_BEFORE, _AFTER = "before", "after"


class _Run:
    """One forward and one backward, and what was counted.

    Attributes:
        flops, backward: operations by phase: :data:`_BEFORE`, the place of a block, :data:`_AFTER`.
        calls, backward_calls: how many operations of torch they are in, by phase.
        moved, backward_moved: bytes that operations without arithmetic of matrices read and write, by phase.
        kept: bytes alive when the loss is there, by the phase that made them.
        sent: by phase.
    """

    def __init__(
        self,
        module: LightningModule,
        blocks: Sequence[tuple[int, nn.Module]],
        batch: Any,
        layout: Layout,
        precision: str,
    ) -> None:
        self.blocks = blocks
        self.phase: Any = _BEFORE
        self._has_blocks = bool(blocks)
        if not blocks:
            self.phase = _AFTER
        self.counter = counter = _Counter(self)
        self.boundaries: dict[int, int] = {}
        self.entry = self.head_peak = self.block_peak = self.accumulating_peak = 0
        self.forward_block = 0
        self.outputs: dict[int, int] = {}
        self._last_place = blocks[-1][0] if blocks else -1
        for place, block in blocks:
            self._watch(place, block)
        self.sent: dict[Any, dict[tuple[str, str], Sent]] = {}
        self.sent_forward: dict[Any, dict[tuple[str, str], Sent]] = {}
        counter.ignore([*module.parameters(), *module.buffers()])
        counter.ignore([leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)])
        self._graded: list[Tensor] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._graded.append)
        self._layout = layout
        with _heard(self._hear), counter:
            with autocast_of(precision):
                loss = _loss_of(module.training_step(batch, 0))
            self.kept = counter.alive()
            self.sent_forward = {phase: dict(counts) for phase, counts in self.sent.items()}
            self.at_loss = counter.now
            self.forward_peak = counter.peak
            counter.peak = counter.now
            self.phase = _AFTER
            self._in_backward = True
            loss.backward()
        self._close_peaks()
        self.flops, self.backward = dict(counter.flops), dict(counter.backward)
        self.calls, self.backward_calls = dict(counter.calls), dict(counter.backward_calls)
        self.moved, self.backward_moved = dict(counter.moved), dict(counter.backward_moved)

    _in_backward = False

    def _hear(self, call: Call) -> None:
        ranks = call.group.size()
        if ranks == 1 or call.kind == "barrier":
            return
        counts = self.sent.setdefault(self.phase, {})
        key = name_of(dist.get_process_group_ranks(call.group), call.kind, self._layout), call.kind
        least = least_bytes(call.kind, call.size, ranks, call.place)
        counts[key] = counts.get(key, Sent()) + Sent(1, least, least)

    def _watch(self, place: int, block: nn.Module) -> None:
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:
                return inner(*args, **kwargs)
            self.phase = place
            self.counter.block_peak = self.counter.now
            args, kwargs = pytree.tree_map(lambda leaf: self._leaving(place, leaf), (args, kwargs))
            output = inner(*args, **kwargs)
            self.phase = _AFTER
            self.forward_block = self.counter.block_peak - self.counter.now
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            self.boundaries[place] = sum(_size(leaf) for leaf in leaves)
            first = next((leaf for leaf in leaves if leaf.requires_grad), None)
            if first is not None:
                first.register_hook(lambda gradient: self._entering(place))
            return output

        block.forward = forward
        for part in block.modules():
            if any(parameter is not None for parameter in part._parameters.values()):
                part.register_forward_hook(lambda module, args, output: self._returned(place, output))

    def _returned(self, place: int, output: Any) -> None:
        if not self._in_backward:
            size = sum(_size(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
            self.outputs[place] = self.outputs.get(place, 0) + size

    def _leaving(self, place: int, leaf: Any) -> Any:
        """Backward leaves a block when it has the gradient of the block's input."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf:
            return leaf
        leaf.register_hook(lambda gradient: self._left(place))
        return leaf

    def _entering(self, place: int) -> None:
        self._drop()
        self.phase = place
        if place == self._last_place:
            self.head_peak = self.counter.peak
            self.entry = self.counter.now
            self.counter.peak = self.counter.accumulating_peak = self.counter.now

    def _left(self, place: int) -> None:
        if self.phase == place:
            self._drop()
            self.phase = _BEFORE

    def _drop(self) -> None:
        """Gradients are there until a block has gone backward; who keeps them longer counts them himself."""
        for parameter in self._graded:
            parameter.grad = None
        self._graded.clear()

    def _close_peaks(self) -> None:
        if not self._has_blocks or not self.entry:
            self.head_peak, self.entry, self.block_peak = self.counter.peak, self.at_loss, self.counter.peak
            self.accumulating_peak = self.counter.peak
        else:
            self.block_peak, self.accumulating_peak = self.counter.peak, self.counter.accumulating_peak

    @property
    def graded_bytes(self) -> int:
        """Of gradients of weights that are there."""
        return sum(_size(getattr(p.grad, "_local_tensor", p.grad)) for p in self._graded if p.grad is not None)


class _Seen:
    """A storage that is alive: its bytes, what it belongs to, and what tells when it is gone."""

    __slots__ = ("phase", "reference", "size")

    def __init__(self, reference: Any, phase: Any, size: int) -> None:
        self.reference, self.phase, self.size = reference, phase, size


class LiveCounter(TorchDispatchMode):
    """Watches every operation, and knows which storages there are from when to when.

    Attributes:
        now: bytes alive.
        peak: most bytes alive since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, _Seen] = {}
        self._ignored = WeakIdKeyDictionary()
        self._stack = contextlib.ExitStack()
        self.now = 0
        self.peak = 0

    phase: Any = None
    """What storages that are made now belong to."""

    def __enter__(self) -> Any:
        self._stack.enter_context(_resizing_told(self._on_resized))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def alive(self) -> dict[Any, int]:
        """Bytes alive by the phase that made them."""
        found: dict[Any, int] = {}
        for seen in list(self._seen.values()):
            found[seen.phase] = found.get(seen.phase, 0) + seen.size
        return found

    def reset_peak(self) -> None:
        """Look for the most from here on."""
        self.peak = self.now

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Leave out tensors that are there anyway."""
        for tensor in tensors:
            self._ignored[tensor.untyped_storage()] = None

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> bool:
        """Take note of a tensor; whether there is more than before."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = id(storage)
        if key in self._seen:
            return self._resized(storage)
        if storage in self._ignored:
            return False
        size = storage.nbytes()
        self._seen[key] = _Seen(weakref.ref(storage, lambda _: self._on_gone(key)), self.phase, size)
        self.now += size
        return True

    def _resized(self, storage: torch.UntypedStorage) -> bool:
        seen, size = self._seen[id(storage)], storage.nbytes()
        more, seen.size = size - seen.size, size
        self.now += more
        return more > 0

    def _on_resized(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen and self._resized(storage):
            self._notice(self.now)

    def _on_gone(self, key: int) -> None:
        self.now -= self._seen.pop(key).size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        is_more = False
        for leaf in pytree.tree_leaves(output):
            is_more |= isinstance(leaf, Tensor) and self._see(leaf)
        if is_more:
            self._notice(self.now)
        self._count(func, args, kwargs, output)
        return output

    def _notice(self, now: int) -> None:
        """There is more than before."""
        self.peak = max(self.peak, now)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """What else is counted of an operation: nothing."""


@contextlib.contextmanager
def _resizing_told(listener: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Tell of every storage that is resized: FSDP2 takes and gives memory so, which is no operation of torch."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        listener(storage)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class _Counter(LiveCounter):
    """Counts operations too, by phase of a run."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run
        self.flops: dict[Any, float] = {}
        self.backward: dict[Any, float] = {}
        self.calls: dict[Any, float] = {}
        self.backward_calls: dict[Any, float] = {}
        self.moved: dict[Any, float] = {}
        self.backward_moved: dict[Any, float] = {}
        self.accumulating_peak = self.block_peak = 0

    def _notice(self, now: int) -> None:
        super()._notice(now)
        self.block_peak = max(self.block_peak, now)
        if self._run._in_backward:
            self.accumulating_peak = max(self.accumulating_peak, now - self._run.graded_bytes)

    @property
    def phase(self) -> Any:
        """Where the run is."""
        return self._run.phase

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        calls = self.backward_calls if self._run._in_backward else self.calls
        calls[self._run.phase] = calls.get(self._run.phase, 0.0) + 1
        operations = operations_of(func, args, kwargs, output, halve_causal=True)
        if operations:
            counts = self.backward if self._run._in_backward else self.flops
            counts[self._run.phase] = counts.get(self._run.phase, 0.0) + operations
        elif not _is_view(func):
            through = self.backward_moved if self._run._in_backward else self.moved
            size = sum(_size(leaf) for leaf in pytree.tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor))
            through[self._run.phase] = through.get(self._run.phase, 0.0) + size


def _is_view(func: Any) -> bool:
    """Whether an operation only looks at memory in another way, or sends it, which is counted elsewhere."""
    schema = func._schema
    aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return aliases or func.namespace in ("c10d", "_c10d_functional", "fsdp") or not schema.returns


@contextlib.contextmanager
def _heard(listener: Callable[[Call], None]) -> Iterator[None]:
    end = listen(listener) if dist.is_initialized() else _ignore
    try:
        yield
    finally:
        end()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step returned {type(output).__name__}, and no loss")
    return loss


def _pass_of(two: _Run, three: _Run, representatives: Sequence[int], is_real: bool) -> Pass:
    """From runs with two and with three samples.

    Args:
        two, three: the runs.
        representatives: for each kind of block, the place of the one that stands for it.
        is_real: whether they had values.
    """

    def grown(value: Callable[[_Run], float]) -> Bytes:
        first, second = value(two), value(three)
        return Bytes(3 * first - 2 * second, second - first)

    def part(phase: Any) -> Part:
        flops, backward = (counts.get(phase, 0.0) / 3 for counts in (three.flops, three.backward))
        sent, forward = (_of_one(counts.get(phase, {})) for counts in (three.sent, three.sent_forward))
        outputs = grown(lambda run: run.outputs.get(phase, 0))
        calls, again = three.calls.get(phase, 0.0), three.backward_calls.get(phase, 0.0)
        return Part(
            flops,
            backward,
            grown(lambda run: run.kept.get(phase, 0)),
            sent,
            forward,
            outputs,
            calls,
            again,
            grown(lambda run: run.moved.get(phase, 0.0)),
            grown(lambda run: run.backward_moved.get(phase, 0.0)),
        )

    blocks = tuple(part(place) for place in representatives)
    before, after, through = part(_BEFORE), part(_AFTER), part(_BEFORE).kept
    for place, block in two.blocks:
        through = through + part(place).kept
        alike = _stands_for(block, two.blocks, representatives)
        # What the first and the last block do besides belongs to what is before and after them.
        if place != alike and place == two.blocks[0][0]:
            before = before.with_excess(part(place), part(alike))
        elif place != alike and place == two.blocks[-1][0]:
            after = after.with_excess(part(place), part(alike))
    at = representatives[0] if representatives else -1
    return Pass(
        before=before,
        blocks=blocks,
        after=after,
        boundary=grown(lambda run: run.boundaries.get(at, 0)),
        forward_block=grown(lambda run: run.forward_block),
        forward_peak=grown(lambda run: run.forward_peak - run.at_loss),
        head_peak=grown(lambda run: run.head_peak - run.at_loss),
        entry=grown(lambda run: run.entry) - through,
        block_peak=grown(lambda run: run.block_peak - run.entry),
        accumulating_peak=grown(lambda run: run.accumulating_peak - run.entry),
        is_real=is_real,
    )


def _stands_for(block: nn.Module, blocks: Sequence[tuple[int, nn.Module]], representatives: Sequence[int]) -> int:
    """The place of the representative that is of the same class and shapes as a block."""
    shapes = {place: _likeness_of_parts(other) for place, other in blocks}
    own = _likeness_of_parts(block)
    return next((place for place in representatives if shapes[place] == own), representatives[0])


def _likeness_of_parts(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _of_one(sent: Mapping[tuple[str, str], Sent]) -> dict[tuple[str, str], Sent]:
    """What a micro-batch of three samples has sent, for one of them."""
    return {key: Sent(each.calls, each.bytes / 3, each.least / 3) for key, each in sent.items()}
