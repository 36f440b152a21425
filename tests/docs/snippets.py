"""Really run the commands of the documentation that this machine can run, small: `make snippets`, many minutes.

    python -m tests.docs.snippets [PAGE ...]

Each page gets a reader's folder, in which its commands run one after the other, each with its own exit code: that of
the mark in front of its block, or 0. What a page takes for granted is made beforehand (`made_before.py`); few steps
are made, on the CPU (`smaller.py`). Three pages run at a time. What was left out is said at the end, with the reason.
The exit code is 1 if a command ended otherwise than its page says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.command.project import environment
from tests.docs.blocks import SHELL, Block, blocks_of, pages
from tests.docs.made_before import make_before
from tests.docs.project import RUN, write_project
from tests.docs.shell import commands_of
from tests.docs.smaller import as_processes, small, why_not
from trainwright.core.text.messages import RUN_TOKEN

WORKERS = 3
_SECONDS = 900
# Commands that run until a signal: the signal and the exit code.
_WATCH, _FIT = (signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)
# What later commands of a page may need, so that it runs on each page that shows it.
_LEAVES = re.compile(r"--config-dir|-cd|checkpoint|run_dir=.*|python3?")


@dataclass
class Outcome:
    """Outcomes of the commands of all pages.

    Attributes:
        ran: how many ran.
        failed: those that ended otherwise than they should, with their place.
        left_out: reason -> commands with their place.
    """

    ran: int = 0
    failed: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    _seen: set[tuple[str, ...]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_new(self, words: Sequence[str]) -> bool:
        """Record a command and return whether it is new."""
        with self._lock:
            new = tuple(words) not in self._seen
            self._seen.add(tuple(words))
            return new

    def leave_out(self, line: str, reason: str) -> None:
        """Record a command that does not run here."""
        with self._lock:
            self.left_out.setdefault(reason, []).append(line)

    def record(self, line: str, typed: str, codes: Sequence[int], wanted: int, seconds: float, output: str) -> None:
        """Record a command that has ended."""
        good = set(codes) == {wanted}
        with self._lock:
            self.ran += 1
            print(f"{line}\n    {seconds:.0f} s, exit code {', '.join(map(str, codes))}: {typed}", flush=True)
            if not good:
                print(f"{output[-4000:]}\n    exit code {wanted} was expected", flush=True)
                self.failed.append(line)


def main(asked: Sequence[str]) -> int:
    """Run the commands of the pages that were asked for; of all where none was."""
    # Where this runs in the background, commands would inherit that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = Outcome()
    with ThreadPoolExecutor(WORKERS) as pool:
        for page, done in [(page, pool.submit(run_page, page, outcome)) for page in asked or pages()]:
            if (error := done.exception()) is not None:
                outcome.failed.append(f"{page}: the rest did not run: {error}")
    for reason, lines in outcome.left_out.items():
        print(f"left out, {reason}:", *lines, sep="\n  ")
    count = sum(map(len, outcome.left_out.values()))
    told = f"{outcome.ran} commands ran, {len(outcome.failed)} failed, {count} were left out"
    print(told, *outcome.failed, sep="\n  ")
    return 1 if outcome.failed else 0


def run_page(page: str, outcome: Outcome) -> None:
    """Run the commands of a page in a folder of its own."""
    blocks = blocks_of(page)
    typed = "".join(block.text for block in blocks if block.language in SHELL)
    with tempfile.TemporaryDirectory(prefix="reader_") as name:
        folder = Path(name).resolve()
        write_project(folder, {block.value: block.text for block in blocks if block.mark == "file"})
        for run in set(re.findall(rf"> (runs/\w+/{RUN}/(?:monitor/)?)", typed)):  # requests to a running job
            (folder / run).mkdir(parents=True, exist_ok=True)
        for block, words, wanted in _commands(blocks, folder):
            line = f"{block.place}: {' '.join(words) if block.language in SHELL else 'lines of Python'}"
            if any(_LEAVES.fullmatch(word) for word in words) or outcome.is_new(words):
                _run_command(line, words, wanted, folder, outcome)


def _commands(blocks: Sequence[Block], folder: Path) -> Iterator[tuple[Block, list[str], int]]:
    """Commands of a page in their order, and the exit code of each: of the mark, whose last one holds for the rest."""
    for block in blocks:
        codes = [int(code) for code in block.value.split()] if block.mark == "exit code" else [0]
        if block.language == "python" and block.mark == "in snippets":
            yield block, ["python", "-c", block.text], 0
        elif block.language in SHELL and block.mark != "not run":
            for index, words in enumerate(commands_of(block, folder)):
                yield block, words, codes[min(index, len(codes) - 1)]


def _run_command(line: str, words: Sequence[str], wanted: int, folder: Path, outcome: Outcome) -> None:
    reason = why_not(words)
    if reason:
        outcome.leave_out(line, reason)
        return
    given = make_before(small(words), folder)
    if given[1:2] == ["-c"] and "\n" in given[2]:  # as a reader would, who keeps it in a file
        (folder / "lines_of_the_page.py").write_text(given[2], encoding="utf-8")
        given[1:] = ["lines_of_the_page.py"]
    ends_by, code = _ending(given)
    log, processes = folder / "output_of_the_command.txt", as_processes(given)
    secret = {RUN_TOKEN: "shared by the hosts"} if len(processes) > 1 else {}
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        started = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment(), "OMP_NUM_THREADS": "1", **secret},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in processes
        ]
        codes = [_end_of(process, log, ends_by) for process in started]
    said = log.read_text(encoding="utf-8", errors="replace")
    outcome.record(line, " ".join(given), codes, wanted if code is None else code, time.monotonic() - begun, said)


def _ending(words: Sequence[str]) -> tuple[signal.Signals | None, int | None]:
    if words[:2] == ["trainwright", "watch"]:
        return _WATCH
    return _FIT if "max_steps=1000000" in words else (None, None)


def _end_of(process: subprocess.Popen[bytes], log: Path, ends_by: signal.Signals | None) -> int:
    deadline = time.monotonic() + _SECONDS
    try:
        while ends_by is not None and process.poll() is None and time.monotonic() < deadline:
            if re.search(r"\bstep +\d", log.read_text(encoding="utf-8", errors="replace")):
                process.send_signal(ends_by)
                break
            time.sleep(0.5)
        return process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
