"""Commands started in a user's project, with signals and checks of what they leave."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.command.project import command, environment, run_command, write_project
from tests.warm import WarmPopen
from trainwright.core.processes.process import PARENT, stat_of

# Long enough to be interrupted.
WORDS = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=csv", "run_dir=run")
ENDLESS = ("module.sleep=0.05", "max_steps=100000", "max_epochs=100000")
# Seconds that a command has to train, and to end, on a machine that does much else. Less than the deadline of
# preemption, by which a command that hangs ends as well.
LIMIT = 100.0

CALLBACKS = """
import os
import time

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from my_module import MyData


class WorkerData(MyData):
    def train_dataloader(self):
        plain = super().train_dataloader()
        return DataLoader(plain.dataset, plain.batch_size, num_workers=1, persistent_workers=True)


class SlowSave(pl.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.received_sigterm:
            time.sleep(1000)


class Ends(pl.Callback):
    def __init__(self, how, step=2):
        self.how, self.step = how, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            exec(self.how)
"""


def write_faulty_project(folder: Path) -> Path:
    """A project with callbacks that make trouble; returns its configuration directory."""
    (folder / "trouble.py").write_text(CALLBACKS, encoding="utf-8")
    return write_project(folder)


class Command:
    """A running command, of which the output goes to a file.

    Args:
        words: of the command; a launcher may stand in front.
        started: a line of its output that says that it trains.
        more: variables of its environment.
    """

    def __init__(
        self, words: Sequence[str], started: str = "first step of rank 0", more: dict[str, str] | None = None
    ) -> None:
        self.output = Path(f"output_{time.monotonic_ns()}")
        with self.output.open("wb") as file:
            self.process = WarmPopen(
                words, stdout=file, stderr=subprocess.STDOUT, env=environment() | (more or {}), start_new_session=True
            )
        try:
            self._wait_for(started)
        except BaseException:
            self.kill()
            raise

    def _wait_for(self, line: str) -> None:
        def is_said() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said()}"
            return line in self.said()

        until(is_said, repr(line))

    def said(self) -> str:
        """Return the output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def tell(self, number: int, to: Sequence[int] | None = None) -> None:
        """Send a signal to processes, by default to that of the command."""
        for process in [self.process.pid] if to is None else to:
            os.kill(process, number)

    def end(self, seconds: float = LIMIT) -> int:
        """Wait for its end; returns the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {seconds:g} s later; it said:\n{self.said()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """End it hard, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def session(self) -> dict[int, str]:
        """Living processes of its session: process id -> command line."""
        return session_of(self.process.pid)

    def left(self) -> dict[int, str]:
        """Processes of its session that do not end by themselves within seconds: process id -> command line."""
        end = time.monotonic() + 10
        while (found := self.session()) and time.monotonic() < end:
            time.sleep(0.05)  # Python's own tracker of resources ends when it finds that all others have
        return found

    def ranks(self) -> list[int]:
        """Processes of the ranks, which the command's fork server has forked, in the order of their start."""
        forked = [pid for pid, words in self.session().items() if "forkserver" in words]
        [server] = [pid for pid in forked if int(stat_of(pid)[PARENT]) == self.process.pid]
        return sorted(pid for pid in forked if int(stat_of(pid)[PARENT]) == server)


def until(holds: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: if it does not in time.
    """
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} has not happened within {seconds:g} s"
        time.sleep(0.01)


def session_of(leader: int) -> dict[int, str]:
    """Living processes of a session: process id -> command line."""
    found = {}
    for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        fields = stat_of(process)
        if fields and int(fields[3]) == leader and fields[0] != "Z":
            with suppress(OSError):  # it has just ended
                found[process] = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return found


def ends(how: str, step: int = 2) -> tuple[str, ...]:
    """Words that let rank 1 run a line of Python after a step."""
    return ("+callbacks.ends._target_=trouble.Ends", f"+callbacks.ends.how='{how}'", f"+callbacks.ends.step={step}")


def training(conf: Path, *more: str) -> list[str]:
    """A command that trains without end on two ranks."""
    return command("fit", "--config-dir", str(conf), *WORDS, *ENDLESS, *more)


def resume_from(conf: Path) -> str:
    """Resume from the latest checkpoint for one more step; return the output.

    Raises:
        AssertionError: if it cannot.
    """
    saved = max(int(path.name.split("=")[1]) for path in Path("run/checkpoints").glob("step=*"))
    words = ("fit", "--config-dir", str(conf), *WORDS, "ckpt_path=last", f"max_steps={saved + 1}", "max_epochs=100000")
    done = run_command(*words)
    assert done.returncode == 0, done.stdout
    assert Path(f"run/checkpoints/step={saved + 1}/manifest.json").exists()
    return done.stdout
