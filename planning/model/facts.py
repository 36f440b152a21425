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
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainwright.core.layout import Layout
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.planning.model.counted_run import AFTER, BEFORE, CountedRun
from trainwright.planning.model.experts import assume_routing
from trainwright.planning.model.without_memory import (
    FactsError,
    default_dtype,
    fake_tensors,
    fake_world,
    give_storage,
    quiet,
    without_trainer,
)
from trainwright.planning.time.cost import Bytes, ModelCut, ModelPart, PassCost
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.contract.communication.meter import Sent
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.plan.blocks import checkpoint_activations, count_parameters, find_blocks

# Attributes in which equal blocks differ: their place in the model.
_PLACE = re.compile(r"(^|_)(idx|index|layer_id|layer_number|layer_idx|depth|name)$")
# Bytes of parameters up to which a module that reads values is run with real ones.
_REAL_BYTES = 2**29
# A module, its blocks that run with their places, a batch, and a layout of the ranks that the module is cut for.
_Sample = tuple[LightningModule, list[tuple[int, nn.Module]], Any, Layout]


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
        kinds: for each of them, which of :attr:`PassCost.blocks` it is.
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
        self.blocks = block_names(module, found)
        self.kinds = kinds_of([module.get_submodule(name) for name in self.blocks])
        self._passes: dict[ModelCut, PassCost] = {}
        self._near: dict[ModelCut, PassCost] = {}
        # Whether the step runs on tensors without values; None: it was not tried yet.
        self._without_values: bool | None = None

    def of(self, cut: ModelCut) -> PassCost:
        """What a pass costs one rank.

        Raises:
            FactsError: if the module cannot be run so.
        """
        if cut not in self._passes:
            self._passes[cut] = self._measure(cut)
        return self._passes[cut]

    def near(self, cut: ModelCut) -> PassCost:
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
        return with_blocks(self.module, self.blocks, kept, Last()), [self.blocks[index] for index in sorted(kept)]

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

    def _measure(self, cut: ModelCut) -> PassCost:
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
        if self._real is None or sum(parameter.nbytes for parameter in self.module.parameters()) > _REAL_BYTES:
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

    def _twice(self, cut: ModelCut, with_values: bool) -> PassCost:
        # Not with one: views that are contiguous for one sample alone hold on to more than they show.
        two, three = (self._run(cut, samples, with_values) for samples in (2, 3))
        active = [place for place, _ in two.blocks]
        return pass_of(two, three, self._representatives(active))

    def _run(self, cut: ModelCut, samples: int, with_values: bool) -> CountedRun:
        with self._prepared(cut, samples, with_values) as (module, blocks, batch, layout):
            return CountedRun(module, blocks, batch, layout, self.precision)

    @contextlib.contextmanager
    def _prepared(self, cut: ModelCut, samples: int, with_values: bool) -> Iterator[_Sample]:
        """The module with the blocks that run, cut, where it can run: within torch's fake mode unless it has values."""
        active = self._active(cut)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet())
            shard = cut.expert // math.gcd(cut.expert, cut.context)
            layout = Layout(shard=shard, context=cut.context, tensor=cut.tensor, expert=cut.expert)
            if layout.world_size > 1:
                stack.enter_context(fake_world(layout.world_size))
            if not with_values:
                stack.enter_context(fake_tensors())
            last = Last()
            module = self._sample(active, last, with_values)
            batch = self._real_batch(samples) if with_values else self.resized(samples)
            stack.enter_context(default_dtype(self.precision))
            if layout.world_size > 1:
                _cut_module(module, layout, cut, {**self._plan, "blocks": [self.blocks[i] for i in sorted(active)]})
            chosen = [module.get_submodule(self.blocks[i]) for i in sorted(active)]
            checkpoint_activations(module, cut.checkpointing, chosen, cut.checkpoint_modules)
            for block in chosen:
                block.register_forward_hook(last.remember)  # after the engines' own, which exchange outputs
            yield module, list(zip(sorted(active), chosen, strict=True)), batch, layout

    def _active(self, cut: ModelCut) -> set[int]:
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

    def _sample(self, active: set[int], last: Last, with_values: bool) -> LightningModule:
        """The module with those blocks alone; the others are shells that hand on what the last one gave."""
        module = self._real() if with_values and self._real is not None else self.module
        sample = with_blocks(module, self.blocks, active, last)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else None
        if not with_values:
            give_storage(sample, dtype)
        elif dtype is not None:
            sample.to(dtype)
        sample.train()
        without_trainer(sample)
        return sample

    def _real_batch(self, samples: int) -> Any:
        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != self._samples:
                return leaf
            return leaf[torch.arange(samples) % self._samples]

        return pytree.tree_map(like, self._batch)


def _cut_module(module: LightningModule, layout: Layout, cut: ModelCut, plan: Mapping[str, Any]) -> None:
    options = EngineOptions(
        sequence_parallel=cut.sequence_parallel and cut.tensor > 1,
        loss_parallel=cut.loss_parallel and cut.tensor > 1,
        attention=cut.attention,
        balance=cut.balance,
        plan=dict(plan),
    )
    engines = Engines.of(module, layout, LayoutGroups(layout, "cpu"), options, torch.device("cpu"))
    engines.apply()
    assume_routing(engines.dispatchers, cut.routing)


def block_names(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Names of the repeated blocks, in order; of several lists of blocks, of the one with the most parameters.

    Args:
        module: whole.
        patterns: of the blocks; ``None``: they are found.
    """
    found = find_blocks(module, patterns)
    runs: dict[str, list[str]] = {}
    for name in found:
        runs.setdefault(name.rpartition(".")[0], []).append(name)
    if not runs:
        return []
    # Of several lists the heaviest is the model; the others count with what is outside.
    weight = {parent: sum(count_parameters(found[name]) for name in names) for parent, names in runs.items()}
    return runs[max(weight, key=lambda parent: weight[parent])]


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
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


class Last:
    """What the last block that ran has returned."""

    def __init__(self) -> None:
        self.output: Any = None

    def remember(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep it; a forward hook of the blocks that run."""
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __deepcopy__(self, memo: Any) -> Last:
        return self


def with_blocks(module: LightningModule, names: Sequence[str], active: Collection[int], last: Last) -> LightningModule:
    """A copy of a module with some of its blocks; the others are shells without parameters.

    Args:
        module: whole.
        names: of all its blocks.
        active: places of those that the copy has.
        last: what the shells hand on.
    """
    memo: dict[int, Any] = {}
    for index, name in enumerate(names):
        if index not in active:
            block = module.get_submodule(name)
            memo[id(block)] = _shell(block, last)
    trainer, module._trainer = module._trainer, None
    try:
        return copy.deepcopy(module, memo)
    finally:
        module._trainer = trainer


def _shell(block: nn.Module, last: Last) -> nn.Module:
    """A block of the same class and settings without parameters, that hands on what the last real one gave."""
    shell = copy.copy(block)
    shell.__dict__ = {**block.__dict__}
    for kind in ("_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        shell.__dict__[kind] = {}
    shell.__dict__["forward"] = last
    return shell


def pass_of(two: CountedRun, three: CountedRun, representatives: Sequence[int]) -> PassCost:
    """From runs with two and with three samples.

    Args:
        two, three: the runs.
        representatives: for each kind of block, the place of the one that stands for it.
    """

    def grown(value: Callable[[CountedRun], float]) -> Bytes:
        first, second = value(two), value(three)
        return Bytes(3 * first - 2 * second, second - first)

    def part(phase: Any) -> ModelPart:
        forward, backward = three.counter.forward, three.counter.backward
        return ModelPart(
            flops=forward.flops[phase] / 3,
            backward=backward.flops[phase] / 3,
            kept=grown(lambda run: run.kept.get(phase, 0)),
            sent=_of_one(three.sent.get(phase, {})),
            sent_forward=_of_one(three.sent_forward.get(phase, {})),
            outputs=grown(lambda run: run.outputs.get(phase, 0)),
            calls=forward.calls[phase],
            backward_calls=backward.calls[phase],
            moved=grown(lambda run: run.counter.forward.moved[phase]),
            backward_moved=grown(lambda run: run.counter.backward.moved[phase]),
        )

    blocks = tuple(part(place) for place in representatives)
    before, after, through = part(BEFORE), part(AFTER), part(BEFORE).kept
    for place, block in two.blocks:
        through = through + part(place).kept
        alike = _stands_for(block, two.blocks, representatives)
        # What the first and the last block do besides belongs to what is before and after them.
        if place != alike and place == two.blocks[0][0]:
            before = before.with_excess(part(place), part(alike))
        elif place != alike and place == two.blocks[-1][0]:
            after = after.with_excess(part(place), part(alike))
    at = representatives[0] if representatives else -1
    return PassCost(
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
