"""Train an unmodified LightningModule on any layout of machines, chosen by configuration alone.

Public names are loaded on first use: `import trainwright` and `trainwright --help` cost neither torch nor Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trainwright.core.text.library_messages import drop_library_messages

if TYPE_CHECKING:
    from trainwright.callbacks.end.preemption import Preempted, Preemption
    from trainwright.callbacks.guard.loss_guard import LossGuard
    from trainwright.callbacks.save.run_state import RunStateCheckpoint
    from trainwright.callbacks.schedule.learning_rate_schedule import LearningRateSchedule
    from trainwright.callbacks.schedule.schedules import RunSchedule
    from trainwright.command.run import run
    from trainwright.command.schema.compose import compose
    from trainwright.core.config.options import checked, number, value_problems, word
    from trainwright.core.errors import CheckpointError, DamagedCheckpoint
    from trainwright.core.layout import Layout
    from trainwright.core.problems import DivergedError
    from trainwright.launch.watchdog.callback import Watchdog
    from trainwright.strategies.compose.hybrid import HybridStrategy
    from trainwright.strategies.compose.hybrid_options import HybridOptions
    from trainwright.strategies.compose.one_axis import (
        ContextParallelStrategy,
        ExpertParallelStrategy,
        PipelineStrategy,
        TensorParallelStrategy,
    )
    from trainwright.strategies.compose.world import options_of
    from trainwright.strategies.context.documents import document_attention, document_mask
    from trainwright.strategies.contract.options import PlannedRun, StrategyOptions
    from trainwright.strategies.data.ddp import DDPStrategy
    from trainwright.strategies.data.options import DDPOptions, ZeroOptions
    from trainwright.strategies.data.single import SingleDeviceStrategy
    from trainwright.strategies.data.zero import ZeroStrategy
    from trainwright.strategies.local_updates.strategy import DiLoCoStrategy, LocalSGDStrategy
    from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy
    from trainwright.strategies.pipeline.batch_kinds import register_batch
    from trainwright.strategies.plan.model_plan import ModelPlan
    from trainwright.trainer.data.streams.dealt import DealtStream
    from trainwright.trainer.data.streams.sharded import ShardedStream
    from trainwright.trainer.trainer import Trainer

    __version__: str

_LOCATIONS = {
    "Trainer": "trainwright.trainer.trainer",
    "SingleDeviceStrategy": "trainwright.strategies.data.single",
    "DDPStrategy": "trainwright.strategies.data.ddp",
    "ZeroStrategy": "trainwright.strategies.data.zero",
    "HybridStrategy": "trainwright.strategies.compose.hybrid",
    "TensorParallelStrategy": "trainwright.strategies.compose.one_axis",
    "PipelineStrategy": "trainwright.strategies.compose.one_axis",
    "ContextParallelStrategy": "trainwright.strategies.compose.one_axis",
    "ExpertParallelStrategy": "trainwright.strategies.compose.one_axis",
    "ParameterServerStrategy": "trainwright.strategies.parameter_server.strategy",
    "LocalSGDStrategy": "trainwright.strategies.local_updates.strategy",
    "DiLoCoStrategy": "trainwright.strategies.local_updates.strategy",
    "StrategyOptions": "trainwright.strategies.contract.options",
    "DDPOptions": "trainwright.strategies.data.options",
    "ZeroOptions": "trainwright.strategies.data.options",
    "HybridOptions": "trainwright.strategies.compose.hybrid_options",
    "PlannedRun": "trainwright.strategies.contract.options",
    "Layout": "trainwright.core.layout",
    "ModelPlan": "trainwright.strategies.plan.model_plan",
    "LossGuard": "trainwright.callbacks.guard.loss_guard",
    "DivergedError": "trainwright.core.problems",
    "Preempted": "trainwright.callbacks.end.preemption",
    "Preemption": "trainwright.callbacks.end.preemption",
    "RunStateCheckpoint": "trainwright.callbacks.save.run_state",
    "LearningRateSchedule": "trainwright.callbacks.schedule.learning_rate_schedule",
    "RunSchedule": "trainwright.callbacks.schedule.schedules",
    "CheckpointError": "trainwright.core.errors",
    "DamagedCheckpoint": "trainwright.core.errors",
    "DealtStream": "trainwright.trainer.data.streams.dealt",
    "ShardedStream": "trainwright.trainer.data.streams.sharded",
    "Watchdog": "trainwright.launch.watchdog.callback",
    "checked": "trainwright.core.config.options",
    "compose": "trainwright.command.schema.compose",
    "document_attention": "trainwright.strategies.context.documents",
    "document_mask": "trainwright.strategies.context.documents",
    "number": "trainwright.core.config.options",
    "options_of": "trainwright.strategies.compose.world",
    "register_batch": "trainwright.strategies.pipeline.batch_kinds",
    "run": "trainwright.command.run",
    "value_problems": "trainwright.core.config.options",
    "word": "trainwright.core.config.options",
}

__all__ = [
    "CheckpointError",
    "ContextParallelStrategy",
    "DDPOptions",
    "DDPStrategy",
    "DiLoCoStrategy",
    "DamagedCheckpoint",
    "DealtStream",
    "DivergedError",
    "ExpertParallelStrategy",
    "HybridOptions",
    "HybridStrategy",
    "Layout",
    "LearningRateSchedule",
    "LocalSGDStrategy",
    "LossGuard",
    "ModelPlan",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "PlannedRun",
    "Preempted",
    "Preemption",
    "RunSchedule",
    "RunStateCheckpoint",
    "ShardedStream",
    "SingleDeviceStrategy",
    "StrategyOptions",
    "TensorParallelStrategy",
    "Trainer",
    "Watchdog",
    "ZeroOptions",
    "ZeroStrategy",
    "__version__",
    "checked",
    "compose",
    "document_attention",
    "document_mask",
    "number",
    "options_of",
    "register_batch",
    "run",
    "value_problems",
    "word",
]


drop_library_messages()


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
