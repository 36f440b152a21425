"""NaN and infinity in losses and gradients: detection in one pass, and their source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Ranks named in a message.
_SHOWN = 8


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor (of a sparse one, its values)."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part._values() if part.is_sparse else part


@torch.no_grad()
def any_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any element is NaN or infinite, else 0.0: a scalar on ``device``, without synchronization."""
    parts = [part for part in map(local_part, tensors) if part.numel()]
    if not parts:
        return torch.zeros((), device=device)
    if all(part.device.type == "cpu" for part in parts) and _stacked(parts, 2.0, device).isfinite().all():
        return torch.zeros((), device=device)  # several times as fast on a CPU as what follows
    # The maximum absolute value: unlike a sum of squares it does not overflow.
    return (~_stacked(parts, float("inf"), device).isfinite()).any().float()


def _stacked(parts: list[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the norm of each tensor, ``(len(parts),)``, on ``device``."""
    norms = list(torch._foreach_norm(parts, order))
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float32) for norm in norms]
    return torch.stack(norms).to(device)


@dataclass(frozen=True)
class NonfiniteReport:
    """One rank's view of the source of NaN or infinity; exchanged between ranks.

    Args:
        rank: global rank.
        data_rank: data-parallel rank.
        stage: pipeline stage, 0 without one.
        micro_batch: index of the first micro-batch with a bad loss; ``None``: none.
        position: index, in module order, of the last parameter with a bad gradient: the first in backward; -1: none.
        name: of that parameter.
        count: parameters with a bad gradient.
    """

    rank: int
    data_rank: int
    stage: int
    micro_batch: int | None
    position: int
    name: str
    count: int


def find_gradient(gradients: Iterable[tuple[str, Tensor]]) -> tuple[int, str, int]:
    """Return position and name of the last parameter with a bad gradient, and their count; ``(-1, "", 0)``: none."""
    position, name, count = -1, "", 0
    for index, (each, gradient) in enumerate(gradients):
        if not bool(local_part(gradient).isfinite().all()):
            position, name, count = index, each, count + 1
    return position, name, count


def first_bad(losses: Sequence[Tensor]) -> int | None:
    """Return the index of the first loss that is NaN or infinite."""
    return next((index for index, loss in enumerate(losses) if not bool(loss.isfinite().all())), None)


def describe(found: Sequence[NonfiniteReport]) -> str:
    """Describe the source, given one report per rank in order; a bad loss first, since it makes all gradients bad."""
    of_loss = [each for each in found if each.micro_batch is not None]
    of_gradient = [each for each in found if each.position >= 0]
    texts = []
    if of_loss:
        # Ranks of a pipeline share the loss of their samples; only one of them has computed it.
        by_data: dict[int, list[NonfiniteReport]] = {}
        for each in of_loss:
            by_data.setdefault(each.data_rank, []).append(each)
        places = [
            f"data rank {data_rank} ({_ranks(reports)}, micro-batch {reports[0].micro_batch})"
            for data_rank, reports in sorted(by_data.items())
        ]
        texts.append(f"the loss is not finite on {', '.join(places)}")
    if of_gradient:
        first = max(of_gradient, key=lambda each: (each.stage, each.position, -each.rank))
        more = max(each.count for each in of_gradient) - 1
        rest = f", and of {more} more" if more else ""
        texts.append(f"the gradient of {first.name} is not finite, the first in backward{rest} ({_ranks(of_gradient)})")
    return "; ".join(texts) or "a number was not finite, but no longer is"


def _ranks(found: Sequence[NonfiniteReport]) -> str:
    ranks = ", ".join(str(each.rank) for each in found[:_SHOWN])
    ranks += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"rank {ranks}" if len(found) == 1 else f"ranks {ranks}"
