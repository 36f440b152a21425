"""Wrapper of the user's optimizer whose ``step`` pushes gradients and pulls parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.base.whole.tables import UnreadableState
from trainwright.strategies.contract.gradients import refuse_nonfinite
from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.parameter_server.server.shard import ShardPlan, is_served, put_states, states_of
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


class ServedOptimizer(Optimizer):
    """Wrapper of the user's optimizer, which keeps the groups and, at rest, the state; servers make its steps.

    Groups are shared, so schedulers, clipping and monitors of learning rates work unchanged. ``state_dict`` and
    ``load_state_dict`` have torch's standard form.

    Where workers step together, clipping and overflow checks are of their averaged gradients: a
    :class:`~trainwright.strategies.contract.precision.GradientClipper`.

    Args:
        optimizer: the user's, by the name that Lightning's LearningRateMonitor looks for in a wrapper.
        in_step: whether all workers make each step together.
    """

    def __init__(self, optimizer: Optimizer, in_step: bool) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self.outdated = False
        """True if loaded values must be uploaded to servers."""
        self.skips_state = False
        """True if ``state_dict`` returns groups only, without requests to servers."""
        self.ends_step = False
        """True while the last micro-batch of a step runs."""
        self.shows_averages = False
        """True if hooks get the averaged gradients of all workers, which step together."""
        self._in_step = in_step
        # True if this step is skipped because a scaled gradient of some worker is not finite.
        self._overflows = False
        self._client: Client | None = None
        self._plan: ShardPlan | None = None
        self._written: WrittenParameters | None = None
        self._clip_value = 0.0  # of the averaged gradient in the next step
        self._coefficient: float | None = None  # of pushed gradients that are not stepped yet
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the user's optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The loaded or last state; cannot be read or changed while servers have it."""
        return self.optimizer.state if self._client is None or self.outdated else _ServedState()

    @state.setter
    def state(self, state: Any) -> None:
        if self._client is not None and not self.outdated:
            _ServedState().clear()
        self.optimizer.state = state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all groups that servers hold, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"] if is_served(parameter)]

    @property
    def client(self) -> Client:
        """Client of the servers, while training."""
        assert self._client is not None
        return self._client

    # ---- serving ----------------------------------------------------------------------------------------------------

    def serve(self, client: Client, plan: ShardPlan, written: WrittenParameters) -> None:
        """Let servers make the steps from now on."""
        self._client, self._plan, self._written = client, plan, written

    def rest(self) -> None:
        """Record that hooks outside of steps may run."""
        if self._written is not None:
            self._written.rest()

    def upload(self) -> None:
        """Send this rank's parameters and loaded state to the servers."""
        self.client.load(states_of(self.optimizer, self.parameters))

    def forget_state(self) -> None:
        """Clear the local state, which the servers have."""
        self.optimizer.state.clear()
        self.outdated = False

    def retire(self) -> None:
        """Fetch the state of the servers, which are about to stop."""
        self._fetch()
        self.leave()

    def leave(self) -> None:
        """End serving; the state that servers had is unknown unless it was fetched."""
        self._client = None

    def _fetch(self) -> None:
        if self._client is not None and not self.outdated and not self.skips_state:
            self.optimizer.state.clear()
            put_states(self.optimizer, self.parameters, self._client.state())

    # ---- what the Trainer calls -------------------------------------------------------------------------------------

    def attach(self, plugin: Precision) -> None:
        """Set this as the clipper of a precision plugin."""
        given: Any = plugin
        if hasattr(given, "clipper"):
            given.clipper = self if self._in_step else None
        scaler = getattr(given, "scaler", None)
        if isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees, scaler.agree = True, self._agree

    def _agree(self, flag: Tensor) -> Tensor:
        """Return whether any worker's gradients overflow, if all step together; otherwise this worker's."""
        if self._in_step:
            flag = flag.new_tensor(self.client.vote(float(flag)))
        self._overflows = bool(flag)
        return flag

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Clip the average of all workers' gradients in the next step, by a norm computed on the servers.

        Raises:
            RuntimeError: on every rank, if the norm is not finite and ``error_if_nonfinite`` is set.
        """
        if self._overflows:
            return
        assert self._plan is not None
        # Bit-identical to torch.nn.utils.clip_grad_norm_; NaN propagates.
        norm = torch.linalg.vector_norm(self.client.push(self._plan.hyper.read(self.param_groups)))
        if error_if_nonfinite:
            refuse_nonfinite(float(norm), max_norm)
        self._coefficient = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp the elements of the averaged gradient in the next step."""
        if not self._overflows:
            self._clip_value = limit

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, push gradients and pull parameters."""
        loss = None
        if closure is not None:
            if self._client is not None and not self.shows_averages:
                self._client.begin()
            with torch.enable_grad():
                loss = closure()
        if self._client is None or self._plan is None or self._written is None:
            raise RuntimeError("The optimizer steps on parameter servers, which run while trainer.fit does.")
        if self.optimizer.state:
            self.optimizer.state.clear()  # outdated state of a checkpoint
        clip_value, self._clip_value = self._clip_value, 0.0
        coefficient, self._coefficient = self._coefficient, None
        self._written.share()
        self._client.step(self._plan.hyper.read(self.param_groups), clip_value, coefficient)
        given: Any = self.optimizer
        given._opt_called = True  # else schedulers warn
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return groups and the state of all servers; while training, a collective of all ranks."""
        self._fetch()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; uploaded to servers before the next step."""
        self.optimizer.load_state_dict(state_dict)
        self.outdated = True


class _ServedState(UnreadableState):
    """The state of an optimizer while servers have it."""

    def __init__(self) -> None:
        super().__init__("The state of an optimizer was used or changed while parameter servers have it.", remedy="")

    def clear(self) -> None:
        """Refuse to reset the state."""
        self._refuse()
