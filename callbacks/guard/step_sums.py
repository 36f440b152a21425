"""A few numbers of an optimizer step, averaged over all ranks: at once, or while backward runs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.groups import all_come

# How long a rank that sees something bad in what all ranks have alike waits for the others to see it. They have the
# same gradients at the same time.
_ALONE_SECONDS = 20.0


def mean_of_ranks(numbers: Tensor) -> Tensor:
    """The mean over all ranks, in place. A collective where there are several."""
    return EarlySum(numbers).mean()


class EarlySum:
    """Begins to add up numbers over all ranks, and gives their mean when it is asked for.

    Args:
        numbers: ``(n,)``, as many on every rank; where collectives run.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._work = dist.all_reduce(numbers, async_op=True) if several else None

    def mean(self) -> Tensor:
        """Wait until all ranks have told theirs."""
        if self._work is not None:
            self._work.wait()
            self._numbers /= dist.get_world_size()
            self._work = None
        return self._numbers


def refuse_alone(number: int, what: str) -> None:
    """Make sure that all ranks have found the same gradients to be bad. To be called by those that have.

    A rank that is alone with it must not take part in what all do about it, as the others will not.

    Args:
        number: of the call, the same on all ranks.
        what: was found, for the message.

    Raises:
        RuntimeError: if others have not.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not all_come(f"trainwright/bad_gradient/{number}", timedelta(seconds=_ALONE_SECONDS)):
        raise RuntimeError(
            f"{what}: a gradient is NaN or infinite on rank {dist.get_rank()}, and is not on others, which averaged "
            "the same ones with it. Either a hook changes gradients on this rank alone after they were averaged, "
            "or its memory or device is at fault: have it looked at. launch=resilient starts such a rank again"
        )
