"""NaN and infinity among losses and gradients: whether there are any, at the cost of one pass, and where they began."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Ranks that a message names.
_SHOWN = 8


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: numbers without structure (of a sparse one, those that are there)."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part._values() if part.is_sparse else part


@torch.no_grad()
def any_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """1.0 if any element is NaN or infinite, else 0.0; a scalar on ``device``, for which nobody waits."""
    parts = [local_part(tensor) for tensor in tensors]
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), device=device)
    if all(part.device.type == "cpu" for part in parts) and _stacked(parts, 2.0, device).isfinite().all():
        return torch.zeros((), device=device)  # several times as fast there as what follows
    # The largest absolute value of each: unlike a sum of squares it does not overflow where no element is infinite.
    return (~_stacked(parts, float("inf"), device).isfinite()).any().float()


def _stacked(parts: list[Tensor], order: float, device: torch.device) -> Tensor:
    """Norm of each tensor, ``(len(parts),)``, on ``device``."""
    norms = list(torch._foreach_norm(parts, order))
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float32) for norm in norms]
    return torch.stack(norms).to(device)


@dataclass(frozen=True)
class Blame:
    """What one rank knows of where NaN or infinity came from; sent from rank to rank.

    Args:
        rank: the rank.
        data_rank: which samples it reads.
        stage: of the pipeline it holds, 0 without one.
        micro_batch: index in the optimizer step of its first micro-batch whose loss is bad; ``None``: none is.
        position: of its last parameter, in the order of the module, that has a bad gradient: the first one that
            backward met; -1: none has.
        name: of that parameter.
        count: how many have.
    """

    rank: int
    data_rank: int
    stage: int
    micro_batch: int | None
    position: int
    name: str
    count: int


def find_gradient(gradients: Iterable[tuple[str, Tensor]]) -> tuple[int, str, int]:
    """Position and name of the last parameter with a bad gradient, and how many have one; ``(-1, "", 0)``: none."""
    position, name, count = -1, "", 0
    for index, (each, gradient) in enumerate(gradients):
        if not bool(local_part(gradient).isfinite().all()):
            position, name, count = index, each, count + 1
    return position, name, count


def first_bad(losses: Sequence[Tensor]) -> int | None:
    """Index of the first loss that is NaN or infinite."""
    return next((index for index, loss in enumerate(losses) if not bool(loss.isfinite().all())), None)


def in_words(found: Sequence[Blame]) -> str:
    """Where it began, from what all ranks know. A bad loss makes all gradients bad, so it is told first.

    Args:
        found: one of each rank, in order.
    """
    of_loss = [each for each in found if each.micro_batch is not None]
    of_gradient = [each for each in found if each.position >= 0]
    texts = []
    if of_loss:
        # Ranks of a pipeline share the loss of their samples; only one of them has computed it.
        by_data: dict[int, list[Blame]] = {}
        for each in of_loss:
            by_data.setdefault(each.data_rank, []).append(each)
        places = [
            f"data rank {data_rank} ({_ranks(blamed)}, micro-batch {blamed[0].micro_batch})"
            for data_rank, blamed in sorted(by_data.items())
        ]
        texts.append(f"the loss is not finite on {', '.join(places)}")
    if of_gradient:
        first = max(of_gradient, key=lambda each: (each.stage, each.position, -each.rank))
        more = max(each.count for each in of_gradient) - 1
        rest = f", and of {more} more" if more else ""
        texts.append(f"the gradient of {first.name} is not finite, the first in backward{rest} ({_ranks(of_gradient)})")
    return "; ".join(texts) or "a number was not finite, but no longer is"


def _ranks(found: Sequence[Blame]) -> str:
    ranks = ", ".join(str(each.rank) for each in found[:_SHOWN])
    ranks += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"rank {ranks}" if len(found) == 1 else f"ranks {ranks}"
