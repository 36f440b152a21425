"""Costs of one pass of a module: operations, bytes kept for backward, bytes sent.

No formula about transformers: the module's own `training_step` runs forward and backward on fake tensors (torch's
`FakeTensorMode`), cut by the engines of a run, over torch's fake process group. Counted are:

- operations, by torch's table (`torch.utils.flop_counter`),
- live storages, from allocation to the last reference, by block,
- traffic along the tensor and the context axis.

Of equal blocks one runs and is multiplied, so 80 layers take as long as one. Runs with two and three samples separate
what grows with the batch from what does not.
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

from trainwright.core.failures.error_text import named_line
from trainwright.core.layout import Layout
from trainwright.core.lightning_internals import _DtypeContextManager
from trainwright.core.torch_internals import FakeTensorMode
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.planning.model import fake_run
from trainwright.planning.model.counted_run import AFTER, BEFORE, CountedRun
from trainwright.planning.model.experts import assume_routing
from trainwright.planning.time.cost import Bytes, ModelCut, ModelPart, PassCost
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.communication.meter import Sent
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.plan.blocks import checkpoint_activations, count_parameters, find_blocks

# Attributes in which equal blocks may differ: their index in the model.
_PLACE = re.compile(r"(^|_)(idx|index|layer_id|layer_number|layer_idx|depth|name)$")
# Largest parameters, bytes, of a module that reads values and so runs with real tensors.
_REAL_BYTES = 2**29
# A module, its running blocks with their indices, a batch, and the layout for which the module is cut.
_Sample = tuple[LightningModule, list[tuple[int, nn.Module]], Any, Layout]


class ModelFacts:
    """Costs of a module, measured on demand.

    Args:
        module: whole, on the meta device.
        batch: a batch of the data module.
        samples: number of its samples.
        precision: of the group ``precision``.
        plan: parts of the model's plan from the configuration (``strategy.plan``).
        blocks: patterns of the repeated blocks; ``None``: found automatically.
        real: builds the module with memory on the CPU, for a module that reads values; ``None``: not possible.

    Attributes:
        blocks: names of the repeated blocks, in order.
        kinds: index into :attr:`PassCost.blocks`, for each block.
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
        self._approximate: dict[ModelCut, PassCost] = {}
        # Whether the step runs with values: tried in this order until one works.
        fits = real is not None and sum(parameter.nbytes for parameter in module.parameters()) <= _REAL_BYTES
        self._ways = (False, True) if fits else (False,)

    def of(self, cut: ModelCut) -> PassCost:
        """Return the cost of a pass on one rank.

        Raises:
            FactsError: if the module cannot be run.
        """
        if cut not in self._passes:
            self._passes[cut] = self._measure(cut)
        return self._passes[cut]

    def approximate(self, cut: ModelCut) -> PassCost:
        """Approximate :meth:`of` by combining passes split along one axis at a time, which is faster.

        Raises:
            FactsError: if the module cannot be run.
        """
        for known in (self._passes, self._approximate):
            if cut in known:
                return known[cut]
        plain = replace(cut, tensor=1, context=1, sequence_parallel=False, loss_parallel=False)
        if cut.checkpointing == "full":
            found = self.approximate(replace(cut, checkpointing="none")).checkpointed()
        elif cut.expert > 1 and cut.tensor * cut.context > 1:
            dense = replace(plain, expert=1)
            found = self.approximate(replace(cut, expert=1)).over(self.of(dense), self.of(plain))
        elif cut.tensor > 1 and cut.context > 1:
            tensor, context = replace(cut, context=1), replace(plain, context=cut.context)
            found = self.of(tensor).over(self.of(plain), self.of(context))
        else:
            return self.of(cut)
        self._approximate[cut] = found
        return found

    def reduced(self, each: int = 2) -> tuple[LightningModule, list[str]]:
        """Return the module with ``each`` blocks of each kind, and their names; checks of these hold for all blocks.

        The other blocks become shells without parameters.
        """
        kept: list[int] = []
        for kind in sorted(set(self.kinds)):
            kept += [index for index, other in enumerate(self.kinds) if other == kind][:each]
        return with_blocks(self.module, self.blocks, kept, LastOutput()), [self.blocks[index] for index in sorted(kept)]

    def _resized(self, samples: int, with_values: bool) -> Any:
        """Return a batch of another size; one without values has no memory in a fake mode."""

        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            has_samples = leaf.shape[:1] == (self._samples,)
            if with_values:
                return leaf[torch.arange(samples) % self._samples] if has_samples else leaf
            shape = (samples, *leaf.shape[1:]) if has_samples else leaf.shape
            return torch.zeros(shape, dtype=leaf.dtype, device="cpu")

        return pytree.tree_map(like, self._batch)

    def _measure(self, cut: ModelCut) -> PassCost:
        first: Exception | None = None
        for with_values in self._ways:
            try:
                measured = self._twice(cut, with_values)
            except Exception as error:  # the user's code can raise anything on tensors without values
                first = first or error
            else:
                self._ways = (with_values,)
                return measured
        assert first is not None
        raise fake_run.FactsError(
            f"training_step of {type(self.module).__name__} cannot be run without a Trainer and without memory, so "
            f"its cost is unknown: {named_line(first)}"
        ) from first

    def _twice(self, cut: ModelCut, with_values: bool) -> PassCost:
        # Not one sample: views that are contiguous only for one sample keep larger storages alive.
        two, three = (self._run(cut, samples, with_values) for samples in (2, 3))
        return pass_of(two, three, self._representatives([place for place, _ in two.blocks]), self.kinds)

    def _run(self, cut: ModelCut, samples: int, with_values: bool) -> CountedRun:
        with self._prepared(cut, samples, with_values) as (module, blocks, batch, layout):
            return CountedRun(module, blocks, batch, layout, self.precision)

    @contextlib.contextmanager
    def _prepared(self, cut: ModelCut, samples: int, with_values: bool) -> Iterator[_Sample]:
        """Provide the module with its running blocks, cut and ready to run; in a fake mode unless it has values."""
        active = self._active(cut)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(fake_run.quiet())
            shard = cut.expert // math.gcd(cut.expert, cut.context)
            layout = Layout(shard=shard, context=cut.context, tensor=cut.tensor, expert=cut.expert)
            if layout.world_size > 1:
                stack.enter_context(fake_run.fake_world(layout.world_size))
            if not with_values:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            last = LastOutput()
            module = self._sample(active, last, with_values)
            batch = self._resized(samples, with_values)
            if self.precision == "bf16-true":
                stack.enter_context(_DtypeContextManager(torch.bfloat16))
            if layout.world_size > 1:
                _cut_module(module, layout, cut, {**self._plan, "blocks": [self.blocks[i] for i in sorted(active)]})
            chosen = [module.get_submodule(self.blocks[i]) for i in sorted(active)]
            checkpoint_activations(module, cut.checkpointing, chosen, None)
            for block in chosen:
                block.register_forward_hook(last.remember)  # after the engines' own, which exchange outputs
            yield module, list(zip(sorted(active), chosen, strict=True)), batch, layout

    def _active(self, cut: ModelCut) -> set[int]:
        """Return the indices of running blocks: one per kind; with sliced activations also the first and the last."""
        chosen = {self.kinds.index(kind) for kind in set(self.kinds)}
        if not self.blocks or (cut.context == 1 and not (cut.sequence_parallel and cut.tensor > 1)):
            return chosen
        ends = {0, len(self.blocks) - 1}
        between = {
            kind: [i for i, k in enumerate(self.kinds) if k == kind and i not in ends] for kind in set(self.kinds)
        }
        return ends | {indices[0] for indices in between.values() if indices} | (chosen - ends)

    def _representatives(self, active: Sequence[int]) -> list[int]:
        """Return for each kind the index of its representative block, an inner one if possible."""
        return [
            min((i for i in active if self.kinds[i] == kind), key=lambda i: (i in (active[0], active[-1]), i))
            for kind in sorted(set(self.kinds))
        ]

    def _sample(self, active: set[int], last: LastOutput, with_values: bool) -> LightningModule:
        """Return the module with only the active blocks; the others forward the output of the last active one."""
        module = self._real() if with_values and self._real is not None else self.module
        sample = with_blocks(module, self.blocks, active, last)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else None
        if not with_values:
            fake_run.give_storage(sample, dtype)
        elif dtype is not None:
            sample.to(dtype)
        sample.train()
        fake_run.without_trainer(sample)
        return sample


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
    """Return the names of the repeated blocks in order; of several lists of blocks, the one with the most parameters.

    Args:
        module: whole.
        patterns: of the blocks; ``None``: found automatically.
    """
    found = find_blocks(module, patterns)
    runs: dict[str, list[str]] = {}
    for name in found:
        runs.setdefault(name.rpartition(".")[0], []).append(name)
    if not runs:
        return []
    # The other lists count as parts outside of the blocks.
    weight = {parent: sum(count_parameters(found[name]) for name in names) for parent, names in runs.items()}
    return runs[max(weight, key=lambda parent: weight[parent])]


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
    """Return a kind number per block; equal blocks have the same classes, shapes and settings."""
    known: dict[tuple[Any, ...], int] = {}
    return [known.setdefault(_signature(block), len(known)) for block in blocks]


def _signature(block: nn.Module) -> tuple[Any, ...]:
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


class LastOutput:
    """Output of the last block that ran."""

    def __init__(self) -> None:
        self.output: Any = None

    def remember(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store an output; a forward hook of the running blocks."""
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __deepcopy__(self, memo: Any) -> LastOutput:
        return self


def with_blocks(
    module: LightningModule, names: Sequence[str], active: Collection[int], last: LastOutput
) -> LightningModule:
    """Return a copy of a module with some of its blocks; the others are shells without parameters.

    Args:
        module: whole.
        names: of all its blocks.
        active: indices of the blocks to copy.
        last: output that the shells return.
    """
    memo: dict[int, Any] = {}
    for index, name in enumerate(names):
        if index not in active:
            block = module.get_submodule(name)
            memo[id(block)] = _shell(block, last)
    with with_attributes(module, _trainer=None):
        return copy.deepcopy(module, memo)


def _shell(block: nn.Module, last: LastOutput) -> nn.Module:
    """Return a block of the same class and settings without parameters, which returns the last output."""
    shell = copy.copy(block)
    shell.__dict__ = {**block.__dict__}
    for kind in ("_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        shell.__dict__[kind] = {}
    shell.__dict__["forward"] = last
    return shell


def pass_of(two: CountedRun, three: CountedRun, representatives: Sequence[int], kinds: Sequence[int]) -> PassCost:
    """Return the cost of a pass from runs with two and three samples.

    Args:
        two, three: the runs.
        representatives: for each kind of block, the index of its representative.
        kinds: of all blocks.
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
    for place, _ in two.blocks:
        through = through + part(place).kept
        alike = representatives[kinds[place]]
        # Extra costs of the first and the last block count with the parts before and after.
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


def _of_one(sent: Mapping[tuple[str, str], Sent]) -> dict[tuple[str, str], Sent]:
    """Return the traffic per sample of a micro-batch of three samples."""
    return {key: Sent(each.calls, each.bytes / 3, each.least / 3) for key, each in sent.items()}
