"""Private names of Lightning that this package uses, in one place, so that a new version breaks one file.

The loops and connectors of :mod:`trainwright.trainer` derive from Lightning's, which have no public names.
"""

from lightning.fabric.plugins.precision.utils import _DtypeContextManager as _DtypeContextManager
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as _auto_add_worker_init_fn
from lightning.fabric.utilities.data import _set_sampler_epoch as _set_sampler_epoch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as _update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection as _init_dist_connection
from lightning.fabric.utilities.logger import _convert_params as _convert_params
from lightning.fabric.utilities.logger import _flatten_dict as _flatten_dict
from lightning.fabric.utilities.optimizer import _optimizers_to_device as _optimizers_to_device
from lightning.fabric.utilities.rank_zero import _get_rank as _get_rank
from lightning.pytorch.core.optimizer import _configure_optimizers as _configure_optimizers
from lightning.pytorch.core.optimizer import _MockOptimizer as _MockOptimizer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as _DataFetcher
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop as _FitLoop
from lightning.pytorch.loops.loop import _Loop as _Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization as _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as _PredictionLoop
from lightning.pytorch.loops.progress import _BaseProgress as _BaseProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior as _block_parallel_sync_behavior
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as _IndexBatchSamplerWrapper
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook as _register_ddp_comm_hook
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as _WorkerOutput
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations as _verify_loop_configurations
from lightning.pytorch.trainer.connectors.accelerator_connector import (
    _select_auto_accelerator as _select_auto_accelerator,
)
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector as _DataConnector
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches as _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as _ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _HANDLER as _HANDLER
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as _SignalConnector
from lightning.pytorch.utilities.argparse import _parse_env_variables as _parse_env_variables
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES as _SUPPORTED_MODES
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle as _MaxSizeCycle
from lightning.pytorch.utilities.data import (
    _get_dataloader_init_args_and_kwargs as _get_dataloader_init_args_and_kwargs,
)
from lightning.pytorch.utilities.data import _reinstantiate_wrapped_cls as _reinstantiate_wrapped_cls
