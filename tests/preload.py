"""What the server of the rank pool imports before it forks ranks, so that no rank pays for it again."""

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
)
# Nothing but a user's code reads parts of a strategy under their former names.
warnings.filterwarnings("error", message=r"strategy\.\w+ is strategy\.", category=DeprecationWarning)
for name in LOADED:
    # A module that does not import is reported by the test that needs it; the server must live on.
    with suppress(Exception):
        importlib.import_module(name)

# What is imported stays for good: a rank that collects garbage need not walk it, nor copy its pages.
gc.collect()
gc.freeze()
