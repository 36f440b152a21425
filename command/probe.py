"""Probing of `micro_batch_size=auto`: the predicted micro-batch is tried before training starts.

Its layout trains two optimizer steps on the first samples in temporary processes, so that weights, random states,
optimizers, sample order and metrics of the run are untouched, and an out-of-memory kill does not take down other ranks.
The peak memory of the ranks is compared with what is available.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.command.auto import Choice
from trainwright.command.bare_training import only_training, temporary_folder, train_in_subprocesses
from trainwright.core.failures.failure import RankError
from trainwright.core.processes.machine import machine_facts
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.sizes import size_text
from trainwright.launch.engines.engines import uses_engine
from trainwright.strategies.compose.world import Surroundings, num_data_ranks, world_size_of

SAFE = 0.95
"""Fraction of the available memory that the steps may use: later samples may be longer, and memory fragments."""
# The second step has the optimizer's state beside activations.
_STEPS = 2
# Micro-batches per step: with more than one, gradients of earlier ones are held beside activations.
_MOST_ACCUMULATED = 2
_RECORDER = "trainwright.planning.memory.measured.PeakRecorder"
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ProbeResult:
    """Result of trying a micro-batch.

    Attributes:
        micro_batch_size: samples.
        fits: None = unknown, for the reason in `why`.
        why: peak memory or error, in words.
        needed: peak bytes of the tightest memory; None = unknown, and so is `there`.
        there: bytes available of that memory.
    """

    micro_batch_size: int
    fits: bool | None
    why: str = ""
    needed: int | None = None
    there: int | None = None

    @property
    def text(self) -> str:
        """The result in one line."""
        if self.fits is None:
            return f"not tried: {self.why}."
        size = f"tried: {self.micro_batch_size} sample(s) at a time"
        return f"{size}: {self.why}." if self.fits else f"{size} do not fit: {self.why}."

    def next_of(self, smaller: Iterable[int]) -> int | None:
        """Return the largest of `smaller` that may fit; None if there is none.

        Memory grows less than in proportion to the size, because a part of it is constant.
        """
        most = self.micro_batch_size - 1
        if self.needed is not None and self.there is not None:
            most = min(most, int(self.micro_batch_size * SAFE * self.there / self.needed))
        return max((size for size in smaller if size <= most), default=None)


def probe(planned: DictConfig, launcher: Launcher | None) -> ProbeResult:
    """Train two optimizer steps with the micro-batch of a configuration, in temporary processes.

    Args:
        planned: a checked configuration with everything decided, interpolations included.
        launcher: that has started this process as a rank; None = none.

    Raises:
        Interrupted: if this process was interrupted.
    """
    size = int(planned.micro_batch_size)
    if launcher is not None:
        who = f"under {launcher.name} the ranks are running already, so the size cannot be tried"
        return ProbeResult(size, None, f"{who}; only predicted")
    if uses_engine(planned):
        who = f"launch={planned.launch.kind} starts the ranks elsewhere, so the size cannot be tried"
        return ProbeResult(size, None, f"{who}; only predicted")
    there = machine_facts().available
    with temporary_folder("probe") as name:
        folder = Path(name)
        trial = _trial(planned, folder)
        try:
            train_in_subprocesses(trial)
        except RankError as error:
            return _failed(size, error)
        records = [json.loads((folder / "peaks" / f"rank_{rank}.json").read_text()) for rank in range(trial.devices)]
    return judge(size, records, there)


def judge(size: int, records: Sequence[dict[str, int]], there: int) -> ProbeResult:
    """Compare the ranks' peak memory with what is available.

    Args:
        size: the micro-batch.
        records: of every rank, as :class:`~trainwright.planning.memory.measured.PeakRecorder` writes them.
        there: bytes of host memory that were available to all ranks together before they started.
    """
    host = sum(each["host"] for each in records)
    pairs = [(host, there, "all ranks together held {needed} of the host's {there}")]
    pairs += [
        (each["device"], each["device_there"], f"rank {rank} held {{needed}} of its device's {{there}}")
        for rank, each in enumerate(records)
        if each["device_there"]
    ]
    needed, limit, words = max(pairs, key=lambda pair: pair[0] / max(pair[1], 1))
    text = words.format(needed=size_text(needed, digits=2), there=size_text(limit, digits=2))
    if needed > SAFE * limit:
        return ProbeResult(size, False, f"{text}, more than {100 * SAFE:.0f} %", needed, limit)
    tight = [rank for rank, each in enumerate(records) if each["retries"]]
    if tight:
        return ProbeResult(size, False, f"rank {tight[0]} continued only after torch had released its cache")
    return ProbeResult(size, True, text, needed, limit)


def with_probes(choice: Choice, tried: Sequence[ProbeResult]) -> Choice:
    """Return the choice with the results of its trials in lines and document."""
    lines = [*choice.lines, *(each.text for each in tried)]
    return replace(choice, document={**choice.document, "lines": lines, "tried": [asdict(each) for each in tried]})


def refusal(tried: Sequence[ProbeResult]) -> str:
    """Return the message for the user if no size fits."""
    sizes = ", ".join(str(each.micro_batch_size) for each in tried)
    return (
        f"micro_batch_size=auto: tried {sizes} sample(s) at a time, and even the last does not fit: {tried[-1].why}; "
        "type strategy=auto for a layout that fits, strategy.activation_checkpointing=full, or more devices"
    )


def _trial(planned: DictConfig, folder: Path) -> DictConfig:
    """Return the configuration of the trial: the same layout and data, for as long as it takes to reach the peak."""
    ranks = num_data_ranks(planned, world_size_of(planned, Surroundings()))
    wave = int(planned.micro_batch_size) * ranks
    recorder = {"_target_": _RECORDER, "folder": str(folder / "peaks")}
    trial = only_training(planned, _STEPS, folder / "run", {"peaks": recorder})
    trial.global_batch_size = min(int(planned.global_batch_size), _MOST_ACCUMULATED * wave)
    trial.accumulation.steps = None
    trial.ckpt_path, trial.resume, trial.resume_folders = None, None, []
    trial.inject = {}
    launch: dict[str, Any] = {"port": None, "max_restarts": 0, "min_devices": None, "recovery": "restart", "spares": 0}
    trial.launch.update(launch)
    return trial


def _failed(size: int, error: RankError) -> ProbeResult:
    if error.failure is None and error.hang is None and error.exit_code == -9:
        return ProbeResult(size, False, f"{error.summary}, probably by the kernel's out-of-memory killer")
    said = error.failure
    if said is not None and _OUT_OF_MEMORY.search(f"{said.kind}: {said.message}"):
        return ProbeResult(size, False, error.summary)
    return ProbeResult(size, None, f"{error.summary}; only predicted")
