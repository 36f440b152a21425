"""Random choice of runs and of their kills, reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.killer import COMMAND, DELETION, EVERY, RECOVERY, SAVE, Kill

STRATEGIES = {
    "ddp": ("strategy=ddp",),
    "zero3": ("strategy=zero3",),
    # To the plan of a pipeline the table of positions may be a head.
    "pipeline": ("strategy=pipeline", "strategy.plan.first=[place]"),
}
MODES = {"sync": "checkpoint=last", "async": "checkpoint=async"}
PHASES = {SAVE: 4, DELETION: 3, RECOVERY: 3}
"""Phase -> its weight among those of a run."""
# Seconds between two changes of the disk, or between the last one and the next phase, are less.
_LONGEST_DELAY = {SAVE: 0.03, DELETION: 0.03, RECOVERY: 0.3}

Instants = Mapping[str, Mapping[int, int]]
"""Phase -> process (a rank or :data:`COMMAND`) -> changes of the disk in one save, deletion or recovery."""


@dataclass(frozen=True)
class Drawn:
    """A run.

    Args:
        number: of the run.
        strategy: of :data:`STRATEGIES`.
        mode: of :data:`MODES`.
        one_name: whether each checkpoint replaces the one before; else each has its step in its name.
        draw: where its kills come from.
    """

    number: int
    strategy: str
    mode: str
    one_name: bool
    draw: random.Random

    @property
    def keeps(self) -> int:
        """Checkpoints that are kept."""
        return 1 if self.one_name else 2

    @property
    def words(self) -> list[str]:
        """Of its commands."""
        name = ("checkpoint.last.filename=last",) if self.one_name else ()
        return [*STRATEGIES[self.strategy], MODES[self.mode], f"checkpoint.last.keep_last={self.keeps}", *name]


def draw_run(seed: int, number: int, strategies: Sequence[str], modes: Sequence[str]) -> Drawn:
    """The run of that number: strategies and modes in turn, all else at random."""
    draw = random.Random(f"{seed} {number}")
    pairs = [(strategy, mode) for mode in modes for strategy in strategies]
    strategy, mode = pairs[number % len(pairs)]
    return Drawn(number, strategy, mode, draw.random() < 0.25, draw)


def draw_kills(draw: random.Random, instants: Instants, most: int, resumes: bool) -> list[Kill]:
    """The kills of one command, one for each time that its ranks start.

    Of several, all but the last spare the command, which starts its ranks again.

    Args:
        draw: where they come from.
        instants: in the strategy of the run.
        most: kills.
        resumes: whether there is a checkpoint to go on from.
    """
    count = min(most, draw.choice((1, 1, 2, 3)))
    if count == 1:
        return [_draw_kill(draw, instants, draw.choice((0, 1, EVERY, COMMAND)), resumes, draw.random() < 0.5)]
    victims = [*(draw.choice((0, 1, EVERY)) for _ in range(count - 1)), COMMAND]
    # A command whose ranks are killed resumes from its own checkpoint at least once.
    return [_draw_kill(draw, instants, victim, resumes or attempt > 0) for attempt, victim in enumerate(victims)]


def _draw_kill(
    draw: random.Random, instants: Instants, victim: int, resumes: bool, looks_in_command: bool = False
) -> Kill:
    phases = {phase: weight for phase, weight in PHASES.items() if resumes or phase != RECOVERY}
    [phase] = draw.choices(list(phases), list(phases.values()))
    rank = 0 if phase == DELETION else draw.choice((0, 1))
    if phase == RECOVERY and victim == COMMAND and looks_in_command:
        rank = COMMAND
    changes = max(1, instants[phase][rank])
    # In the second or third save: the first one gives the next attempt something to go on from.
    first, last = {SAVE: (changes, 3 * changes), DELETION: (0, 2 * changes), RECOVERY: (0, changes)}[phase]
    delay = draw.choice((0.0, draw.uniform(0.0, _LONGEST_DELAY[phase])))
    return Kill(phase, rank, draw.randrange(first, last), delay, victim)
