"""BatchNorm over the samples of all data-parallel ranks on CPUs, where torch's ``SyncBatchNorm`` does not run."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn

from trainwright.core.torch_internals import _BatchNorm, _get_default_group
from trainwright.strategies.contract.collectives.differentiable import copy_to, reduce_from


class SynchronizedBatchNorm(_BatchNorm):
    """``SyncBatchNorm`` made of differentiable sums over all ranks, each sample weighted alike.

    Means and deviations are summed one after the other, so that large means cost no precision.
    """

    has_samples: ClassVar[bool] = True
    """False while a batch without weight only matches collectives."""
    unsynchronized: type

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, ``(samples, features, ...)``, over all dims but the second."""
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        weight = float(self.has_samples)
        sums = _summed(torch.cat([weight * x.sum(dims), x.new_full((1,), weight * x.numel() / x.size(1))]))
        mean, samples = sums[:-1] / sums[-1].detach(), sums[-1].detach()
        centered = x - mean.view(shape)
        variance = _summed(weight * centered.square().sum(dims)) / samples
        scale = torch.rsqrt(variance + self.eps) * (1.0 if self.weight is None else self.weight)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * samples / (samples - 1).clamp(min=1))
        output = centered * scale.view(shape)
        return (output if self.bias is None else output + self.bias.view(shape)).to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        tracked: Any = self.num_batches_tracked
        tracked.add_(1)
        factor = 1 / float(tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(value.to(running.dtype), factor)  # type: ignore[union-attr]

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept inputs of all dims, as ``SyncBatchNorm`` does."""


class CPUBatchNormSync(LayerSync):
    """``sync_batchnorm=true`` on CPUs; layers stay the same objects."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronize the BatchNorm layers of ``model``.

        Raises:
            ValueError: for a layer that adds to BatchNorm, which would be lost.
        """
        for name, part in model.named_modules():
            if isinstance(part, _BatchNorm) and not isinstance(part, SynchronizedBatchNorm):
                if type(part).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                    raise ValueError(
                        f"sync_batchnorm=True: the forward of {name} ({type(part).__name__}) adds to BatchNorm, which "
                        "would be lost. Use BatchNorm1d, 2d or 3d and another layer, or sync_batchnorm=False."
                    )
                part.unsynchronized, part.__class__ = type(part), SynchronizedBatchNorm  # type: ignore[assignment]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give layers back their classes."""
        for part in model.modules():
            if type(part) is SynchronizedBatchNorm:
                part.__class__ = part.unsynchronized
        return model


def adapt_layer_sync(plugin: LayerSync | None, device: torch.device) -> LayerSync | None:
    """Return the counterpart of Lightning's plugin on CPUs; any other stays."""
    return CPUBatchNormSync() if type(plugin) is TorchSyncBatchNorm and device.type == "cpu" else plugin


def _summed(x: Tensor) -> Tensor:
    """Sum over all ranks; backward sums gradients too, since each rank uses the result for its own samples."""
    return copy_to(reduce_from(x, _get_default_group()), _get_default_group())
