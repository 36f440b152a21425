"""SIGTERM on several ranks: remembered here, agreed upon by the loop."""

from __future__ import annotations

from types import FrameType

from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _SignalConnector


class FlagOnSignal(_SignalConnector):
    """Remembers a SIGTERM and nothing more.

    Lightning's handler runs a broadcast inside the signal handler, which meets no partner when one rank alone is told
    to stop. Here the loop asks all ranks at its next agreement.
    """

    def _sigterm_notifier_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)  # the ranks that this process has started
        self.received_sigterm = True
