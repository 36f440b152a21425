"""Stop notices: recorded here, agreed upon by the ranks, obeyed by the loops between two batches."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from trainwright.callbacks.end.notice import FILE, URL, NoticeBox, NoticePoll, StopNotice
from trainwright.callbacks.end.preemption import Preemption
from trainwright.core.lightning_internals import _HANDLER, _SignalConnector
from trainwright.core.processes.watch import Allowance, ShutdownWatch
from trainwright.core.run.interrupt import raise_interrupted
from trainwright.core.run.peers import EndNotice, ReceivedNotice, peers_of
from trainwright.core.run.phases import AGREEMENT
from trainwright.core.run.traits import traits_of

if TYPE_CHECKING:
    from trainwright.trainer.leases.batches import LeasedBatchSampler

# Maximum micro-batches between two agreements.
MOST_BATCHES = 512
# Maximum growth of that distance: the first batch of a loop is not representative.
_GROWTH = 16


class Pace:
    """Number of batches between two agreements, such that they take about ``seconds`` on the slowest rank."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.distance = 1
        self._passed = 0
        self._spent = 0.0

    def passed(self, seconds: float) -> bool:
        """Count a batch of this rank's ``seconds``, and return whether the ranks must agree after it."""
        self._passed += 1
        self._spent += seconds
        return self._passed >= self.distance

    @property
    def seconds_per_batch(self) -> float:
        """Mean of this rank since the last agreement."""
        return self._spent / max(self._passed, 1)

    def settle(self, slowest: float) -> None:
        """Start over, given the seconds per batch of the slowest rank; equal on every rank."""
        wanted = self._seconds / slowest if slowest > 0 else MOST_BATCHES
        self.distance = max(1, int(min(wanted, self.distance * _GROWTH, MOST_BATCHES)))
        self._passed, self._spent = 0, 0.0


class FlagOnSignal(_SignalConnector):
    """Records stop notices, and finds out together with the other ranks whether any was given.

    Lightning's handler broadcasts inside the signal handler, which blocks if only one rank is signaled; where it sees
    ``received_sigterm`` set, it raises on this rank alone and leaves the others in their next collective; under SLURM
    it saves inside the handler. Here a handler only sets a flag; the loops call :meth:`passed` after each batch, and
    :meth:`end` if it returns true.

    Attributes:
        agreed: the notice that all ranks have agreed on.

    Raises:
        ValueError: if Lightning's own requeueing is requested.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._notice = NoticeBox()
        self._process = os.getpid()
        self._without_callback = Preemption(signals=["SIGTERM"])
        # A callback may train before handlers are registered (LearningRateFinder, when fit starts).
        self._paces = {fits: Pace(self._without_callback.check_seconds) for fits in (True, False)}
        self._clock: Callable[[], float] = time.perf_counter
        self._last_batch = self._clock()  # its end
        self._received: StopNotice | None = None  # from asynchronous ranks
        self._undo: list[Callable[[], object]] = []
        self.agreed: StopNotice | None = None
        _refuse_requeueing(trainer)

    @property
    def preemption(self) -> Preemption:
        """The first callback of this kind, or the default."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((each for each in callbacks if isinstance(each, Preemption)), self._without_callback)

    # ---- incoming notices -------------------------------------------------------------------------------------------

    def register_signal_handlers(self) -> None:
        """Register signal handlers, and start polling the file and the address."""
        preemption = self.preemption
        self.received_sigterm, self.agreed, self._received = False, None, None
        self._process = os.getpid()  # a notice pending from an earlier fit still counts
        self._paces = {fits: Pace(preemption.check_seconds) for fits in (True, False)}
        self._last_batch = self._clock()
        self._original_handlers = self._get_current_signal_handlers()
        self._limit_time(preemption)
        for number in preemption.numbers:
            self._register_signal(signal.Signals(number), self._with_existing(number))
        self._poll(preemption)

    def _with_existing(self, number: int) -> _HANDLER:
        existing = signal.getsignal(number)

        def handle(received: int, frame: FrameType | None) -> None:
            if os.getpid() != self._process:
                _end_forked(received, frame, existing)
                return
            self._on_notice(received)
            if _is_of_user(existing):
                existing(received, frame)

        return handle

    def _on_notice(self, number: int) -> None:
        launcher = self.trainer.strategy.launcher
        if self._notice.give(number) and launcher is not None and number not in (FILE, URL):
            launcher.kill(number)  # ranks started by this process

    def _poll(self, preemption: Preemption) -> None:
        if (preemption.file is None and preemption.url is None) or self.trainer.local_rank != 0:
            return

        def on_notice(number: int) -> None:
            self._on_notice(number)
            self._keep_deadline()

        poll = NoticePoll(preemption.file, preemption.url, preemption.url_headers, preemption.poll_seconds, on_notice)
        poll.start()
        self._undo.append(poll.stop)

    # ---- the deadline -----------------------------------------------------------------------------------------------

    def _limit_time(self, preemption: Preemption) -> None:
        """Limit the time from a notice to the end of the process."""
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING or not preemption.save:
            return  # it ends after the batch
        watch = self._watch()
        if watch is None:
            return

        def notice(number: int) -> StopNotice:
            return self._known or StopNotice(number, time.monotonic())

        allowance = Allowance(
            numbers=(*preemption.numbers, FILE, URL),
            seconds=preemption.deadline_seconds,
            exit_code=lambda number: preemption.code_for(notice(number)),
            last_words=lambda number: preemption.give_up(trainer, notice(number)),
        )
        self._undo.append(watch.allow(allowance))

    def _watch(self) -> ShutdownWatch | None:
        """Return the watch of this process; a script without one gets one for this run."""
        watch = ShutdownWatch.of_process()
        # A script with a wake-up descriptor of its own (an event loop) keeps it.
        is_free = watch is None and os.name == "posix" and threading.current_thread() is threading.main_thread()
        if not is_free or not _wakeup_is_free():
            return watch
        watch = ShutdownWatch(grace_seconds=None)
        watch.start()
        self._undo.append(watch.stop)
        return watch

    def _keep_deadline(self) -> None:
        """Enforce the deadline without a signal to this process."""
        notice, watch, seconds = self._known, ShutdownWatch.of_process(), None
        if self.trainer.state.fn == TrainerFn.FITTING and self.preemption.save:
            seconds = self.preemption.deadline_seconds
        if notice is not None and watch is not None and seconds is not None:
            watch.end_at(notice.since + seconds, notice.number)

    @property
    def _known(self) -> StopNotice | None:
        return self.agreed or self._received or self._notice.notice

    # ---- agreement --------------------------------------------------------------------------------------------------

    def passed(self, fits: bool, even: bool = True, met: bool = False) -> bool:
        """Count one batch, from time to time synchronize with all ranks, and return whether they agreed to end.

        Args:
            fits: whether it is a training batch.
            even: whether every rank has this batch; without it ranks do not synchronize.
            met: whether asynchronous ranks are synchronized here, such as at the end of an epoch; then they agree.
                After other training batches they only exchange notices with their steps, if the strategy supports it.
        """
        if self.trainer.world_size == 1:
            self.agreed = self._notice.notice
        elif fits and not self._is_synchronous:
            self._last_batch = self._clock()
            if met:
                self._agree(self._paces[fits])
            elif self.agreed is None:
                self._receive()
        elif self.agreed is None and even:
            now, pace = self._clock(), self._paces[fits]
            due = pace.passed(now - self._last_batch)
            self._last_batch = now
            if due:
                self._agree(pace)
        return self.agreed is not None

    @property
    def _is_synchronous(self) -> bool:
        """True if all ranks are at the same training step."""
        return traits_of(self.trainer.strategy).steps_are_collective

    def _receive(self) -> None:
        leased = self.trainer.fit_loop.leased  # type: ignore[attr-defined]
        heard: ReceivedNotice | None
        if leased is not None:
            heard = leased.heard_of_end
        else:
            peers = peers_of(self.trainer.strategy)
            peers.tell_of_end(self._own_notice)
            heard = peers.heard_of_end
        if heard is None:
            return
        if self._received is None:
            self._received = StopNotice(heard.number, time.monotonic() - heard.age)
            self._keep_deadline()
        if heard.steps_left == 0:
            self.agreed = self._received

    def notify_lessor(self, leased: LeasedBatchSampler) -> None:
        """Send this rank's notice to all after a step, with leased samples."""
        mine = self._own_notice()
        if mine is not None and leased.heard_of_end is None and self.trainer.world_size > 1:
            leased.send_end_notice(mine.number, mine.age)

    def _own_notice(self) -> EndNotice | None:
        notice = self._notice.notice
        return None if notice is None else EndNotice(notice.number, time.monotonic() - notice.since)

    def _agree(self, pace: Pace) -> None:
        notice, now = self._notice.notice, time.monotonic()
        mine = [0.0, 0.0] if notice is None else [float(notice.number), now - notice.since]
        # The maximum of each: any notice, the earliest one, and the slowest rank.
        answers = torch.tensor([*mine, pace.seconds_per_batch], dtype=torch.float64)
        if dist.is_available() and dist.is_initialized():
            trainer: Any = self.trainer
            with trainer.phases.within(AGREEMENT):
                dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=trainer.agreement_group())
        number, ago, slowest = answers.tolist()
        pace.settle(slowest)
        if number:
            self.agreed = StopNotice(int(number), now - ago)
            self._keep_deadline()

    def end(self) -> NoReturn:
        """Save and end on all ranks together.

        Raises:
            Preempted: always.
        """
        assert self.agreed is not None
        self._notice = NoticeBox()  # obeyed
        if not self._is_synchronous:
            # A rank that ends takes what it holds for the others with it.
            peers_of(self.trainer.strategy).meet()
            self.trainer.strategy.barrier()
        self.received_sigterm = True  # read by callbacks
        self.preemption.end(self.trainer, self.agreed)

    # ---- teardown ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Restore signal handlers."""
        while self._undo:
            self._undo.pop()()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_undo": [], "_notice": NoticeBox()}


def _is_of_user(handler: _HANDLER) -> TypeGuard[Callable[[int, FrameType | None], object]]:
    return callable(handler) and handler not in (raise_interrupted, signal.default_int_handler)


def _end_forked(number: int, frame: FrameType | None, existing: _HANDLER) -> None:
    """Handle a signal in a forked process, which has inherited the handler.

    SIGTERM ends it, as the sender (such as ``Pool.terminate``) waits for that. Other signals come from a scheduler,
    which sends them to all processes of a job, and must not end it before the run has saved.
    """
    if number != signal.SIGTERM or existing == signal.SIG_IGN:
        return
    if _is_of_user(existing):
        existing(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _wakeup_is_free() -> bool:
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor)
    return descriptor == -1


def _refuse_requeueing(trainer: Trainer) -> None:
    given = trainer._accelerator_connector._cluster_environment_flag
    if isinstance(given, SLURMEnvironment) and given.auto_requeue:
        raise ValueError(
            "SLURMEnvironment(auto_requeue=True) saves within a signal handler, in the middle of a step. Pass "
            "SLURMEnvironment(auto_requeue=False) and the callback Preemption(requeue=True) instead."
        )
