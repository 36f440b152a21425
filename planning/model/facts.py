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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainwright.core.layout import Layout
from trainwright.planning.model.blocks import Last, block_names, kinds_of, with_blocks
from trainwright.planning.model.counted_run import CountedRun
from trainwright.planning.model.experts import assume_routing
from trainwright.planning.model.per_sample import pass_of
from trainwright.planning.model.without_memory import (
    FactsError,
    default_dtype,
    fake_tensors,
    fake_world,
    give_storage,
    quiet,
    without_trainer,
)
from trainwright.planning.time.cost import Cut, Pass
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.plan.blocks import checkpoint_activations

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
        self.blocks = block_names(module, found)
        self.kinds = kinds_of([module.get_submodule(name) for name in self.blocks])
        self._passes: dict[Cut, Pass] = {}
        self._near: dict[Cut, Pass] = {}
        # Whether the step runs on tensors without values; None: it was not tried yet.
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

    def _twice(self, cut: Cut, with_values: bool) -> Pass:
        # Not with one: views that are contiguous for one sample alone hold on to more than they show.
        two, three = (self._run(cut, samples, with_values) for samples in (2, 3))
        active = [place for place, _ in two.blocks]
        return pass_of(two, three, self._representatives(active))

    def _run(self, cut: Cut, samples: int, with_values: bool) -> CountedRun:
        with self._prepared(cut, samples, with_values) as (module, blocks, batch, layout):
            return CountedRun(module, blocks, batch, layout, self.precision)

    @contextlib.contextmanager
    def _prepared(self, cut: Cut, samples: int, with_values: bool) -> Iterator[_Sample]:
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


def _cut_module(module: LightningModule, layout: Layout, cut: Cut, plan: Mapping[str, Any]) -> None:
    options = EngineOptions(
        sequence_parallel=cut.sequence_parallel and cut.tensor > 1,
        loss_parallel=cut.loss_parallel and cut.tensor > 1,
        attention=cut.attention,
        balance=cut.balance,
        plan=dict(plan),
    )
    engines = Engines(module, layout, LayoutGroups(layout, "cpu"), options, torch.device("cpu"))
    engines.apply()
    assume_routing(engines.dispatchers, cut.routing)
