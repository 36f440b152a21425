"""Evidence about one rank that may hang."""

from dataclasses import dataclass, field

from trainwright.core.processes.process import IN_KERNEL, STOPPED, TRACED
from trainwright.launch.watchdog.answers import Answer
from trainwright.launch.watchdog.boxes import Progress
from trainwright.launch.watchdog.calls import Call
from trainwright.launch.watchdog.report import waits
from trainwright.launch.watchdog.report.stacks import Frame, Thread
from trainwright.launch.watchdog.report.waits import Wait

# Kinds of waits that no stack shows, beside those of trainwright.launch.watchdog.report.waits.
HALTED, KERNEL, SILENT = "halted", "kernel", "silent"


@dataclass(frozen=True)
class Child:
    """A process started by the rank, such as a data loader worker.

    Attributes:
        process: its id.
        name: that it has set.
        state: in the kernel.
        stacks: written by Python's C handler; ``""`` = none.
    """

    process: int
    name: str
    state: str
    stacks: str = ""


@dataclass(frozen=True)
class Evidence:
    """Evidence about one rank.

    Attributes:
        progress: its box.
        stalled: seconds since its last change.
        limit: time limit of its phase in seconds.
        slow_limit: time limit in seconds of work that is known to be slow.
        answer: its report; ``None`` = it did not answer.
        asked: whether it listened to questions, as it does only within its run.
        state: of its process.
        stacks: written by Python's C handler for a rank that did not answer; ``""`` = none.
        children: collected while it waits for data.
        halted: whether a signal has kept its process stopped for too long.
    """

    progress: Progress
    stalled: float
    limit: float
    slow_limit: float
    answer: Answer | None = None
    asked: bool = True
    state: str = ""
    stacks: str = ""
    children: tuple[Child, ...] = field(default=())
    halted: bool = False

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.progress.rank

    @property
    def thread(self) -> Thread | None:
        """The thread that does the rank's work."""
        return None if self.answer is None else waits.acting_thread(self.answer.threads)

    @property
    def wait(self) -> Wait:
        """The cause of its wait."""
        if self.state == STOPPED:
            return Wait(HALTED, "stopped by a signal (SIGSTOP)")
        if self.answer is None and self.state == TRACED:
            return Wait(waits.DEBUGGER, "held by a debugger")
        if self.answer is None and self.state == IN_KERNEL:
            return Wait(KERNEL, "waiting in the kernel (state D: a disk or driver that does not answer)")
        if not self.asked:
            return Wait(waits.NATIVE, "outside of its run, where it cannot be asked")
        if self.answer is None:
            return Wait(SILENT, "in native code that does not let go of Python's lock (GIL)")
        return self._wait_of_thread(self.answer)

    @property
    def pending(self) -> tuple[Call, ...]:
        """Its collective calls that are not complete, oldest first."""
        return () if self.answer is None else tuple(call for call in self.answer.calls if call.pending)

    @property
    def exceeds_limit(self) -> bool:
        """Whether it has exceeded its limit."""
        kind = self.wait.kind
        if kind == HALTED:
            return self.progress.running and self.halted
        return self.progress.running and self.stalled > (self.slow_limit if kind == waits.COMPILING else self.limit)

    @property
    def place(self) -> Frame | None:
        """The innermost line of the user's code, or of a library's if there is none."""
        thread = self.thread
        if thread is None or not thread.frames:
            return None
        return thread.users[0] if thread.users else thread.frames[0]

    def _wait_of_thread(self, answer: Answer) -> Wait:
        thread = waits.acting_thread(answer.threads)
        wait = waits.wait_of(thread)
        for_others = Wait(waits.COMMUNICATION, "waiting for other ranks")
        if self.pending and (
            # torch waits below Python: autograd for the gradients that DDP sends, or for results of the accelerator.
            (wait.kind == waits.TORCH and thread.state != "R")
            or (answer.on_accelerator and wait.kind in (waits.TORCH, waits.COMPUTING, waits.NATIVE))
        ):
            return for_others
        if wait.kind == waits.TORCH and thread.state != "R":
            return Wait(waits.NATIVE, "waiting in native code")
        return wait
