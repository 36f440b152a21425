"""Options of ``strategy=single``, ``ddp``, ``zero1``, ``zero2`` and ``zero3``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.config.options import number, word
from trainwright.core.config.override_words import typed
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.options import AveragedOptions
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions

_DTYPES = ("fp32", "bf16", "fp16")
_AUTOCAST = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
OFFLOADS = ("none", "optimizer", "parameters")


@dataclass
class SingleOptions(StrategyOptions):
    """`strategy=single`: one process, one device."""

    _target_: str = "trainwright.strategies.data.single.SingleDeviceStrategy"

    # The checks of `compression` refuse a single replica.
    averages_gradients = True
    takes_mps = True
    takes_sparse_gradients = True
    planned_as = "single"

    def layout(self) -> Layout:
        """Return the layout of one rank."""
        return Layout()

    def closed_layout(self, world_size: int) -> Layout:
        """Return the layout of one rank.

        Raises:
            ValueError: if there are more.
        """
        if world_size != 1:
            raise ValueError(too_many_devices(world_size))
        return Layout()


def too_many_devices(number: int) -> str:
    """Return the error of several devices."""
    return (
        f"strategy=single trains on one device; this run has {number} (devices x nodes); type devices=1 or strategy=ddp"
    )


@dataclass
class DDPOptions(AveragedOptions):
    """`strategy=ddp`: every rank holds the whole model, gradients are averaged."""

    _target_: str = "trainwright.strategies.data.ddp.DDPStrategy"
    # Search for parameters unused in a step (walks the graph at every step); false = off, such a parameter is an error.
    find_unused_parameters: bool = False

    takes_sparse_gradients = True
    planned_as = "ddp"


@dataclass
class ZeroOptions(AveragedOptions):
    """`strategy=zero1|zero2|zero3`: training state sharded over the ranks, on a replicate x shard layout."""

    _target_: str = "trainwright.strategies.data.zero.ZeroStrategy"
    # What is sharded: 1 = optimizer state, 2 = and gradients, 3 = and parameters.
    stage: int = number(3, least=1, most=3)
    # Number of copies of the sharded state (ranks); -1 = the rest, 1 = no copies.
    replicate: int = number(1, least=-1)
    # Number of ranks that share one copy; -1 = the rest, 1 = nothing is sharded.
    shard: int = number(-1, least=-1)
    # State kept in host memory between steps: none, optimizer (its state) or parameters (stage 3 only).
    offload: str = word("none", *OFFLOADS)
    # Keep whole gradients while accumulating, so that only the last micro-batch communicates (stages 2 and 3; faster,
    # more memory); false = off.
    no_sync_accumulation: bool = False
    # Accept parameters unused in a step (stages 1 and 2); false = off, such a parameter is an error.
    find_unused_parameters: bool = False
    # Largest bucket of gradients sent at once (stages 1 and 2), in MiB; small models use smaller ones.
    bucket_mib: float | None = number(25.0, above=0, unit="MiB")
    # Blocks gathered ahead of the one that computes (stage 3), each using memory; 0 = none, null = FSDP2's default (1
    # on CUDA, 0 on the CPU), or the choice of communication=auto.
    prefetch: int | None = number(None, unit="blocks, 0 for none", null="for the default")
    # Dtype of all-gathers of block matrices in stage 3 with precision=bf16-mixed or 16-mixed: fp32, or its bf16 or
    # fp16; null = 16 bit for matrices that autocast rounds anyway, so results stay the same.
    param_dtype: str | None = word(None, *_DTYPES)
    # Dtype of gradient sums along the shard axis (and over replicas in stage 3): fp32, bf16 or fp16; null = as stored.
    reduce_dtype: str | None = word(None, *_DTYPES)

    @property
    def planned_as(self) -> str | None:
        """See the base class."""
        return f"zero{self.stage}"

    @property
    def rounds_to(self) -> tuple[str, ...]:
        """See the base class."""
        return () if self.reduce_dtype is None else (self.reduce_dtype,)

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        is_whole_module = self.stage != 3
        for option, is_unused, stage, why in (
            ("offload", self.offload == "parameters" and is_whole_module, 3, "only stage 3 shards parameters"),
            ("find_unused_parameters", self.stage == 3, 2, "only stages 1 and 2 look for them"),
            ("no_sync_accumulation", self.stage == 1, 2, "stage 1 holds whole gradients and sends once a step"),
            ("prefetch", is_whole_module, 3, "only stage 3 gathers parameters block by block"),
            ("param_dtype", is_whole_module, 3, "stages 1 and 2 keep fp32 parameters whole on every rank"),
        ):
            given = getattr(self, option)
            if is_unused and given is not None and given is not False:
                yield (
                    f"strategy.{option}={typed(given)} with stage {self.stage} has no effect: {why}; type "
                    f"strategy.stage={stage} (or strategy=zero{stage}), or leave it out"
                )

    def precision_problems(self, precision: str) -> Iterator[str]:
        """Yield the problems of the options with a ``precision``."""
        computed = _AUTOCAST.get(precision)
        if self.param_dtype not in (None, "fp32", computed):
            allowed = f"fp32 or {computed}" if computed else "fp32"
            yield (
                f"strategy.param_dtype={self.param_dtype} with precision={precision}: parameters are exchanged as "
                f"stored or in what autocast computes in. Allowed: {allowed}; leave it out, or type "
                f"precision={'16-mixed' if self.param_dtype == 'fp16' else 'bf16-mixed'}"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        yield from self.precision_problems(str(run.cfg.precision))

    def layout_problems(self, layout: Layout) -> Iterator[str]:
        """See the base class."""
        yield from super().layout_problems(layout)
        if layout.shard != 1 or layout.context != 1 or layout == Layout():
            return
        for option in ("prefetch", "param_dtype"):
            if getattr(self, option) is not None and self.stage == 3:
                yield (
                    f"strategy.{option}={getattr(self, option)} with shard=1 has no effect: every rank holds whole "
                    "parameters, so none are gathered. Leave it out, or type strategy.shard=2"
                )
        if self.reduce_dtype is not None and self.stage != 3:
            yield (
                f"strategy.reduce_dtype={self.reduce_dtype} with shard=1 has no effect: gradients are averaged over "
                "replicas alone. Type compression=bf16 to send these in 16 bit, or strategy.shard=2"
            )


@dataclass
class Zero1Options(ZeroOptions):
    """`strategy=zero1`."""

    stage: int = number(1, least=1, most=3)


@dataclass
class Zero2Options(ZeroOptions):
    """`strategy=zero2`."""

    stage: int = number(2, least=1, most=3)


@dataclass
class Zero3Options(ZeroOptions):
    """`strategy=zero3`."""


# Least number of buckets, unless they would be too small (bytes) to pay off.
_LEAST_BUCKETS = 16
_SMALL_BUCKET = 4 * 2**20


def bucket_bytes_for(largest: float, whole: float) -> float:
    """Return the bucket size: ``largest``, or less for a small model, which would otherwise be sent as one copy.

    Args:
        largest: ``strategy.bucket_mib`` in bytes.
        whole: bytes of all parameters.
    """
    return min(largest, max(whole / _LEAST_BUCKETS, _SMALL_BUCKET))
