"""Runs that are killed, command after command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.soak.checks import (
    ENDS,
    FILES,
    PROCESSES,
    SEGMENTS,
    Hashes,
    Wrong,
    check_checkpoints,
    check_end,
    check_files,
    check_story,
    check_temporary,
    hashes_of,
    kinds_of_files,
)
from benchmarks.soak.forked import fork_command
from benchmarks.soak.killer import DELETION, PLAN, RECOVERY, REPORTS, SAVE, Kill, read_reports, run_watched
from benchmarks.soak.left import Family, abandoned, segments
from benchmarks.soak.plan import STRATEGIES, Drawn, Instants, draw_kills
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store.storage import remove

KILLS_OF_A_RUN = 8
# As far as an undisturbed run is known; one with so many kills comes to step 20.
_STEPS = 40
# No other path has the first of these in it.
_RUN, _CHECKPOINTS, _PRINTED = "killed_run", "killed_run/checkpoints", "printed.log"
# Seconds that a command may take, and that its processes have to end when it has.
_PATIENCE, _SECONDS_TO_END = 120.0, 10.0
# In a run directory after failures alone.
_AFTER_FAILURES = ("logs/restarts.log",)
_RECIPE = """# @package _global_
name: soak
max_epochs: null
micro_batch_size: 2
global_batch_size: 4
seed: 5
module: {{_target_: benchmarks.soaked.Net, width: 32, layers: 2}}
data: {{_target_: benchmarks.soaked.Data, batch_size: "${{micro_batch_size}}", num_workers: 1}}
callbacks: {{killer: {{_target_: benchmarks.soak.killer.Killer, folder: {folder}, run_dir: {run_dir}}}}}
"""


@dataclass(frozen=True)
class Undisturbed:
    """Reference data of a strategy from a run without kills.

    Args:
        hashes: of its checkpoints.
        files: what lies in its run directory, numbers left out.
        instants: at which others may be killed.
    """

    hashes: Hashes
    files: frozenset[str]
    instants: Instants


@dataclass
class Command:
    """How a command ended.

    Args:
        process: its id.
        code: its exit code; ``None``: it did not end.
        reports: of its processes.
        left: processes that did not end: process id -> command line.
    """

    process: int
    code: int | None
    reports: list[dict[str, Any]]
    left: dict[int, str]


@dataclass
class Story:
    """Outcome of a run.

    Args:
        drawn: the run.
        newest: step of the newest checkpoint that is known to be there.
        kills: phase and victim of those that were done.
        wrong: violations found.
    """

    drawn: Drawn
    newest: int = 0
    kills: list[tuple[str, int]] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)


class Bench:
    """Runs commands in a folder, one after the other.

    Args:
        folder: empty; its path must be short, for sockets lie in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.family = Family()
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._segments = segments()
        recipes = folder / "conf" / "recipe"
        recipes.mkdir(parents=True)
        recipe = _RECIPE.format(folder=folder, run_dir=_RUN)
        (recipes / "soak.yaml").write_text(recipe, encoding="utf-8")

    def undisturbed(self, strategy: str) -> Undisturbed:
        """Make a run without kills, and see what it does.

        Raises:
            RuntimeError: with what a command printed, if it failed.
        """
        words = [*STRATEGIES[strategy], "checkpoint=last"]
        self._without_kills([*words, "checkpoint.last.keep_last=1000"], _STEPS)
        found = list_checkpoints(self.folder / _CHECKPOINTS)
        hashes = {each.step: hashes_of(each) for each in found}
        for each in found[2:]:
            remove(each.path)
        more = 4
        ended = self._without_kills([*words, "checkpoint.last.keep_last=2"], _STEPS + more)
        counts = {each["rank"]: each["counts"] for each in ended.reports if "counts" in each}
        instants = {
            phase: {rank: of.get(phase, 0) // times for rank, of in counts.items()}
            for phase, times in ((SAVE, more), (DELETION, more), (RECOVERY, 1))
        }
        files = frozenset(kinds_of_files(self.folder / _RUN))
        shutil.rmtree(self.folder / _RUN)
        return Undisturbed(hashes, files, instants)

    def _without_kills(self, words: Sequence[str], steps: int) -> Command:
        ended = self._command(words, steps, [])
        if ended.code != 0:
            raise RuntimeError(f"a run without kills ended with {ended.code}:\n{self._printed()}")
        return ended

    def run(self, drawn: Drawn, known: Undisturbed, most: int = KILLS_OF_A_RUN) -> Story:
        """Make a run, to its end or to the first thing that is wrong, which is kept then.

        Args:
            drawn: the run.
            known: what it does without kills.
            most: kills, after which it comes to its end.
        """
        story = Story(drawn)
        while not story.wrong:
            rest = most - len(story.kills)
            kills = draw_kills(drawn.draw, known.instants, rest, story.newest > 0) if rest else []
            steps = _STEPS if kills else story.newest + 2
            ended = self._command(drawn.words, steps, kills)
            self._look(story, known, kills, ended)
            if ended.code == 0:
                story.wrong += self._look_after_the_end(story, known, steps)
                break
        if story.wrong:
            self._keep(story)
        shutil.rmtree(self.folder / _RUN, ignore_errors=True)
        return story

    def _command(self, words: Sequence[str], steps: int, kills: Sequence[Kill]) -> Command:
        for name in (PLAN, REPORTS):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / PLAN).write_text(json.dumps([asdict(kill) for kill in kills]), encoding="utf-8")
        several = ("launch=resilient", "launch.backoff_seconds=0") if len(kills) > 1 else ()
        all_words = ["fit", "recipe=soak", "--config-dir", "conf", f"run_dir={_RUN}", "devices=2", "resume=auto"]
        all_words += ["checkpoint.last.every_n_steps=1", f"max_steps={steps}", *words, *several]
        process = fork_command(
            partial(run_watched, all_words, self.folder, _RUN),
            self.folder,
            {"TMPDIR": str(self._temporary)},
            self.folder / _PRINTED,
        )
        code = self.family.wait(process, _PATIENCE)
        left = self.family.left(_SECONDS_TO_END if code is not None else 0.0)
        self.family.end()
        return Command(process, code, read_reports(self.folder), left)

    def _look(self, story: Story, known: Undisturbed, kills: Sequence[Kill], ended: Command) -> None:
        """Check what a command has left."""
        done = [each["kill"] for each in ended.reports if "kill" in each]
        story.kills += [(phase, kill.victim) for phase, kill in zip(done, kills, strict=False)]
        at_least, wrong = check_story(ended.reports, story.newest)
        drawn = story.drawn
        story.newest, lost = check_checkpoints(
            self.folder / _CHECKPOINTS, at_least, drawn.keeps, known.hashes, drawn.one_name
        )
        new = abandoned(segments() - self._segments)
        self._segments |= new
        story.wrong += [
            *wrong,
            *lost,
            *check_end(ended.code, kills, len(done)),
            *check_temporary(self._temporary, ended.process if ended.code is None or ended.code < 0 else None),
            *(Wrong(PROCESSES, f"{process}: {words}") for process, words in ended.left.items()),
            *(Wrong(SEGMENTS, name) for name in new),
        ]

    def _look_after_the_end(self, story: Story, known: Undisturbed, steps: int) -> list[Wrong]:
        """Check what a run has left that came to its end."""
        names = sorted(path.name for path in (self.folder / _CHECKPOINTS).iterdir())
        keeps = story.drawn.keeps
        return [
            *([] if story.newest == steps else [Wrong(ENDS, f"it ended at step {story.newest}, not {steps}")]),
            *([] if len(names) == keeps else [Wrong(FILES, f"{names} where {keeps} checkpoints are kept")]),
            *check_files(self.folder / _RUN, {*known.files, *_AFTER_FAILURES}),
        ]

    def _keep(self, story: Story) -> None:
        kept = self.folder / f"failed_{story.drawn.number}"
        kept.mkdir()
        of_run = [self.folder / name for name in (_RUN, PLAN, REPORTS, _PRINTED)]
        for path in [*of_run, *self._temporary.iterdir()]:
            if path.exists():
                shutil.move(path, kept / path.name)

    def _printed(self) -> str:
        return (self.folder / _PRINTED).read_text(encoding="utf-8", errors="replace")[-6000:]
