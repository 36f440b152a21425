"""SIGTERM on several ranks: remembered here, agreed upon by the loop."""

from __future__ import annotations

from types import FrameType

from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _SignalConnector


class FlagOnSignal(_SignalConnector):
    """Remembers a SIGTERM and nothing more.

    Lightning's handler runs a broadcast inside the signal handler, which meets no partner when one rank alone is told
    to stop; and where it sees ``received_sigterm`` set (at the end of an epoch, within a validation), it raises on this
    rank alone and leaves the others waiting in their next collective. So with several ranks only :attr:`told_to_end` is
    set, and the loop asks all ranks at its next agreement.
    """

    told_to_end = False

    def _sigterm_notifier_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.told_to_end and launcher is not None:
            launcher.kill(signum)  # the ranks that this process has started
        self.told_to_end = True
        if self.trainer.world_size == 1:
            self.received_sigterm = True
