"""Facts about a strategy that loops and callbacks need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """Facts about how a strategy trains. The defaults hold for Lightning's own strategies.

    Args:
        backward_in_step: ``training_step`` also runs backward, so that gradients must be zeroed before it.
        forward_is_collective: a forward pass needs all ranks, so that none may skip one.
        steps_are_collective: all ranks are at the same optimizer step, so that any step may run a collective.
            ``False``: ranks step independently, and collectives may only run right after :meth:`Peers.meet`.
        averages_every_step: each step uses the mean gradient of all data ranks, so that they may share samples
            unequally.
        holds_step_gradients: ranks hold, sharded or whole, the gradients of a step (``named_gradients``).
        gradients_agree: all ranks have the same averaged gradients.
        weighs_micro_batches: a strategy that runs backward itself weighs each of its micro-batches by tokens.
        leases_samples: whether chunks of samples are leased to ranks, so that fast ones read more, and what happens to
            those of a rank that died: ``"at_least_once"`` or ``"at_most_once"``. ``None``: samples are dealt in equal
            shares.
        joins: this rank was restarted while the others train. It resumes from their state; ``fit`` gets
            ``ckpt_path=PENDING`` (:data:`~trainwright.checkpoint.memory.snapshots.PENDING`).
    """

    backward_in_step: bool = False
    forward_is_collective: bool = False
    steps_are_collective: bool = True
    averages_every_step: bool = True
    holds_step_gradients: bool = True
    gradients_agree: bool = False
    weighs_micro_batches: bool = False
    leases_samples: str | None = None
    joins: bool = False


def traits_of(strategy: Any) -> Traits:
    """Return the traits of a strategy; the defaults for Lightning's own."""
    found: Traits = getattr(strategy, "traits", _PLAIN)
    return found


_PLAIN = Traits()
