"""Ways to fine-tune a pretrained model: the ``finetune`` recipe's modules and data.

All rows train as many tokens: Lightning's Trainer, the reference, takes means of means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.recipes.finetune.fixtures import write_base, write_chats, write_pairs
from tests.zoo.cells import LAYOUTS, Row
from trainwright.recipes.finetune.data import FineTuneData
from trainwright.recipes.finetune.module import FineTuneModule
from trainwright.recipes.finetune.preference import PreferenceModule

# Two conversations fill a row, or one pair.
LENGTHS = {"chat": 64, "preference": 96}
ADAM = partial(AdamW, lr=1e-3, eps=1e-3, weight_decay=0.01)


class Ordered(FineTuneData):
    """Rows in order."""

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train)


def base(family: str = "llama") -> str:
    """A folder with a model that the first rank writes."""
    folder = Path.cwd() / f"base-{family}"
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_base(folder, family, num_hidden_layers=4)
        write_chats(folder / "chat.jsonl", even=True)
        write_pairs(folder / "preference.jsonl", even=True)
    if dist.is_initialized():
        dist.barrier()
    return str(folder)


def data(format: str, batch_size: int, **options: Any) -> Ordered:
    folder = base()
    given = {"seq_len": LENGTHS[format], "held_out": 0.0, "cache_dir": folder, **options}
    return Ordered(f"{folder}/{format}.jsonl", folder, format, batch_size=batch_size, **given)


def module(kind: type[FineTuneModule] = FineTuneModule, family: str = "llama", **options: Any) -> FineTuneModule:
    given = {
        "seq_len": max(LENGTHS.values()),
        "optimizer": ADAM,
        "warmup_steps": 0,
        "schedule_steps": 8,
        "meta": False,
        **options,
    }
    return kind(pretrained=base(family), **given)


def adapter(kind: str, **options: Any) -> partial[FineTuneModule]:
    rank = {} if kind == "ia3" else {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return partial(module, adapter={"kind": kind, **rank, **options})


def row(name: str, make: Callable[[], FineTuneModule], make_data: Callable[[int], Any]) -> Row:
    return Row(name, make, make_data, either=", ".join(layout for layout in LAYOUTS if layout != "expert"))


chats, pairs = partial(data, "chat"), partial(data, "preference")
everywhere = {"r": 4, "target_modules": "all-linear"}
experts = {"equal": "zero3, expert", "either": "pipeline, tensor"}
ROWS = [
    row("full", module, partial(chats, packing=False)),
    row("full, packed", module, chats),
    row("LoRA", adapter("lora"), chats),
    row("LoRA, all layers", adapter("lora", **everywhere), chats),
    row("QLoRA", adapter("lora", quantize="nf4"), chats),
    row("DoRA", adapter("dora"), chats),
    row("IA3", adapter("ia3"), chats),
    row("DPO", partial(module, PreferenceModule), pairs),
    row("DPO, LoRA", partial(module, PreferenceModule, adapter={"kind": "lora", **everywhere}), pairs),
    Row("full, experts", partial(module, family="mixtral"), chats, **experts),
    Row(
        "LoRA, experts",
        partial(adapter("lora", target_modules=["q_proj", "v_proj"]), family="mixtral"),
        chats,
        **experts,
    ),
]
