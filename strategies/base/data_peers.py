"""State that data-parallel ranks share: buffers are made equal, learning rates compared."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.run.peers import Peers
from trainwright.strategies.contract.same_model import bit_sum, broadcast_from_first


class DataPeers(Peers):
    """Data-parallel ranks that make each step together.

    Their buffers, such as the running statistics of BatchNorm, follow the samples of each rank. Wherever a difference
    would be used (an evaluation, a checkpoint, the end of an epoch and of training), all get those of the first data
    rank, as DDP does in every forward.

    Args:
        strategy: of the run.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def meet(self) -> None:
        """See the base class."""
        self.share()

    def share(self) -> None:
        """Copy the buffers of the first data rank to all, and compare learning rates. A collective.

        Buffers of different shapes (caches of a rank's batches) stay.

        Raises:
            RuntimeError: on all data ranks, if learning rates differ.
        """
        strategy, ranks = self._strategy, self._strategy.ranks
        module, device = strategy.lightning_module, strategy.root_device
        is_alone = strategy.replicas.are_independent or ranks.num_data_ranks == 1 or not dist.is_initialized()
        if module is None or is_alone:
            return
        held = {f"{name} {each.dtype} {each.shape}": each for name, each in module.named_buffers()}
        # Others are placeholders of other stages, or of a module between runs.
        held = {key: each for key, each in held.items() if type(each) is Tensor and each.device == device}
        rates = [str([group.get("lr") for group in optimizer.param_groups]) for optimizer in strategy.optimizers]
        sums = {key: int(bit_sum(each)) for key, each in held.items()}
        found = all_gather_values((rates, sums), ranks.data_group, device)
        refuse_different_rates([each for each, _ in found])
        common = [key for key in found[0][1] if all(key in each for _, each in found)]
        differing = [held[key] for key in common if len({each[key] for _, each in found}) > 1]
        broadcast_from_first(differing, ranks.data_group)


def refuse_different_rates(found: list[list[str]]) -> None:
    """Raise if data ranks, in order, have different learning rates.

    Raises:
        RuntimeError: with those of the first other rank.
    """
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise RuntimeError(
            f"Data rank {other} has the learning rates {', '.join(found[other])} and data rank 0 "
            f"{', '.join(found[0])}, so replicas diverge: a scheduler or hook computed them from values of one "
            "rank. Use values of all, such as self.all_gather(value).mean()."
        )
