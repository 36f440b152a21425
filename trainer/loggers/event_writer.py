"""TensorBoard's event writer for a disk that fills up: the file ends there, and training continues.

Without it, tensorboard's thread prints a traceback, and the next logged value ends the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter


class LenientSummaryWriter(SummaryWriter):
    """Torch's ``SummaryWriter``, whose file may end before the run; with the same arguments."""

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
        """The file written by the thread."""
        return self._file

    @_general_file_writer.setter
    def _general_file_writer(self, file: Any) -> None:
        self._file = _LenientFile(file, self._file_name)


class _LenientFile:
    """A file that ignores writes after its first ``OSError``, of which it warns.

    Args:
        file: to write to.
        name: of the file, for the warning.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._ended = False

    def write(self, data: bytes) -> None:
        """Append."""
        self._attempt(lambda: self._file.write(data))

    def flush(self) -> None:
        """Flush to the operating system."""
        self._attempt(self._file.flush)

    def close(self) -> None:
        """Flush, and close."""
        self._attempt(self._file.close)

    def _attempt(self, act: Callable[[], object]) -> None:
        if self._ended:
            return
        try:
            act()
        except OSError as error:
            self._ended = True
            warnings.warn_explicit(  # the thread's own source line would not help
                f"TensorBoard's {self._name} cannot be written ({error.strerror or error}) and ends here; training "
                "continues, and metrics.csv has the same values. Free space on the disk, or type logger=csv.",
                RuntimeWarning,
                "tensorboard",
                1,
            )
