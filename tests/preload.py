"""Imports of the rank pool's server, made once before it forks ranks and commands."""

import functools
import gc
import importlib
import importlib.metadata
import pkgutil
import warnings
from contextlib import suppress
from typing import Any

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.optim.swa_utils  # noqa: F401

import trainwright

# Lightning looks through all installed packages for plugins whenever a Trainer is made; they stay the same here.
_found = importlib.metadata.entry_points
_cached = functools.cache(_found)


def _entry_points(**words: Any) -> Any:
    # Tests install packages that have strategies.
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
    # What cases need beside it. Each rank would import it anew, and so would each that takes a burdened one's place.
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
# Nothing but a user's code reads parts of a strategy under their former names.
warnings.filterwarnings("error", message=r"strategy\.\w+ is strategy\.", category=DeprecationWarning)
own = (module.name for module in pkgutil.walk_packages(trainwright.__path__, "trainwright.", onerror=lambda _: None))
for name in (*LOADED, *(name for name in own if not name.endswith(("__main__", ".started", ".preload")))):
    # A module that does not import is reported by the test that needs it; the server must live on.
    with suppress(Exception):
        importlib.import_module(name)

# Commands find the files of conf/ read, and the lazy parts of Hydra imported.
with suppress(Exception):
    importlib.import_module("trainwright.command.schema.compose").compose_checked(["recipe=gpt", "strategy=ddp"])

# What is imported stays for good: a rank that collects garbage need not walk it, nor copy its pages.
gc.collect()
gc.freeze()
