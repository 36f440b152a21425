"""This rank's parts of parameters, by the names of the unmodified module; gathering and splitting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.plan.slots import Slot
from trainwright.strategies.state.wholes import part_like, whole_on_device


@dataclass(frozen=True)
class Share:
    """This rank's part of a parameter.

    Args:
        slots: where the unmodified module registers it; several if tied.
        shape: of the whole.
        part: as registered on this rank, or a placeholder of its dtype and device on other pipeline stages.
        is_held: whether this rank holds any of it.
        cut: split along axes other than the data axes; ``None``: none.
    """

    slots: Sequence[Slot]
    shape: torch.Size
    part: Tensor
    is_held: bool = True
    cut: Cut | None = None

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all of it."""
        return self.is_held and self.cut is None and not isinstance(self.part, DTensor)


class ModuleParts:
    """Gathering and splitting of a module's parameters.

    Args:
        shares: name of each parameter -> this rank's part, in the order of the unmodified module, on every rank.
        pipeline: group of this rank's pipeline; ``None``: one stage.
        owners: name -> pipeline index of a rank that holds it; missing: 0.
        device: where collectives run.
    """

    def __init__(
        self,
        shares: Mapping[str, Share],
        pipeline: dist.ProcessGroup | None,
        owners: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.shares = shares
        self._pipeline, self._owners, self.device = pipeline, owners, device
        # After fit, in host memory.
        self._home = next((share.part.device for share in shares.values() if share.is_held), device)

    @property
    def has_stages(self) -> bool:
        """True if other ranks hold other parameters."""
        return self._pipeline is not None

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds the whole parameter."""
        return self._pipeline is None and self.shares[name].is_whole

    @torch.no_grad()
    def whole(self, name: str, part: Tensor | None) -> Tensor:
        """Gather a parameter, or its gradient, into new memory. A collective.

        Args:
            name: of the parameter.
            part: this rank's part; ignored if it holds none.
        """
        share = self.shares[name]
        joined = self._joined(share, part) if share.is_held and part is not None else None
        if self._pipeline is not None:
            owner = self._owners.get(name, 0)
            if dist.get_rank(self._pipeline) != owner:
                dtype = share.part.dtype if part is None else part.dtype
                joined = torch.empty(share.shape, dtype=dtype, device=self.device)
            assert joined is not None
            joined = joined.to(self.device).contiguous()
            dist.broadcast(joined, group=self._pipeline, group_src=owner)
        assert joined is not None
        return joined.to(share.part.device if share.is_held else self._home)

    def _joined(self, share: Share, part: Tensor) -> Tensor:
        """Gather the whole from the ranks of this stage."""
        own = local_tensor(part)
        whole = whole_on_device(part)
        if share.cut is not None:
            whole = share.cut.whole(whole.to(self.device))
        shares_memory = whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return whole.clone() if shares_memory else whole

    def part(self, name: str, whole: Tensor, like: Tensor | None = None) -> Tensor:
        """Return this rank's part of a whole tensor.

        Args:
            name: of the parameter.
            whole: the parameter or its gradient.
            like: a tensor with the same sharding; ``None``: the parameter.
        """
        share = self.shares[name]
        like = share.part if like is None else like
        part = whole if share.cut is None else share.cut.part(whole)
        return part_like(part, like) if isinstance(like, DTensor) else part

    def facts(self, trained: Iterable[str], with_gradient: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return which parameters are trained and which have a gradient on any stage. A collective of stages.

        Args:
            trained: names of this rank's trained parameters.
            with_gradient: names of this rank's parameters with a gradient.
        """
        found = set(trained), set(with_gradient)
        if self._pipeline is None:
            return found
        names = list(self.shares)
        flags = torch.tensor([[name in each for name in names] for each in found], dtype=torch.int32)
        flags = flags.to(self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._pipeline)
        trained, with_gradient = ({n for n, flag in zip(names, row, strict=True) if flag} for row in flags.tolist())
        return trained, with_gradient
