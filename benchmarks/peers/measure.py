"""Starts the sides of a layout and gives them their turns."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.commands import environment_of
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.field import Place, Side
from benchmarks.peers.race import PeerError, Piece, Runner
from benchmarks.report import say


@dataclass
class Measured:
    """Measurements of one side under one layout.

    Args:
        lines: of user code.
        version: of the peer's own package; ``None``: this project's environment.

    Attributes:
        starts: seconds from the command to the end of the first optimizer step.
        pieces: after the warm-up.
        losses: of every step, the first and the warm-up included.
        error: why it did not train, in its own words; ``None``: it did.
        steps: optimizer steps of a piece.
    """

    lines: int
    version: str | None
    steps: int
    starts: list[float] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str | None = None


def start(side: Side, place: Place, threads: int) -> Runner:
    """Start a side in a folder of its own.

    Raises:
        PeerError: if it is not installed.
    """
    folder = place.folder / re.sub(r"\W+", "_", f"{place.layout} {side.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = replace(place, folder=folder)
    try:
        command = side.command(here)
    except RuntimeError as error:
        raise PeerError(str(error)) from None
    own = ENVIRONMENTS[side.environment].environment(place.cache) if side.environment else {}
    environment = {**environment_of(threads), **own}
    return Runner(command, environment, place.ranks, place.task, folder)


def measure_layout(sides: Sequence[Side], place: Place, threads: int) -> dict[str, Measured]:
    """Start the sides one after the other, warm them up, then let them make pieces in turns.

    Args:
        sides: who takes part.
        place: the layout.
        threads: CPU threads of a rank.

    Returns:
        By the side's name; one that failed has an error, and what it measured before.
    """
    found = {side.name: Measured(side.lines(place.layout), side.version(), place.task.steps) for side in sides}
    runners: dict[str, Runner] = {}
    try:
        for side in sides:
            _guarded(side.name, found, runners, lambda side=side: _first_step(side, place, threads, found, runners))
        for name in list(runners):
            _guarded(name, found, runners, lambda name=name: _turn(runners[name], found[name]))
        for index in range(place.task.pieces):
            names = list(runners)
            first = index % len(names) if names else 0
            for name in names[first:] + names[:first]:
                _guarded(name, found, runners, lambda name=name: _turn(runners[name], found[name], keep=True))
            say(f"piece {index + 1}/{place.task.pieces}: " + ", ".join(_shown(name, found[name]) for name in runners))
    finally:
        for name, runner in runners.items():
            runner.close(ended=len(found[name].pieces) == place.task.pieces)
    return found


def measure_alone(sides: Sequence[Side], place: Place, threads: int, rounds: int) -> dict[str, Measured]:
    """As :func:`measure_layout`, but with one side alive at a time, as where two do not fit into a device's memory.

    Args:
        sides: who takes part.
        place: the layout.
        threads: CPU threads of a rank.
        rounds: runs of each side, in turns; all pieces count, losses are those of the first run.
    """
    found = {side.name: Measured(side.lines(place.layout), side.version(), place.task.steps) for side in sides}
    for turn in range(rounds):
        able = [side for side in sides if found[side.name].error is None]
        first = turn % len(able) if able else 0
        for side in able[first:] + able[:first]:
            _run_alone(side, place, threads, found[side.name], keep_losses=turn == 0)
    return found


def _run_alone(side: Side, place: Place, threads: int, measured: Measured, keep_losses: bool) -> None:
    runner, ended = None, False
    try:
        runner = start(side, place, threads)
        for index in range(len(place.task.boundaries)):
            if index:
                runner.go()
            piece = runner.piece()
            if index == 0:
                measured.starts.append(piece.moment - runner.started)
            if index > 1:
                measured.pieces.append(piece)
            if keep_losses:
                measured.losses += piece.losses
        ended = True
        say(f"  {_shown(side.name, measured)}")
    except (PeerError, BrokenPipeError) as error:
        measured.error = str(error)
        say(f"  {side.name}: {error}")
    finally:
        if runner is not None:
            runner.close(ended)


def measure_starts(sides: Sequence[Side], place: Place, threads: int, repeats: int, found: dict[str, Measured]) -> None:
    """Start the sides again that have trained, alone on the machine, and end each after its first step."""
    short = replace(place, task=replace(place.task, pieces=0))
    for turn in range(repeats):
        able = [side for side in sides if found[side.name].error is None]
        first = turn % len(able) if able else 0
        for side in able[first:] + able[:first]:
            runner = start(side, short, threads)
            ended = False
            try:
                found[side.name].starts.append(runner.piece().moment - runner.started)
                ended = True
            except PeerError as error:
                found[side.name].error = str(error)
            finally:
                runner.close(ended)
        say(f"starts {turn + 1}/{repeats}: " + ", ".join(f"{s.name} {found[s.name].starts[-1]:.1f} s" for s in able))


def _first_step(side: Side, place: Place, threads: int, found: dict[str, Measured], runners: dict[str, Runner]) -> None:
    runner = runners[side.name] = start(side, place, threads)
    piece = runner.piece()
    found[side.name].starts.append(piece.moment - runner.started)
    found[side.name].losses += piece.losses
    say(f"  {side.name}: first step after {found[side.name].starts[-1]:.1f} s")


def _turn(runner: Runner, measured: Measured, keep: bool = False) -> None:
    runner.go()
    piece = runner.piece()
    measured.losses += piece.losses
    if keep:
        measured.pieces.append(piece)


def _guarded(name: str, found: dict[str, Measured], runners: dict[str, Runner], work: object) -> None:
    """Do ``work``; a side that fails is out, and the others go on."""
    assert callable(work)
    try:
        work()
    except (PeerError, BrokenPipeError) as error:
        found[name].error = str(error)
        say(f"  {name}: {error}")
        if name in runners:
            runners.pop(name).close(ended=False)


def _shown(name: str, measured: Measured) -> str:
    return f"{name} {measured.pieces[-1].wall / measured.steps * 1e3:.0f} ms"
