"""What the parts of the Trainer may ask of it."""

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
    """Lightning's Trainer with the global batch of a run; loops and connectors know the Trainer as this.

    Attributes:
        global_batch_size: samples of an optimizer step, as asked for; ``None``: as they come.
        uneven_steps: whether the last micro-batches of a step may be smaller.
        global_batch: what an optimizer step reads, once the training loader is known.
        settled_accumulation: micro-batches of a step that ``global_batch_size`` needs, once known.
        data_partition: which data rank reads which samples.
        data_key: of a sample, where they are dealt by keys.
        seed_samples: whether random numbers of a sample depend on its index alone.
        allow_changed_data: whether a run may go on with other data.
        copies: of the run state in memory.
        balance: who computes how much of the global batch; ``None``: all alike.
        leases: of samples, where ranks step by themselves; ``None``: samples are dealt.
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
        """What this rank is doing within a step, for those who watch."""
        loop: Any = self.fit_loop.epoch_loop
        phases: Phases = loop.phases
        return phases

    def settle_global_batch(self, micro_batch_size: int, data_ranks: int, deals_samples: bool = False) -> int:
        """Fix the accumulation once the loader's batch size is known.

        Args:
            micro_batch_size: samples that one data rank reads at a time.
            data_ranks: ranks that read different samples.
            deals_samples: whether single samples are dealt, so that a micro-batch may be a smaller one.

        Returns:
            Micro-batches per optimizer step.

        Raises:
            ValueError: if ``global_batch_size`` cannot be made of such micro-batches.
        """
        if self.global_batch_size is not None:
            uneven = self.uneven_steps and deals_samples
            accumulation = solve_accumulation(self.global_batch_size, micro_batch_size, data_ranks, uneven)
            self._refuse_unlike(accumulation, micro_batch_size)
            self.accumulate_grad_batches = self.settled_accumulation = accumulation
            self._refuse_manual_accumulation(micro_batch_size * data_ranks)
        batch = GlobalBatch(micro_batch_size, self.accumulate_grad_batches, data_ranks)
        if self.global_batch_size is not None and batch.size != self.global_batch_size:
            batch = replace(batch, samples=self.global_batch_size)
        self.global_batch = batch
        return self.accumulate_grad_batches

    def _refuse_unlike(self, accumulation: int, micro_batch_size: int) -> None:
        if self.settled_accumulation not in (None, accumulation):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.settled_accumulation} accumulated "
                f"micro-batches for one training loader and {accumulation} for another (batch_size={micro_batch_size}),"
                " but all are read together. Give them the same batch_size, or leave global_batch_size out and set "
                "accumulate_grad_batches."
            )

    def _refuse_manual_accumulation(self, wave_size: int) -> None:
        if self.accumulate_grad_batches > 1 and not self.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs {self.accumulate_grad_batches} accumulated "
                "micro-batches, but the module optimizes manually and steps when it likes. "
                f"Set global_batch_size={wave_size}, or leave it out and accumulate in training_step."
            )

    def agreement_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks for agreements that must not wait for the collectives of training."""
        return self._agreement_group.get()
