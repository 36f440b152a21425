"""Train one unmodified LightningModule on any layout of machines, chosen by configuration alone.

The names of the face are loaded on first use: `import trainwright` and `trainwright --help` cost neither torch nor
Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.callbacks.diverged import DivergedError
    from trainwright.callbacks.loss_guard import LossGuard
    from trainwright.callbacks.preemption import Preempted, Preemption
    from trainwright.callbacks.run_state import RunStateCheckpoint
    from trainwright.checkpoint.errors import CheckpointError, DamagedCheckpoint
    from trainwright.strategies.ddp import DDPStrategy
    from trainwright.strategies.hybrid import HybridStrategy
    from trainwright.strategies.layout import Layout
    from trainwright.strategies.local_updates.strategy import DiLoCoStrategy, LocalSGDStrategy
    from trainwright.strategies.one_axis import (
        ContextParallelStrategy,
        ExpertParallelStrategy,
        PipelineStrategy,
        TensorParallelStrategy,
    )
    from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy
    from trainwright.strategies.plan import ModelPlan
    from trainwright.strategies.single import SingleDeviceStrategy
    from trainwright.strategies.zero import ZeroStrategy
    from trainwright.trainer.compose import compose
    from trainwright.trainer.run import run
    from trainwright.trainer.stream import DealtStream
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.watchdog.callback import Watchdog

    __version__: str

_LOCATIONS = {
    "Trainer": "trainwright.trainer.trainer",
    "SingleDeviceStrategy": "trainwright.strategies.single",
    "DDPStrategy": "trainwright.strategies.ddp",
    "ZeroStrategy": "trainwright.strategies.zero",
    "HybridStrategy": "trainwright.strategies.hybrid",
    "TensorParallelStrategy": "trainwright.strategies.one_axis",
    "PipelineStrategy": "trainwright.strategies.one_axis",
    "ContextParallelStrategy": "trainwright.strategies.one_axis",
    "ExpertParallelStrategy": "trainwright.strategies.one_axis",
    "ParameterServerStrategy": "trainwright.strategies.parameter_server.strategy",
    "LocalSGDStrategy": "trainwright.strategies.local_updates.strategy",
    "DiLoCoStrategy": "trainwright.strategies.local_updates.strategy",
    "Layout": "trainwright.strategies.layout",
    "ModelPlan": "trainwright.strategies.plan",
    "LossGuard": "trainwright.callbacks.loss_guard",
    "DivergedError": "trainwright.callbacks.diverged",
    "Preempted": "trainwright.callbacks.preemption",
    "Preemption": "trainwright.callbacks.preemption",
    "RunStateCheckpoint": "trainwright.callbacks.run_state",
    "CheckpointError": "trainwright.checkpoint.errors",
    "DamagedCheckpoint": "trainwright.checkpoint.errors",
    "DealtStream": "trainwright.trainer.stream",
    "Watchdog": "trainwright.trainer.watchdog.callback",
    "compose": "trainwright.trainer.compose",
    "run": "trainwright.trainer.run",
}

__all__ = [
    "CheckpointError",
    "ContextParallelStrategy",
    "DDPStrategy",
    "DiLoCoStrategy",
    "DamagedCheckpoint",
    "DealtStream",
    "DivergedError",
    "ExpertParallelStrategy",
    "HybridStrategy",
    "Layout",
    "LocalSGDStrategy",
    "LossGuard",
    "ModelPlan",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "Preempted",
    "Preemption",
    "RunStateCheckpoint",
    "SingleDeviceStrategy",
    "TensorParallelStrategy",
    "Trainer",
    "Watchdog",
    "ZeroStrategy",
    "__version__",
    "compose",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trainwright")
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}; it has {', '.join(sorted(_LOCATIONS))}")
    value = getattr(importlib.import_module(_LOCATIONS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
