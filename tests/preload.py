"""Imports of the rank pool's server, made once and shared by all ranks and commands."""

import functools
import gc
import importlib
import importlib.metadata
import pkgutil
import sys
import warnings
from contextlib import suppress
from typing import Any

import torch.distributed.checkpoint
import torch.distributed.elastic.rendezvous.dynamic_rendezvous
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.optim.swa_utils
import torch.utils._triton

import trainwright
from tests.pool import ALLOCATIONS

# Lightning searches all installed packages for plugins whenever a Trainer is made.
_found = importlib.metadata.entry_points
_cached = functools.cache(_found)


def _entry_points(**words: Any) -> Any:
    # Tests install packages with strategies.
    return _found(**words) if words.get("group") == "trainwright.strategies" else _cached(**words)


importlib.metadata.entry_points = _entry_points  # type: ignore[assignment]

# For its log, torchrun's agent searches all loaded modules for the source of every frame: nine tenths of its time here.
torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name = (  # type: ignore[assignment]
    lambda depth=2: sys._getframe(depth).f_code.co_name
)

# Some modules ask for Triton, and thereby initialize CUDA, which a forked process could not use then.
_is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False

LOADED = (
    "trainwright.launch.worker",
    "trainwright.strategies.data.ddp",
    "trainwright.strategies.compose.one_axis",
    # Of commands.
    "tests.warm",
    "trainwright.command.cli",
    "trainwright.command.verbs",
    "trainwright.launch.ranks.progress",
    "trainwright.launch.rank",
    # Of cases.
    "pytest",
    "tests.parity.layouts",
    "tests.parity.layout_modules",
    "tests.zoo.base",
    "tests.zoo.cells",
    "torchmetrics.classification",
    "torch._functorch.aot_autograd",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    # What loggers and recipes import when they are used.
    "sklearn.datasets",
    "tensorboard.summary.v1",
    "torch.utils.tensorboard",
)
# Only user code may use former names of a strategy's parts.
warnings.filterwarnings("error", message=r"strategy\.\w+ is strategy\.", category=DeprecationWarning)
own = (module.name for module in pkgutil.walk_packages(trainwright.__path__, "trainwright.", onerror=lambda _: None))
# Importing the last one changes what others import.
NOT_LOADED = ("__main__", ".started", ".preload", ".pytorch_lightning_alias")
for name in (*LOADED, *(name for name in own if not name.endswith(NOT_LOADED))):
    # The test that needs a module reports that it cannot be imported.
    with suppress(Exception):
        importlib.import_module(name)

torch.cuda.is_available = _is_available
for function in vars(torch.utils._triton).values():
    if hasattr(function, "cache_clear"):
        function.cache_clear()

# Commands find the files of conf/ read, and the lazy parts of Hydra imported.
with suppress(Exception):
    importlib.import_module("trainwright.command.schema.compose").compose_checked(["recipe=gpt", "strategy=ddp"])

# So that garbage collection in a rank neither walks nor copies the pages of modules, and is rare.
gc.collect()
gc.freeze()
gc.set_threshold(ALLOCATIONS)
