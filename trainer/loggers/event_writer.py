"""TensorBoard's writer of events, for a disk that fills up: the file ends there, and training goes on.

As tensorboard has it, its thread prints a traceback of its own, and the next value that is logged ends the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter


class LenientSummaryWriter(SummaryWriter):
    """Torch's ``SummaryWriter``, whose file may end before the run does; arguments are the same."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> Any:
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _FileWriter(self.log_dir, self.max_queue, self.flush_secs, self.filename_suffix)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
            if self.purge_step is not None:
                step, self.purge_step = self.purge_step, None
                self.file_writer.add_event(Event(step=step, file_version="brain.Event:2"))
                self.file_writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return self.file_writer


class _FileWriter(FileWriter):
    def __init__(self, log_dir: str, max_queue: int, flush_secs: int, filename_suffix: str) -> None:
        self.event_writer = _EventFileWriter(str(log_dir), max_queue, flush_secs, filename_suffix)


class _EventFileWriter(EventFileWriter):
    @property
    def _general_file_writer(self) -> _LenientFile:
        """What the thread writes to."""
        return self._file

    @_general_file_writer.setter
    def _general_file_writer(self, file: Any) -> None:
        self._file = _LenientFile(file, self._file_name)


class _LenientFile:
    """A file that takes no more after the first error of the operating system, which it warns of.

    Args:
        file: to write to.
        name: of the file, for the warning.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._ended = False

    def write(self, data: bytes) -> None:
        """Append."""
        self._unless_ended(lambda: self._file.write(data))

    def flush(self) -> None:
        """Hand to the operating system what was written."""
        self._unless_ended(self._file.flush)

    def close(self) -> None:
        """Flush, and close."""
        self._unless_ended(self._file.close)

    def _unless_ended(self, act: Callable[[], object]) -> None:
        if self._ended:
            return
        try:
            act()
        except OSError as error:
            self._ended = True
            warnings.warn_explicit(  # the thread's own lines would tell nobody anything
                f"{self._name} cannot be written ({error.strerror or error}), so TensorBoard shows nothing of this run "
                "from here on; training goes on, and metrics.csv has the same values. Free space on the disk, or type "
                "logger=csv to do without TensorBoard.",
                RuntimeWarning,
                "tensorboard",
                1,
            )
