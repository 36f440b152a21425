"""Parameters that user code writes on workers, where servers hold the values that count."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.strategies.parameter_server.worker.client import Client

# Steps after a rest in which parameters are compared although no hook of steps may write them and torch has counted no
# write: hooks of epochs and training_step may write to ``.data``.
_FIRST_STEPS = 3


class WrittenParameters:
    """Parameters written by user code since the last pull, such as clamped or reset weights.

    Args:
        client: of the servers.
        in_step: whether all workers make each step together. Then all write the same values before their pushes, and
            servers take those of the first; otherwise they would overwrite steps of others.
        always: whether hooks of steps may write parameters; else only steps after a rest are checked.
    """

    def __init__(self, client: Client, in_step: bool, always: bool) -> None:
        self._client, self._in_step, self._always = client, in_step, always
        self._steps, self._has_warned = 0, False

    def rest(self) -> None:
        """Record that hooks of an epoch, a validation or a save may run."""
        self._steps = 0

    def share(self) -> None:
        """Send written parameters to the servers, before a step.

        Raises:
            RuntimeError: if workers step independently and a parameter was written.
        """
        self._steps += 1
        if not (self._always or self._steps <= _FIRST_STEPS or self._client.has_seen_writes):
            return
        if self._client.has_pulled_values:
            return
        if not self._in_step:
            raise RuntimeError(
                "A hook or training_step has written parameters, which parameter servers hold and step for other "
                "workers too, so the written values would be lost. Type strategy.consistency=sync, or strategy=ddp."
            )
        if not self._has_warned:
            self._has_warned = self._always = True
            rank_zero_warn(
                "Hooks or training_step write parameters, which parameter servers hold: they are sent to the servers "
                "in each such step. strategy=ddp does without."
            )
        self._client.put()
