"""A member process of an elastic run, which takes part in generation after generation."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.failures.error_text import is_secondary, stands_alone
from trainwright.core.failures.failure import FailureRecorder, log_file
from trainwright.core.failures.records import StepRecord, write_result
from trainwright.core.processes.watch import ShutdownWatch
from trainwright.core.run.run_directory import read_config
from trainwright.launch.members.mailbox import NOW, Announcement, LeaveReport, Mailbox, records_of, waited
from trainwright.launch.ranks.forkserver import restore_defaults
from trainwright.launch.ranks.output import Output
from trainwright.launch.ranks.rendezvous import ADDRESS, of_rank

if TYPE_CHECKING:
    from trainwright.callbacks.end.regrouping import Regrouping
    from trainwright.checkpoint.memory.snapshots import Snapshot, Snapshots

# Poll interval of the call to leave, for members blocked in an NCCL collective, which nothing interrupts.
_POLL_SECONDS = 0.5
_MEET_SECONDS = 300.0
# Wait for news of a lost member before an error counts as this member's own.
_CALL_WAIT_SECONDS = 1.0


def member_main(environment: Mapping[str, str], verb: str, run_dir: Path, records: Path, mailbox: Path) -> None:
    """Run one member until the run, or its part in it, ends.

    Args:
        environment: variables of this process; `TRAINWRIGHT_MEMBER` is its number.
        verb: fit.
        run_dir: of the run.
        records: folder for failures and, from rank 0, the final metrics.
        mailbox: folder of the messages between the members and the launching process.

    Raises:
        SystemExit: with exit code 1 after a recorded error; unchanged if the user's code raised it.
    """
    os.environ.update(environment)
    member = Member(int(environment["TRAINWRIGHT_MEMBER"]), verb, run_dir, records, Mailbox(mailbox))
    try:
        restore_defaults()
        ShutdownWatch.start_in_rank(read_config(run_dir).launch.grace_seconds)
        member.run()
    except SystemExit:
        raise
    except BaseException as error:
        member.record(error)
        raise SystemExit(1) from None  # the launching process prints the recorded error; here it would appear twice


class Member:
    """A process that takes part in generation after generation.

    Args:
        number: of this member.
        verb: fit.
        run_dir: of the run.
        records: folder for failures and, from rank 0, the final metrics.
        mailbox: messages.
    """

    def __init__(self, number: int, verb: str, run_dir: Path, records: Path, mailbox: Mailbox) -> None:
        self._number = number
        self._verb = verb
        self._run_dir = run_dir
        self._records = records
        self._mailbox = mailbox
        self._output = Output()
        self._recorder = FailureRecorder(records_of(records, None), number)
        self._snapshots: Snapshots | None = None
        self._generation = -1

    def run(self) -> None:
        """Wait to join, and train in each generation until training ends or this member is killed."""
        from trainwright.checkpoint.memory.snapshots import Snapshots

        self._snapshots = Snapshots(keep=2)
        import_module("trainwright.launch.worker")
        gc.freeze()  # exclude the imports from garbage collection, which leaving groups triggers
        self._mailbox.report_ready(self._number)
        while True:
            announcement = self._mailbox.wait_for_generation(self._number, self._generation)
            self._generation = announcement.generation
            metrics = self._train(announcement)
            if metrics is not None:
                if announcement.members[0] == self._number:
                    write_result(self._records, metrics)
                return

    def record(self, error: BaseException) -> None:
        """Record the error that ends this member."""
        self._recorder.record(error)

    # ---- one generation ---------------------------------------------------------------------------------------------

    def _train(self, announcement: Announcement) -> dict[str, float] | None:
        """Train in a generation; return the final metrics, or None if the generation ended."""
        from trainwright.launch.ranks.progress import BeginningReport
        from trainwright.launch.worker import run_verb

        cfg = OmegaConf.create(announcement.config)
        assert isinstance(cfg, DictConfig)
        rank = announcement.members.index(self._number)
        os.environ.update(
            of_rank(rank, len(announcement.members), (ADDRESS, announcement.port), announcement.generation)
        )
        self._output.to(None if rank == 0 else log_file(self._run_dir, rank))
        records = records_of(self._records, announcement.generation)
        self._recorder = FailureRecorder(records, rank, self._run_dir)
        callbacks = [BeginningReport(records), self._regrouping(cfg, StepRecord(records, rank))]
        seen: list[BaseException] = []
        try:
            held = self._state(announcement, rank)
            with _abort_on_call(self._mailbox, announcement.generation):
                return run_verb(cfg, self._verb, seen.append, held=held, more_callbacks=callbacks)
        except BaseException as error:
            if not self._generation_ended(seen[0] if seen else error, announcement.generation):
                self._recorder.record(seen[0] if seen else error)
                raise
            self._leave_generation(error, announcement)
            return None

    def _regrouping(self, cfg: DictConfig, record: StepRecord) -> Regrouping:
        from trainwright.callbacks.end.regrouping import Regrouping

        board, generation = self._mailbox.board, self._generation

        def must_leave(step: int) -> bool:
            called = board.called(generation)
            return called is not None and step >= called

        assert self._snapshots is not None
        return Regrouping(self._snapshots, cfg.launch.mtbf, must_leave, record.write)

    def _state(self, announcement: Announcement, rank: int) -> Snapshot | None:
        """Return the state to continue from: this member's own snapshot, or one received from another member."""
        from trainwright.checkpoint.memory.transfer import receive, send
        from trainwright.strategies.contract.groups import destroy_groups

        assert self._snapshots is not None
        if announcement.step is None:
            return None
        held = None
        if self._number not in announcement.sources:
            self._snapshots.forget_after(announcement.step)
            held = self._snapshots.newest(announcement.step)
            if held is None or held.step != announcement.step:
                raise RuntimeError(f"member {self._number} has no in-memory snapshot of step {announcement.step}")
        if not announcement.sources:
            return held
        group = _meet_members(rank, len(announcement.members))
        try:
            for member, source in announcement.sources.items():
                if self._number == source:
                    assert held is not None
                    send(held, announcement.members.index(member), group)
                elif self._number == member:
                    held = receive(announcement.members.index(source), group)
        finally:
            del group
            destroy_groups()
        return held

    # ---- the end of a generation ------------------------------------------------------------------------------------

    def _generation_ended(self, error: BaseException, generation: int) -> bool:
        """Return whether an error only means that the members leave; else it is this member's own."""
        from trainwright.callbacks.end.regrouping import Regroup

        if isinstance(error, Regroup):
            return True
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return False
        if is_secondary(error):
            return True
        if stands_alone(error):
            return False
        # An error caused by a lost member need not say so; the launching process calls when one is lost.
        called: int | None = waited(lambda: self._mailbox.board.called(generation), _CALL_WAIT_SECONDS)
        return called == NOW

    def _leave_generation(self, error: BaseException, announcement: Announcement) -> None:
        """Drop the connections to the other members and report it."""
        from trainwright.callbacks.end.regrouping import Regroup
        from trainwright.callbacks.inject.network import Endpoint, cut_off
        from trainwright.strategies.contract.groups import destroy_groups

        assert self._snapshots is not None
        text = None if isinstance(error, Regroup) else f"{type(error).__name__}: {error}"
        _clear_tracebacks(error)
        if text is not None:
            # Members that wait for this one must not wait longer; groups are only freed once nothing refers to them.
            others = [Endpoint("", pid, ()) for pid in announcement.pids if pid != os.getpid()]
            cut_off(Endpoint("", os.getpid(), ()), others)
        destroy_groups()
        steps = tuple(self._snapshots.steps())
        self._mailbox.report_leave(self._generation, LeaveReport(self._number, steps, text))


def _meet_members(rank: int, size: int) -> Any:
    """Return a gloo group of all members of a generation, for use before training creates its own."""
    import torch.distributed as dist

    timeout = timedelta(seconds=_MEET_SECONDS)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    own = dist.PrefixStore("handing_over", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
    return dist.group.WORLD


def _clear_tracebacks(error: BaseException | None) -> None:
    """Drop the references in an error's frames: strategies, and through them process groups and device memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


@contextlib.contextmanager
def _abort_on_call(mailbox: Mailbox, generation: int) -> Iterator[None]:
    """Abort NCCL collectives when the members are called to leave at once.

    gloo raises on a broken connection; an NCCL kernel waits for the lost peer.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_POLL_SECONDS):
            if mailbox.board.called(generation) == NOW:
                from trainwright.strategies.contract.groups import abort_groups

                abort_groups()
                return

    thread = threading.Thread(target=look, name="trainwright-regroup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
