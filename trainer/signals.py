"""A notice to end: remembered here, agreed upon by the ranks, obeyed by the loops between two batches."""

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

from trainwright.callbacks.end.notice import FILE, URL, Notice, NoticePoll, Told
from trainwright.callbacks.end.preemption import Preemption
from trainwright.core.lightning_internals import _HANDLER, _SignalConnector
from trainwright.core.processes.watch import Allowance, ShutdownWatch
from trainwright.core.run.interrupt import raise_interrupted
from trainwright.core.run.peers import EndNotice, ReceivedNotice, peers_of
from trainwright.core.run.phases import AGREEMENT
from trainwright.core.run.traits import traits_of

if TYPE_CHECKING:
    from trainwright.trainer.leases.batches import LeasedBatchSampler

# Micro-batches between two agreements at most: of very short ones, and where there is nothing to go by.
MOST_BATCHES = 512
# How much longer one distance may be than the one before: the first batch of a loop says little about the others.
_GROWTH = 16


class Pace:
    """How many batches of one kind lie between two agreements: what takes about so many seconds on the slowest rank.

    Args:
        seconds: between two agreements.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.distance = 1
        self._passed = 0
        self._spent = 0.0

    def passed(self, seconds: float) -> bool:
        """Count a batch that took so long on this rank; whether the ranks are to agree after it."""
        self._passed += 1
        self._spent += seconds
        return self._passed >= self.distance

    @property
    def seconds_per_batch(self) -> float:
        """Of this rank, since the last agreement."""
        return self._spent / max(self._passed, 1)

    def settle(self, slowest: float) -> None:
        """Begin anew, by the seconds per batch of the slowest rank; every rank has to give the same."""
        wanted = self._seconds / slowest if slowest > 0 else MOST_BATCHES
        self.distance = max(1, int(min(wanted, self.distance * _GROWTH, MOST_BATCHES)))
        self._passed, self._spent = 0, 0.0


class FlagOnSignal(_SignalConnector):
    """Remembers that this rank was told to end, and finds out together with the others whether any was.

    Lightning's handler runs a broadcast inside the signal handler, which meets no partner when one rank alone is told
    to stop; where it sees ``received_sigterm`` set, it raises on this rank alone and leaves the others waiting in their
    next collective; and under SLURM it saves inside the handler, in the middle of whatever runs. None of that is done
    here: a handler sets a flag, the loops call :meth:`passed` after each batch, and where that says so they call
    :meth:`end`.

    Raises:
        ValueError: if Lightning's own requeueing is asked for.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._notice = Notice()
        self._process = os.getpid()
        self._without_callback = Preemption(signals=("SIGTERM",))
        # A callback may train before signals are listened to (LearningRateFinder, when fit starts).
        self._paces = {fits: Pace(self._without_callback.check_seconds) for fits in (True, False)}
        self._clock: Callable[[], float] = time.perf_counter
        self._last_batch = self._clock()  # when it ended
        self._heard: Told | None = None  # by the steps of ranks that step by themselves
        self._undo: list[Callable[[], object]] = []
        self.agreed: Told | None = None
        """What the ranks were told, once they have agreed that they were."""
        _refuse_requeueing(trainer)

    @property
    def preemption(self) -> Preemption:
        """What to do: as the first callback of this kind says, else what is done without one."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((each for each in callbacks if isinstance(each, Preemption)), self._without_callback)

    # ---- what comes in ----------------------------------------------------------------------------------------------

    def register_signal_handlers(self) -> None:
        """Listen to signals, and to the file and the address if there are any."""
        preemption = self.preemption
        self.received_sigterm, self.agreed, self._heard = False, None, None
        self._process = os.getpid()  # a notice that was not obeyed yet, in the fit before, still counts
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
            launcher.kill(number)  # the ranks that this process has started

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
        """Give the process the time that a save takes, and no more."""
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING or not preemption.save:
            return  # then it ends after the batch, within the time that the process has anyway
        watch = self._watch()
        if watch is None:
            return

        def told(number: int) -> Told:
            return self._known or Told(number, time.monotonic())

        allowance = Allowance(
            numbers=(*preemption.numbers, FILE, URL),
            seconds=preemption.deadline_seconds,
            exit_code=lambda number: preemption.code_for(told(number)),
            last_words=lambda number: preemption.give_up(trainer, told(number)),
        )
        self._undo.append(watch.allow(allowance))

    def _watch(self) -> ShutdownWatch | None:
        """The watch of this process; in a script that has none, one for the time of this run."""
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
        """Let the process end in time where no signal has come to it."""
        told, watch, seconds = self._known, ShutdownWatch.of_process(), None
        if self.trainer.state.fn == TrainerFn.FITTING and self.preemption.save:
            seconds = self.preemption.deadline_seconds
        if told is not None and watch is not None and seconds is not None:
            watch.end_at(told.since + seconds, told.number)

    @property
    def _known(self) -> Told | None:
        return self.agreed or self._heard or self._notice.told

    # ---- agreeing ---------------------------------------------------------------------------------------------------

    def passed(self, fits: bool, even: bool = True, met: bool = False) -> bool:
        """Count one batch, and every so often ask all ranks; whether they have agreed to end.

        Args:
            fits: whether it is a batch of training.
            even: whether every rank has this batch; else nobody is asked.
            met: whether ranks that step by themselves are together here, such as at the end of an epoch; then they ask
                each other in any case. After other batches of training they never do, but hear of a notice by their
                steps, if the strategy has a way.
        """
        if self.trainer.world_size == 1:
            self.agreed = self._notice.told
        elif fits and not self._in_step:
            self._last_batch = self._clock()
            if met:
                self._agree(self._paces[fits])
            elif self.agreed is None:
                self._hear()
        elif self.agreed is None and even:
            now, pace = self._clock(), self._paces[fits]
            due = pace.passed(now - self._last_batch)
            self._last_batch = now
            if due:
                self._agree(pace)
        return self.agreed is not None

    @property
    def _in_step(self) -> bool:
        """Whether all ranks are at the same step of training."""
        return traits_of(self.trainer.strategy).steps_are_collective

    def _hear(self) -> None:
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
        if self._heard is None:
            self._heard = Told(heard.number, time.monotonic() - heard.age)
            self._keep_deadline()
        if heard.steps_left == 0:
            self.agreed = self._heard

    def tell_lessor(self, leased: LeasedBatchSampler) -> None:
        """Where samples are leased, after each step: let all hear what this rank was told."""
        mine = self._own_notice()
        if mine is not None and leased.heard_of_end is None and self.trainer.world_size > 1:
            leased.tell_of_end(mine.number, mine.age)

    def _own_notice(self) -> EndNotice | None:
        told = self._notice.told
        return None if told is None else EndNotice(told.number, time.monotonic() - told.since)

    def _agree(self, pace: Pace) -> None:
        told, now = self._notice.told, time.monotonic()
        mine = [0.0, 0.0] if told is None else [float(told.number), now - told.since]
        # The largest of each: whoever was told, who was told first, and the slowest.
        answers = torch.tensor([*mine, pace.seconds_per_batch], dtype=torch.float64)
        if dist.is_available() and dist.is_initialized():
            trainer: Any = self.trainer
            with trainer.phases.within(AGREEMENT):
                dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=trainer.agreement_group())
        number, ago, slowest = answers.tolist()
        pace.settle(slowest)
        if number:
            self.agreed = Told(int(number), now - ago)
            self._keep_deadline()

    def end(self) -> NoReturn:
        """Save and end, on all ranks at once.

        Raises:
            Preempted: always.
        """
        assert self.agreed is not None
        self._notice = Notice()  # obeyed
        if not self._in_step:
            # Whoever ends takes what it holds for the others with it.
            peers_of(self.trainer.strategy).meet()
            self.trainer.strategy.barrier()
        self.received_sigterm = True  # callbacks may ask the Trainer why it ends
        self.preemption.end(self.trainer, self.agreed)

    # ---- afterwards -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            self._undo.pop()()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_undo": [], "_notice": Notice()}


def _is_of_user(handler: _HANDLER) -> TypeGuard[Callable[[int, FrameType | None], object]]:
    return callable(handler) and handler not in (raise_interrupted, signal.default_int_handler)


def _end_forked(number: int, frame: FrameType | None, existing: _HANDLER) -> None:
    """What the handler does in a process that was forked meanwhile, and has inherited it.

    SIGTERM ends it, as without us: who sends it waits for that end (``Pool.terminate``, say). The other signals come
    from a scheduler, which sends them to every process of a job, and the run is to go on until it has saved.
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
