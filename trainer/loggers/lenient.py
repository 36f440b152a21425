"""Wrapper of any Lightning logger, whose errors then do not end a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

from trainwright.core.config.masking import MaskedParameters, masked
from trainwright.core.text.printable import shortened

T = TypeVar("T")


class LenientLogger(MaskedParameters):
    """Mix-in of :func:`lenient`.

    The first error (network, full disk, invalid key) becomes a warning. From then on the logger gets no values, and its
    ``experiment`` ignores every call. It is finalized in any case, so that its process ends.

    Attributes:
        problem: the first error, as one line; `None`: none.
    """

    problem: str | None = None

    @property
    def experiment(self) -> Any:
        """The logger's backend."""
        if self.problem is None:
            try:
                return super().experiment  # type: ignore[misc]
            except AttributeError:
                raise  # some loggers have none
            except Exception as error:
                self._end(error)
        return DummyExperiment()

    def attempt(self, act: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Call `act` unless the logger has failed; return its result, or `None` on failure."""
        if self.problem is None:
            try:
                found = act(*args, **kwargs)
                return found if self.problem is None else None  # `experiment` may have failed
            except Exception as error:
                self._end(error)
        return None

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Log values."""
        self.attempt(super().log_metrics, *args, **kwargs)  # type: ignore[misc]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log hyper-parameters, without secrets."""
        self.attempt(super().log_hyperparams, *args, **kwargs)

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Log the module."""
        self.attempt(super().log_graph, *args, **kwargs)  # type: ignore[misc]

    def after_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Log a checkpoint."""
        self.attempt(super().after_save_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def save(self) -> None:
        """Write pending values."""
        self.attempt(super().save)  # type: ignore[misc]

    def finalize(self, status: str) -> None:
        """Write pending values, and close."""
        try:
            super().finalize(status)  # type: ignore[misc]
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        if self.problem is not None:
            return
        text = " ".join(f"{type(error).__name__}: {masked(str(error))}".split())
        self.problem = shortened(text)
        name = type(self).__name__
        warnings.warn(
            f"The logger {name} has failed and gets no more values of this run ({self.problem}). Training continues, "
            f"and metrics.csv has every value. To train without {name}, leave it out of logger=[...].",
            RuntimeWarning,
            stacklevel=3,
        )


def lenient(logger: Logger) -> Logger:
    """Return a logger whose first error is a warning, see :class:`LenientLogger`.

    Args:
        logger: of any class; the result is an instance of that class too, with the same attributes.
    """
    cls = type(logger)
    if isinstance(logger, LenientLogger):
        return logger
    wrapped: Any = object.__new__(type(cls.__name__, (LenientLogger, cls), {"__module__": cls.__module__}))
    wrapped.__dict__ = vars(logger)
    return cast(Logger, wrapped)
