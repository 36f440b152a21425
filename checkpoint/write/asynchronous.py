"""Synchronous and asynchronous savers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import any_of_ranks, problems_of_ranks
from trainwright.checkpoint.format.manifest import Manifest, verify
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.assignment import WriteAssigner
from trainwright.checkpoint.write.retention import KEPT
from trainwright.checkpoint.write.save import Content, with_assignment, write
from trainwright.checkpoint.write.staging import Staged, Staging
from trainwright.core.errors import CheckpointError, ClearingError, DamagedCheckpoint

After = Callable[[Manifest], None]
ReadBackIf = Callable[[Manifest], bool]


@dataclass(frozen=True)
class Saved:
    """Outcome of a save.

    Args:
        path: of the checkpoint.
        error: why it failed, the same on every rank; ``None``: it succeeded.
        blocked_seconds: how long training was blocked.
        written_seconds: from the beginning until the checkpoint was readable.
    """

    path: str
    error: CheckpointError | None
    blocked_seconds: float
    written_seconds: float


def save_together(
    content: Content,
    path: str,
    group: dist.ProcessGroup | None,
    after: After | None = None,
    staged: Staged | None = None,
    problem: BaseException | None = None,
    read_back_if: ReadBackIf | None = None,
) -> None:
    """Write a checkpoint, run a follow-up on the first rank, and end alike on every rank. A collective.

    Args:
        content: of this rank.
        path: of the checkpoint.
        group: a gloo group of all ranks for exclusive use; ``None``: this process alone.
        after: called on the first rank with the published manifest.
        staged: waited for before ``content`` is read.
        problem: error that prevents this rank from saving; then nothing is written.
        read_back_if: called on the first rank, but given on all ranks or none: whether ``after`` depends on the
            checkpoint being intact. Then all ranks verify it, each a share of the files, and ``after`` is called if it
            is intact; ``None``: no verification.

    Raises:
        ClearingError: on every rank, if the checkpoint is saved and ``after`` failed.
        CheckpointError: on every rank, if anything else failed on any of them.
    """
    if staged is not None and problem is None:
        try:
            staged.wait()
        except Exception as error:
            problem = error
    _agree(problem, path, group)
    manifest = write(content, path, group)
    problem = None if read_back_if is None else _read_back(manifest, path, group, read_back_if)
    if after is not None and manifest is not None and problem is None:
        try:
            after(manifest)
        except Exception as error:
            problem = error
    _agree(problem, path, group, is_saved=not isinstance(problem, DamagedCheckpoint))


def _read_back(
    manifest: Manifest | None, path: str, group: dist.ProcessGroup | None, read_back_if: ReadBackIf
) -> BaseException | None:
    """Verify what was published; return the problem on the first rank. A collective."""
    problem: BaseException | None = None
    wanted = False
    try:
        wanted = manifest is not None and read_back_if(manifest)
    except Exception as error:
        problem = error
    if not any_of_ranks(wanted, group):
        return problem
    share = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    try:
        wrong = verify(path, part=share)
    except Exception as error:  # the other ranks wait for the result
        wrong = [str(error)]
    found = problems_of_ranks(wrong or None, group)
    if manifest is None or not found:
        return None
    return DamagedCheckpoint(path, [*(text for texts in found.values() for text in texts), KEPT])


def _agree(
    problem: BaseException | None, path: str, group: dist.ProcessGroup | None, *, is_saved: bool = False
) -> None:
    """Raise on every rank if one has a problem."""
    own = None if problem is None else (str(problem) or type(problem).__name__, is_saved)
    found = problems_of_ranks(own, group)
    if not found:
        return
    causes = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in found.items())
    if all(saved for _, saved in found.values()):
        raise ClearingError(f"{path} is saved, but older checkpoints could not be deleted: {causes}") from problem
    raise CheckpointError(f"Saving {path} failed: {causes}") from problem


class BlockingSaver:
    """Synchronous saver with the interface of :class:`AsyncSaver`.

    Args:
        group: returns a gloo group of all ranks for exclusive use during a save, or ``None`` for this process alone;
            called at every save, on all ranks.
    """

    @property
    def in_flight(self) -> str | None:
        """Path of the checkpoint being written; ``None`` if there is none."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory held for copies."""
        return 0

    def __init__(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._make_group = group
        self._assigner: WriteAssigner | None = None
        self._saved: Saved | None = None

    def prepare(self, tensors: Mapping[str, TensorParts]) -> None:
        """Do nothing."""

    def save(
        self, content: Content, path: str, after: After | None = None, read_back_if: ReadBackIf | None = None
    ) -> None:
        """Write ``content``; the outcome is kept for :meth:`take`. A collective."""
        begin = time.perf_counter()
        error: CheckpointError | None = None
        try:
            group = self._make_group()
            if self._assigner is None or self._assigner.group is not group:
                self._assigner = WriteAssigner(group)
            content = with_assignment(content, self._assigner)
            save_together(content, path, group, after, read_back_if=read_back_if)
        except CheckpointError as failure:
            error = failure
        taken = time.perf_counter() - begin
        self._saved = Saved(path, error, taken, taken)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True: no save is in flight."""
        return True

    def all_done(self, group: dist.ProcessGroup | None) -> bool:
        """Return True: no save is in flight on any rank."""
        return True

    def take(self) -> Saved | None:
        """Wait for a save in flight and return the outcome once; ``None`` if none has ended since."""
        self.wait()
        saved, self._saved = self._saved, None
        return saved

    def release(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class AsyncSaver(BlockingSaver):
    """Saver that writes checkpoints in a thread while training continues.

    :meth:`save` copies the tensors that this rank writes into reused memory and returns; a thread writes the copy. At
    most one save is in flight: the next one waits for it.

    Args:
        make_group: creates a gloo group of all ranks for exclusive use (or returns ``None`` for this process alone);
            called once, on all ranks, on first use. Concurrent collectives of two threads on one group mix up their
            messages.
    """

    def __init__(self, make_group: Callable[[], dist.ProcessGroup | None]) -> None:
        super().__init__(make_group)
        self._staging = Staging()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._path = ""

    @property
    def in_flight(self) -> str | None:
        """Path of the checkpoint being written; ``None`` if there is none."""
        return self._path if self._thread is not None and self._thread.is_alive() else None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory held for copies."""
        return self._staging.num_bytes

    def prepare(self, tensors: Mapping[str, TensorParts]) -> None:
        """Allocate memory for a copy, in a thread, before the first save. A collective.

        Args:
            tensors: what will be saved, or most of it.
        """
        own = self._connect().assign(tensors)

        def run() -> None:
            with suppress(Exception):  # out of memory: the save will fail on every rank
                self._staging.prepare(own)

        self._preparing = threading.Thread(target=run, name="trainwright-prepare", daemon=True)
        self._preparing.start()

    def save(
        self, content: Content, path: str, after: After | None = None, read_back_if: ReadBackIf | None = None
    ) -> None:
        """Copy ``content``, start writing it, and return. A collective.

        The caller must have taken the outcome of the previous save (:meth:`take`), so that no error is lost.

        Args:
            content: of this rank; it may change as soon as this returns.
            path: of the checkpoint.
            after: called on the first rank, in the thread, with the published manifest.
            read_back_if: see :func:`save_together`; called in the thread.
        """
        begin = time.perf_counter()
        self.wait()
        assert self._saved is None, "the outcome of the previous save was not taken"
        own, staged, problem = self._stage(content)
        self._path = path
        blocked = time.perf_counter() - begin

        def run() -> None:
            error: CheckpointError | None = None
            try:
                save_together(own, path, self._group, after, staged, problem, read_back_if)
            except CheckpointError as failure:
                error = failure
            except BaseException as failure:  # nothing may end this thread unreported
                error = CheckpointError(f"Saving {path} failed: {failure!r}")
                error.__cause__ = failure
            self._saved = Saved(path, error, blocked, time.perf_counter() - begin)

        # A daemon: a hanging writer must not block process exit.
        self._thread = threading.Thread(target=run, name="trainwright-save", daemon=True)
        self._thread.start()

    def _stage(self, content: Content) -> tuple[Content, Staged | None, BaseException | None]:
        content = with_assignment(content, self._connect())
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        try:
            staged = self._staging.stage(content.tensors)
        except Exception as error:  # out of memory; reported later, since the other ranks wait for this one
            return content, None, error
        return replace(content, tensors=staged.tensors), staged, None

    def _connect(self) -> WriteAssigner:
        if self._assigner is None:
            self._group = self._make_group()
            self._assigner = WriteAssigner(self._group)
        return self._assigner

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is in flight.

        Args:
            timeout: seconds; ``None``: no limit.

        Returns:
            Whether no save is in flight.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def all_done(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether every rank has finished its part of the save, without waiting for it. A collective.

        Args:
            group: a gloo group of all ranks other than this saver's; ``None``: this process alone.
        """
        return not any_of_ranks(self.in_flight is not None, group)

    def release(self) -> None:
        """Wait for a save in flight and free the memory of copies."""
        self.wait()
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._staging.release()

    def close(self) -> None:
        """Free memory and group. A collective."""
        self.release()
        if self._group is not None:
            dist.barrier(self._group)  # no rank may disconnect while another still receives
            dist.destroy_process_group(self._group)
            self._group = self._assigner = None
