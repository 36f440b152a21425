"""Private names of torch that this package uses, in one place, so that a new version breaks one file.

Modules that are slow to import are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as _distributed_c10d
from torch._C._functorch import peek_interpreter_stack as peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.distributed_c10d import _abort_process_group as _abort_process_group
from torch.distributed.distributed_c10d import _get_default_group as _get_default_group
from torch.nn._reduction import legacy_get_string as legacy_get_string
from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
from torch.nn.modules.batchnorm import _NormBase as _NormBase
from torch.nn.modules.dropout import _DropoutNd as _DropoutNd
from torch.overrides import _get_current_function_mode as _get_current_function_mode
from torch.overrides import _pop_mode as _pop_mode
from torch.overrides import _push_mode as _push_mode
from torch.utils import _pytree as _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
    from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
    from torch.distributed.pipelining.schedules import _Action as _Action
    from torch.distributed.pipelining.schedules import _ComputationType as _ComputationType
    from torch.distributed.pipelining.schedules import _PipelineSchedule as _PipelineSchedule
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import _PipelineStageBase as _PipelineStageBase
    from torch.distributed.tensor import _redistribute as _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache as _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

_LAZY = {
    "_EmptyStateDictLoadPlanner": "torch.distributed.checkpoint.default_planner",
    "FSDPParam": "torch.distributed.fsdp._fully_shard._fsdp_param",
    "FSDPParamGroup": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "TrainingState": "torch.distributed.fsdp._fully_shard._fsdp_common",
    **dict.fromkeys(("stage_backward_input", "stage_backward_weight"), "torch.distributed.pipelining._backward"),
    **dict.fromkeys(("_Action", "_ComputationType"), "torch.distributed.pipelining.schedules"),
    **dict.fromkeys(("_PipelineSchedule", "_PipelineScheduleRuntime"), "torch.distributed.pipelining.schedules"),
    "_PipelineStageBase": "torch.distributed.pipelining.stage",
    "_redistribute": "torch.distributed.tensor",
    **dict.fromkeys(("DTensorSpec", "TensorMeta"), "torch.distributed.tensor._dtensor_spec"),
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    "_clear_sharding_prop_cache": "torch.distributed.tensor.debug",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
