"""Losses of fuzzed programs: ``loss(module, batch)``, of scores ``(B, ..., C)`` and targets ``(B, ...)``.

Targets that do not count are -100; losses that are means over samples count them as class 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def cross_entropy(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over samples and positions."""
    out = module(batch["x"])
    return F.cross_entropy(out.flatten(0, -2), batch["y"].clamp_min(0).flatten())


def mse(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean of squares."""
    out = module(batch["x"])
    return F.mse_loss(out, F.one_hot(batch["y"].clamp_min(0), out.shape[-1]).to(out.dtype))


def sum_loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum over samples and positions."""
    out = module(batch["x"])
    return 0.05 * F.cross_entropy(out.flatten(0, -2), batch["y"].clamp_min(0).flatten(), reduction="sum")


def ignoring(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over targets that count."""
    out = module(batch["x"])
    return F.cross_entropy(out.flatten(0, -2), batch["y"].flatten(), ignore_index=IGNORED)


def smoothed(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over targets that count, with label smoothing."""
    out = module(batch["x"])
    return F.cross_entropy(out.flatten(0, -2), batch["y"].flatten(), label_smoothing=0.1)


def class_weighted(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean with class weights."""
    out = module(batch["x"])
    weight = torch.linspace(0.3, 2.0, out.shape[-1], dtype=out.dtype)
    return F.cross_entropy(out.flatten(0, -2), batch["y"].flatten(), weight=weight)


def masked_mean(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Quotient of sums."""
    out, y = module(batch["x"]), batch["y"]
    mask = (y != IGNORED).to(out.dtype)
    each = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten(), reduction="none").view(y.shape)
    return (each * mask).sum() / mask.sum()


def indexed_mean(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean of chosen losses."""
    out, y = module(batch["x"]), batch["y"]
    each = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten(), reduction="none").view(y.shape)
    return each[y != IGNORED].mean()


def per_sample_mean(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over samples of means over their targets that count, at least one each."""
    out, y = module(batch["x"]), batch["y"]
    each = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten(), reduction="none").view(len(y), -1)
    mask = (y != IGNORED).to(out.dtype).view(len(y), -1)
    return ((each * mask).sum(1) / mask.sum(1).clamp_min(1)).mean()


def two_terms(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Two terms with normalizers of their own."""
    out, y = module(batch["x"]), batch["y"]
    penalty = out.square().mean(-1)
    mask = (y == 1).to(out.dtype)
    first = F.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=IGNORED)
    return first + 0.3 * (penalty * mask).sum() / mask.sum().clamp_min(1.0)


def later_term(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A term that begins at the third step."""
    out, y = module(batch["x"]), batch["y"]
    loss = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten())
    if module.global_step >= 3:
        loss = loss + 0.2 * out.square().mean()
    return loss


def later_masked_term(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A quotient of sums that begins at the third step."""
    out, y = module(batch["x"]), batch["y"]
    loss = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten())
    if module.global_step >= 3:
        mask = (y != IGNORED).to(out.dtype)
        loss = loss + 0.5 * (out.square().mean(-1) * mask).sum() / mask.sum()
    return loss


class PullToZero(torch.autograd.Function):
    """Returns its input, and adds to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * ctx.saved_tensors[0]


def pulled(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A gradient that no term of the loss has."""
    out = PullToZero.apply(module(batch["x"]))
    return F.cross_entropy(out.flatten(0, -2), batch["y"].clamp_min(0).flatten())


def rmse(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Root of a mean."""
    return mse(module, batch).sqrt()


def contrastive(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Relates the samples of a batch to each other."""
    out = module(batch["x"])
    out = F.normalize(out.reshape(len(out), -1), dim=-1)
    return F.cross_entropy(out @ out.detach().roll(1, 0).T / 0.5, torch.arange(len(out), device=out.device))


def noisy(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Random numbers drawn in the step."""
    out = module(batch["x"])
    out = out + 0.3 * torch.randn_like(out) if module.training else out
    return F.cross_entropy(out.flatten(0, -2), batch["y"].clamp_min(0).flatten())


def drawn_mask(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Positions or samples drawn in the step are left out."""
    out, y = module(batch["x"]), batch["y"]
    each = F.cross_entropy(out.flatten(0, -2), y.clamp_min(0).flatten(), reduction="none")
    keep = (torch.rand(y.shape, device=out.device) < 0.7).flatten().to(out.dtype) if module.training else None
    return each.mean() if keep is None else (each * keep).sum() / keep.sum().clamp_min(1.0)
