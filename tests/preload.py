"""Imports of the rank pool's server, shared by all ranks that it forks."""

import functools
import gc
import importlib
import importlib.metadata
import warnings
from contextlib import suppress
from typing import Any

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.optim.swa_utils  # noqa: F401

# Lightning searches all installed packages for plugins whenever a Trainer is made.
_found = importlib.metadata.entry_points
_cached = functools.cache(_found)


def _entry_points(**words: Any) -> Any:
    # Tests install packages with strategies.
    return _found(**words) if words.get("group") == "trainwright.strategies" else _cached(**words)


importlib.metadata.entry_points = _entry_points  # type: ignore[assignment]

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
)
# Only user code may use former names of a strategy's parts.
warnings.filterwarnings("error", message=r"strategy\.\w+ is strategy\.", category=DeprecationWarning)
for name in LOADED:
    # The test that needs a module reports that it cannot be imported.
    with suppress(Exception):
        importlib.import_module(name)

# So that garbage collection in a rank neither walks nor copies the pages of modules.
gc.collect()
gc.freeze()
