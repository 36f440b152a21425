"""Builds ranks of a planned layout at full size, on tensors without memory, and counts their bytes.

The first rank is built, and in a pipeline the first rank of its last place too. A rank's parts of the module are cut by
the strategies' engines over a process group of the whole world in which nobody else is there, sharded by torch's FSDP2
(stage 3) or averaged by ZeRO's own reducer (stages 1 and 2); forward and backward run on fake tensors, in a pipeline
stage by stage in the order of its schedule. What is alive at a time is counted storage by storage.

Three things are not built. The optimizer does not step: its state is added from the layout's own bytes (of an optimizer
step on fake tensors torch counts wholes of sharded tensors). The buckets of torch's DistributedDataParallel, which does
not run on fake tensors, are stood for by tensors of their size. Messages between stages are not sent, and what a
backend would keep for them is not counted.

The module is cut and sharded on the meta device, outside of the fake mode, in which that would take many times as long.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.missing import resolved
from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import Held, moments
from trainwright.planning.proof.built_rank import BuiltRank, actions_at
from trainwright.planning.search.plan import Candidate
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.work import Work
from trainwright.planning.time.order import INPUTS

WITHIN = 0.05
"""Part by which counted and predicted bytes may differ."""
_GIB = 2**30


@dataclass(frozen=True)
class Proof:
    """What one rank was found to hold.

    Args:
        rank: which.
        world_size: of how many.
        counted: most bytes alive in forward and backward, state of the optimizer included.
        predicted: the same as planned.
        parameters, predicted_parameters: bytes of these that are held between steps.
        moment: of the step at which the most was predicted.
        seconds: that it took.
    """

    rank: int
    world_size: int
    counted: float
    predicted: float
    parameters: float
    predicted_parameters: float
    moment: str
    seconds: float

    @property
    def deviation(self) -> float:
        """Part by which the prediction is above (positive) or below what was counted."""
        return self.predicted / self.counted - 1

    @property
    def holds(self) -> bool:
        """Whether the two differ by no more than :data:`WITHIN`."""
        return abs(self.deviation) <= WITHIN

    def text(self) -> str:
        """Two lines."""
        verdict = "as predicted" if self.holds else f"which is more than {100 * WITHIN:.0f} % apart"
        expected = f"{self.predicted / _GIB:.2f}, {100 * self.deviation:+.1f} %, {self.moment}"
        return (
            f"proof: rank {self.rank} of {self.world_size}, built at full size without memory in {self.seconds:.1f} "
            f"s:\n  parameters {self.parameters / _GIB:.2f} GiB (predicted {self.predicted_parameters / _GIB:.2f}), "
            f"most in forward and backward {self.counted / _GIB:.2f} GiB (predicted {expected}), {verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values; bytes and seconds."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "counted_bytes": self.counted,
            "predicted_bytes": self.predicted,
            "deviation": self.deviation,
            "holds": self.holds,
            "parameter_bytes": self.parameters,
            "predicted_parameter_bytes": self.predicted_parameters,
            "moment": self.moment,
            "seconds": self.seconds,
        }


def prove(cfg: DictConfig, candidate: Candidate) -> tuple[Proof, ...]:
    """Build ranks of a candidate and count their bytes: the first, and of a pipeline the first of its last place.

    Args:
        cfg: that was planned for.
        candidate: of its plan.

    Raises:
        ValueError: if this process has met other ranks already, or the layout is one that cannot be proved; the
            message says why, and what to do.
    """
    _refuse(candidate.work)
    searched = Searched(resolved(cfg))
    if searched.facts.near(candidate.cut).is_real:
        raise ValueError(
            f"--prove: training_step of {type(searched.module).__name__} reads values of tensors, so it cannot be run "
            "at full size without memory; leave out --prove"
        )
    return tuple(_prove(searched, candidate, rank) for rank in _ranks_of(candidate.layout))


def _refuse(work: Work) -> None:
    if work.offload != "none":
        raise ValueError(
            f"--prove: the first layout has strategy.offload={work.offload}, and bytes of the host and of the device "
            "cannot be told apart where neither is there; leave out --prove, or plan for more devices"
        )
    if work.has_pipeline and any(action.kind == INPUTS for action in actions_at(work, 0)):
        raise ValueError(
            f"--prove: strategy.schedule={work.schedule} computes gradients of inputs and of weights apart, which is "
            "not built; allowed are schedules that do not, such as 1f1b and interleaved_1f1b"
        )


def _ranks_of(layout: Layout) -> tuple[int, ...]:
    """The first, and of a pipeline the first of its last place: those of which a plan predicts."""
    return (0, layout.world_size // layout.pipeline * (layout.pipeline - 1)) if layout.pipeline > 1 else (0,)


def _prove(searched: Searched, candidate: Candidate, rank: int) -> Proof:
    began = time.monotonic()
    most = _predicted(searched, candidate, candidate.layout.coordinates(rank)["pipeline"])
    counted, held = BuiltRank(searched, candidate, rank).count()
    return Proof(
        rank=rank,
        world_size=candidate.layout.world_size,
        counted=counted + most.optimizer,
        predicted=most.total,
        parameters=held,
        predicted_parameters=most.parameters,
        moment=most.moment,
        seconds=time.monotonic() - began,
    )


def _predicted(searched: Searched, candidate: Candidate, place: int) -> Held:
    """What a rank holds at its fullest moment before the optimizer steps."""
    work = candidate.work
    cost = searched.facts.near(candidate.cut)
    share = next(share for share in searched.shares(work) if share.place == place)
    found = moments(searched.table, cost, work, share)
    return max(found[:-1], key=lambda held: held.total)
