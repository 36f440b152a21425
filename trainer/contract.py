"""The Trainer's interface for its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer as LightningTrainer

from trainwright.callbacks.guard.copies import StateCopies
from trainwright.checkpoint.exchange.groups import WorldGroup
from trainwright.core.global_batch import GlobalBatch, solve_accumulation
from trainwright.core.run.phases import Phases
from trainwright.trainer.data.epoch_order import seed_of_run
from trainwright.trainer.data.partition import DataKey


class RunTrainer(LightningTrainer):
    """Lightning's Trainer with a global batch; loops and connectors depend on this class.

    Attributes:
        global_batch_size: requested samples per optimizer step; ``None``: Lightning's meaning.
        uneven_steps: whether the last micro-batches of a step may be smaller.
        global_batch: the batch of an optimizer step, once the training loader is known.
        settled_accumulation: micro-batches per step that ``global_batch_size`` requires, once known.
        data_partition: how samples are partitioned over data ranks.
        data_key: of a sample, for partitioning by keys.
        seed_samples: whether random numbers of a sample depend only on its index.
        allow_changed_data: whether a run may resume with other data.
        copies: in-memory copies of the run state.
        balance: shares of data ranks in the global batch; ``None``: equal shares.
        leases: of samples, with asynchronous ranks; ``None``: samples are partitioned.
    """

    global_batch_size: int | None
    uneven_steps: bool
    global_batch: GlobalBatch | None
    settled_accumulation: int | None
    data_partition: str
    data_key: DataKey | None
    seed_samples: bool
    allow_changed_data: bool
    copies: StateCopies
    balance: Any
    leases: Any
    _checkpoint_connector: Any
    _data_seed: int | None
    _agreement_group: WorldGroup

    @property
    def data_seed(self) -> int:
        """Seed of the order of samples."""
        return seed_of_run() if self._data_seed is None else self._data_seed

    @property
    def phases(self) -> Phases:
        """Phases of this rank within a step."""
        loop: Any = self.fit_loop.epoch_loop
        phases: Phases = loop.phases
        return phases

    def settle_global_batch(self, micro_batch_size: int, data_ranks: int, deals_samples: bool = False) -> int:
        """Fix the accumulation, once the loader's batch size is known.

        Args:
            micro_batch_size: samples that one data rank reads at a time.
            data_ranks: number of ranks that read different samples.
            deals_samples: whether single samples are distributed, so that a micro-batch may be smaller.

        Returns:
            Micro-batches per optimizer step.

        Raises:
            ValueError: if ``global_batch_size`` is not a multiple of such micro-batches.
        """
        if self.global_batch_size is not None:
            uneven = self.uneven_steps and deals_samples
            accumulation = solve_accumulation(self.global_batch_size, micro_batch_size, data_ranks, uneven)
            self._require_same(accumulation, micro_batch_size)
            self.accumulate_grad_batches = self.settled_accumulation = accumulation
            self._refuse_manual_accumulation(micro_batch_size * data_ranks)
        batch = GlobalBatch(micro_batch_size, self.accumulate_grad_batches, data_ranks)
        if self.global_batch_size is not None and batch.size != self.global_batch_size:
            batch = replace(batch, samples=self.global_batch_size)
        self.global_batch = batch
        return self.accumulate_grad_batches

    def _require_same(self, accumulation: int, micro_batch_size: int) -> None:
        if self.settled_accumulation not in (None, accumulation):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.settled_accumulation} accumulated "
                f"micro-batches for one training loader and {accumulation} for another (batch_size={micro_batch_size}),"
                " read together. Give them the same batch_size, or set accumulate_grad_batches instead."
            )

    def _refuse_manual_accumulation(self, wave_size: int) -> None:
        if self.accumulate_grad_batches > 1 and not self.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.accumulate_grad_batches} accumulated "
                "micro-batches, but the module optimizes manually and decides itself when to step. "
                f"Set global_batch_size={wave_size}, or remove it and accumulate in training_step."
            )

    def agreement_group(self) -> dist.ProcessGroup:
        """Return a gloo group of all ranks for agreements that must not wait for collectives of training."""
        return self._agreement_group.get()
