"""Arithmetic of the global batch: accumulation, and which rank reads which samples. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class GlobalBatch:
    """Composition of one optimizer step.

    Args:
        micro_batch_size: samples that one data rank reads at a time.
        accumulation: micro-batches that one data rank accumulates.
        data_ranks: ranks that read different samples.
        samples: samples of a step where the last micro-batches of each are smaller; ``None``: all are full.
    """

    micro_batch_size: int
    accumulation: int
    data_ranks: int
    samples: int | None = None

    @property
    def size(self) -> int:
        """Samples per optimizer step."""
        return self.samples or self.micro_batch_size * self.accumulation * self.data_ranks

    def __str__(self) -> str:
        if self.samples is not None:
            return (
                f"{self.samples} samples a step, {self.micro_batch_size} at a time on {self.data_ranks} data rank(s), "
                f"{self.accumulation} times, the last of which are smaller"
            )
        return (
            f"{self.micro_batch_size} samples x {self.accumulation} accumulated x {self.data_ranks} data rank(s) "
            f"= {self.size} samples a step"
        )


def solve_accumulation(global_batch_size: int, micro_batch_size: int, data_ranks: int, uneven: bool = False) -> int:
    """Return the number of micro-batches that each data rank accumulates per optimizer step.

    Args:
        global_batch_size: samples per optimizer step.
        micro_batch_size: samples that one data rank reads at a time.
        data_ranks: ranks that read different samples.
        uneven: allow smaller last micro-batches where they cannot all be full.

    Raises:
        ValueError: if there is no whole number of them; the message names the nearest possible sizes.
    """
    wave = micro_batch_size * data_ranks
    accumulation, rest = divmod(global_batch_size, wave)
    if accumulation >= 1 and rest == 0:
        return accumulation
    if uneven and global_batch_size >= 1:
        return accumulation + 1
    nearest = [str(n * wave) for n in (accumulation, accumulation + 1) if n >= 1]
    message = (
        f"global_batch_size={global_batch_size} cannot be made of micro-batches of {micro_batch_size} samples on "
        f"{data_ranks} data rank(s), which read {wave} samples at a time. "
        f"Nearest possible: global_batch_size={' or '.join(nearest)}."
    )
    per_rank, left_over = divmod(global_batch_size, data_ranks)
    if not left_over and per_rank:
        fitting = [m for m in range(1, per_rank + 1) if per_rank % m == 0]
        near = sorted(sorted(fitting, key=lambda m: abs(m - micro_batch_size))[:4])
        message += f" Or keep it and set micro_batch_size={' or '.join(map(str, near))}."
    raise ValueError(message)


@dataclass(frozen=True)
class Waves:
    """Distribution of an epoch's samples over data ranks.

    A *wave* is what all data ranks read at the same time: ``micro_batch_size x data_ranks`` consecutive samples in the
    order of the epoch, of which rank r reads the r-th part. So the samples of a global batch do not depend on the
    layout. In training the samples of an incomplete last wave are dealt evenly; outside of it ranks read whole batches,
    those of one process. A rank may get none.

    Args:
        samples: samples of the epoch.
        micro_batch_size: samples per rank and wave.
        data_ranks: number of ranks.
        group: waves of one optimizer step; 0 outside of training.
        step_samples: samples of one optimizer step where its last wave is smaller than the others; 0: all are full.
    """

    samples: int
    micro_batch_size: int
    data_ranks: int
    group: int = 0
    step_samples: int = 0

    @property
    def wave_size(self) -> int:
        """Samples of a full wave."""
        return self.micro_batch_size * self.data_ranks

    @property
    def per_step(self) -> int:
        """Samples of a whole optimizer step."""
        return self.step_samples or self.group * self.wave_size

    def __len__(self) -> int:
        if not self.step_samples:
            return math.ceil(self.samples / self.wave_size)
        steps, rest = divmod(self.samples, self.step_samples)
        return steps * self.group + math.ceil(rest / self.wave_size)

    @cached_property
    def regular(self) -> int:
        """Number of leading waves that are full and start at a multiple of the wave size."""
        if self.step_samples:
            return 0
        return max(len(self) - 2, 0) if self._evens_out else self.samples // self.wave_size

    def bounds(self, wave: int) -> tuple[int, int]:
        """Return the samples ``[first, last)`` of the epoch's order that make up ``wave``."""
        return self._cut(wave), self._cut(wave + 1)

    def starts(self, rank: int) -> range:
        """Return the first sample that ``rank`` reads in each regular wave."""
        first = rank * self.micro_batch_size
        return range(first, first + self.regular * self.wave_size, self.wave_size)

    def share(self, wave: int, rank: int) -> tuple[int, int]:
        """Return the samples ``[first, last)`` of the epoch's order that ``rank`` reads in ``wave``; may be empty."""
        if wave < self.regular:
            start = self.starts(rank)[wave]
            return start, start + self.micro_batch_size
        first, last = self.bounds(wave)
        if not self.group:
            start = min(first + rank * self.micro_batch_size, last)
            return start, min(start + self.micro_batch_size, last)
        each, extra = divmod(last - first, self.data_ranks)
        start = first + rank * each + min(rank, extra)
        return start, start + each + (rank < extra)

    def group_size(self, wave: int) -> int:
        """Return the samples of the optimizer step to which ``wave`` belongs."""
        first = wave // self.group * self.per_step
        return min(first + self.per_step, self.samples) - first

    def _cut(self, wave: int) -> int:
        """Return the first sample of ``wave``."""
        if self.step_samples:
            step, within = divmod(wave, self.group)
            return min(step * self.step_samples + within * self.wave_size, self.samples)
        if wave == len(self) - 1 and self._evens_out:
            before = self.wave_size * (wave - 1)
            return before + (self.samples - before + 1) // 2
        return min(wave * self.wave_size, self.samples)

    @property
    def _evens_out(self) -> bool:
        """True if the last two waves share their samples, so that no rank gets none."""
        if self.step_samples or not self.group:
            return False
        last = len(self) - 1
        too_few = 0 < self.samples - last * self.wave_size < self.data_ranks
        same_step = (last - 1) // self.group == last // self.group
        return too_few and last >= 1 and self.micro_batch_size > 1 and same_step
