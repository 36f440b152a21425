"""How a strategy trains, as far as loops and callbacks must know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """Facts about how a strategy trains. The defaults hold for Lightning's own strategies, too.

    Args:
        backward_in_step: ``training_step`` runs backward too, so that gradients must be zeroed before it.
        forward_is_collective: a forward pass needs all ranks, so that none may leave one out.
        steps_are_collective: all ranks are at the same optimizer step, so that something may run a collective at every
            step. ``False``: ranks step by themselves, and only where :meth:`Peers.meet` has brought them together may a
            collective run.
        averages_every_step: each step is made with the mean gradient of all data ranks, so that they may share it
            unequally.
        holds_step_gradients: ranks hold, split or whole, the gradients that a step is made with (``named_gradients``).
        gradients_agree: all ranks have the same averaged gradients, so that each sees what all see.
        weighs_micro_batches: a strategy that runs backward itself weighs each of its micro-batches by tokens.
        leases_samples: what becomes of the chunks of samples of a rank that died, where ranks lease them chunk by
            chunk, so that a fast one reads more: ``"at_least_once"`` or ``"at_most_once"``. ``None``: samples are dealt
            in equal shares.
        joins: this rank was started anew while the others train. It resumes from a state that they give it; ``fit``
            learns so by ``ckpt_path=PENDING`` (:data:`~trainwright.checkpoint.memory.held.PENDING`).
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
    """Return the traits of a strategy; the defaults for one of Lightning's own."""
    found: Traits = getattr(strategy, "traits", _PLAIN)
    return found


_PLAIN = Traits()
