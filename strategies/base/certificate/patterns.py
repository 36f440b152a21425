"""Patterns of autograd graphs, by which a step that computes something new is noticed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
