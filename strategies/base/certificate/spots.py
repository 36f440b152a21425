"""Spot checks: which later batches of a run are compared with the module as written, within a budget of time.

Every rank decides the same without a collective of its own, from the seed, the step, and values agreed at earlier
checks and where ranks agree on patterns (:class:`Patterns`).
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.strategies.base.certificate.compare import Comparison
from trainwright.strategies.base.certificate.trial import copied
from trainwright.strategies.contract.batch_digest import structure_of

# Share of the time of a run; that of the first steps may be spent at any time in them.
SHARE, STEPS = 0.005, 1000
# New structures that are compared whatever it costs; steps that the module as written is expected to take.
_ALWAYS, _EXPECTED = 2, 2.0
# Reasons of checks.
FIRST, STRUCTURE = "first batch", "new structure"


@dataclass(frozen=True)
class Check:
    """A comparison with the module as written.

    Args:
        step: optimizer steps before it.
        reason: of the comparison.
        outcome: its results.
    """

    step: int
    reason: str
    outcome: Comparison

    def summary(self) -> str:
        """Summarize the check in one line."""
        when = "" if self.reason == FIRST else f"after step {self.step} ({self.reason}): "
        return when + (self.outcome.summary() if self.outcome.holds else self.outcome.problem())

    def record(self) -> dict[str, Any]:
        """Return plain values for files."""
        return {"step": self.step, "reason": self.reason, **self.outcome.record()}


class SpotChecks:
    """Steps before which a run is compared again: drawn ones, and those with a batch of a new structure.

    One step is drawn of each ``[2**k, 2**(k + 1))``. Checks take at most 0.5 % of the time of the run, or of its first
    1,000 steps; in these, drawn checks may use it in proportion to the logarithm of the steps. The first two new
    structures are always compared.

    Args:
        seed: of the run, equal on all ranks.
        step: optimizer steps before this run.
        known: facts about batches that were compared before.
        cost: seconds of a check besides the layout's run; 0: unknown.

    Attributes:
        known: facts about compared batches, equal on all ranks.
        new: copy of a batch of this rank with other facts, and the optimizer steps before it; ``None``: none.
    """

    def __init__(self, seed: int, step: int, known: Iterable[str] = (), cost: float = 0.0) -> None:
        self.known = set(known)
        self._seed, self._first, self._step = seed, step, -1
        self._drawn = drawn_after(seed, step)
        self.new: tuple[Any, int] | None = None
        self._allowed = _ALWAYS
        self._cost, self._spent, self._pace, self._began = cost, 0.0, 0.0, 0.0
        self._durations: deque[float] = deque(maxlen=31)

    def see(self, batch: Any, step: int, reads_device: bool) -> None:
        """Keep a copy of the batch if its structure is new.

        Args:
            batch: of this rank.
            step: optimizer steps before it.
            reads_device: whether to read values on an accelerator, which waits for it.
        """
        if self.new is None and self._allows(step, is_new=True) and self._facts(batch, reads_device):
            self.new = copied(batch), step

    def _facts(self, batch: Any, reads_device: bool) -> set[str]:
        return {*structure_of(batch, lambda tensor: reads_device or tensor.device.type == "cpu")} - self.known

    def next_step(self, step: int) -> bool:
        """Return whether a batch is the first of an optimizer step."""
        if step == self._step:
            return False
        now = time.perf_counter()
        self._durations.append(now - (self._began or now))
        self._step, self._began = step, now
        return True

    def agree(self, strategy: Any, *flags: bool) -> list[bool]:
        """Return whether each flag is true on any rank, and agree on the time of a step. A collective."""
        *found, pace = largest_of_ranks(strategy, *flags, -median(self._durations or [0.0]))
        self._pace = -pace
        return [bool(flag) for flag in found]

    def is_drawn(self, step: int) -> bool:
        """Return whether to compare before ``step``; the same on every rank."""
        if step < self._drawn:
            return False
        self._drawn = drawn_after(self._seed, step)
        return self._allows(step, is_new=False)

    def _allows(self, step: int, is_new: bool) -> bool:
        steps = step - self._first
        share = SHARE * max(STEPS, steps) * (1.0 if is_new else min(1.0, math.log(steps + 1, STEPS)))
        expected = self._pace + (self._cost or _EXPECTED * self._pace)
        return self._spent + expected < share * self._pace or (is_new and self._allowed > 0)

    def learn(self, strategy: Any, batch: Any) -> list[str]:
        """Count the structure of a compared batch as known, and return what is new on any rank. A collective."""
        own, self.new = sorted(self._facts(batch, True)), None
        found = all_gather_values(own, device=strategy.root_device)
        new = sorted({fact for facts in found for fact in facts} - self.known)
        self.known.update(new)
        return new

    def spend(self, outcome: Comparison, is_new: bool) -> None:
        """Count a check, whose seconds are those of the slowest rank."""
        self._allowed -= is_new and self._allowed > 0
        self._spent, self._cost = self._spent + outcome.seconds, outcome.written_seconds
        self._began = time.perf_counter()


def largest_of_ranks(strategy: Any, *values: float) -> list[float]:
    """Return the largest of each value on any rank. A collective."""
    found = torch.tensor(values, dtype=torch.float64, device=strategy.root_device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return list(found.tolist())


def drawn_after(seed: int, step: int) -> int:
    """Return the first drawn step after ``step``: one of each ``[2**k, 2**(k + 1))``, uniform in its logarithm."""
    k = max(step, 2).bit_length() - 1
    while (drawn := int(2 ** (k + random.Random(f"{seed} {k}").random()))) <= step:  # noqa: S311
        k += 1
    return drawn


# Optimizer steps that are watched: the first ones, then one of so many, and the first of an epoch.
_ALL, _ONE_OF = 16, 16
# Certificates after the first; the batch after a change need not repeat it, and some modules never stop changing.
_MOST = 16
_FACTORS = ("MulBackward0", "DivBackward0")


class Patterns:
    """Patterns of the losses of a run: those of certified steps, and those seen later.

    Attributes:
        certificates: how many certificates were made for new patterns.
        is_watching: whether the present step is watched.
    """

    def __init__(self) -> None:
        self.certificates = 0
        self._certified: set[int] = set()
        self._new: set[int] = set()
        self.is_watching = self._is_learning = self._has_learned = False
        self._windows = 0

    @property
    def is_exhausted(self) -> bool:
        """True if no further certificate is made for a new pattern."""
        return self.certificates >= _MOST

    def learn(self) -> None:
        """Count the patterns up to the end of the next step as certified."""
        self.is_watching = self._is_learning = True

    def see(self, loss: Tensor) -> None:
        """Record the pattern of a loss, before its backward."""
        if not self.is_watching or self.is_exhausted or loss.grad_fn is None:
            return
        pattern = pattern_of(loss.grad_fn)
        if self._is_learning:
            self._certified.add(pattern)
        elif pattern not in self._certified:
            self._new.add(pattern)

    @property
    def has_new(self) -> bool:
        """True if a pattern was seen that no certificate covers."""
        return not (self.is_exhausted or self._has_learned or self._new <= self._certified)

    def next_step(self, batch_idx: int) -> bool:
        """Return whether ranks must agree on new patterns before the first batch of a step; the same on every rank.

        Args:
            batch_idx: index of the batch in the epoch.
        """
        agrees, self._has_learned, self._is_learning = self.is_watching, self._is_learning, False
        self._windows += 1
        self.is_watching = self._windows <= _ALL or self._windows % _ONE_OF == 0 or batch_idx == 0
        return agrees


def pattern_of(node: Any) -> int:
    """Return a digest, within this process, of the graph behind ``node``: its functions in depth-first order.

    Without the factors of the loss, which smaller last batches and windows have.
    """
    while node.name() in _FACTORS and len(inner := [each for each, _ in node.next_functions if each is not None]) == 1:
        node = inner[0]
    names, seen, stack = [], {node}, [node]
    while stack:
        names.append((node := stack.pop()).name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return hash(tuple(names))
