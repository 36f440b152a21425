"""Attention runs in torch's fused kernel under every layout, for packed documents too."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.harness import make_trainer
from tests.recipes.finetune.fixtures import write_base, write_chats
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.finetune.data import FineTuneData
from trainwright.recipes.finetune.module import FineTuneModule
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule

BLOCKS = 2
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


class Watch(pl.Callback):
    """Counts the operators of the last step."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.operators = Operators()
        self.operators.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.operators.__exit__(None, None, None)


def calls(folder: str, packed: bool, options: dict[str, Any]) -> Counter[str]:
    module: Any
    data: Any
    if packed:
        module = FineTuneModule(f"{folder}/base", meta=False)
        data = FineTuneData(
            f"{folder}/chats.jsonl", f"{folder}/base", "chat", seq_len=160, batch_size=2, cache_dir=folder
        )
    else:
        sizes = GPTConfig(layers=BLOCKS, dim=64, heads=4, kv_heads=2, seq_len=32)
        module = GPTModule(sizes, partial(SGD, lr=0.1), warmup_steps=0)
        data = TextCorpus(Path(folder) / "text.txt", seq_len=32, batch_size=2)
    watch = Watch()
    limits = {"max_steps": 2, "max_epochs": -1, "limit_val_batches": 0}
    trainer = make_trainer("hybrid", options, precision="bf16-mixed", callbacks=[watch], **limits)
    trainer.fit(module, data)
    return watch.operators.calls


CONTEXT = {"context": 2, "shard": 1}
# Options of a layout, and calls in a step where documents are not packed; None: more than one for each block.
LAYOUTS: tuple[tuple[dict[str, Any], int | None], ...] = (
    ({"stage": 3}, BLOCKS),
    ({"tensor": 2, "shard": 1}, BLOCKS),
    ({"pipeline": 2, "shard": 1, "micro_batches": 2}, BLOCKS // 2 * 2),
    (CONTEXT, None),
    ({**CONTEXT, "attention": "ulysses"}, BLOCKS),
    ({**CONTEXT, "attention": "gather"}, None),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("packed", "options", "times"),
    [(packed, *layout) for packed in (False, True) for layout in LAYOUTS],
    ids=str,
)
def test_fused_kernel(ranks: Any, tmp_path: Path, packed: bool, options: dict[str, Any], times: int | None) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    if packed:
        write_base(tmp_path / "base")
        write_chats(tmp_path / "chats.jsonl", even=True)
    for found in ranks(calls, 2, str(tmp_path), packed, options):
        assert found[FUSED] == found[f"{FUSED}_backward"] >= BLOCKS, found
        assert times in (None, found[FUSED]) or (packed and found[FUSED] > times)  # each document by itself
        assert not [name for name in found if name.removeprefix("aten::") in ("bmm", "baddbmm", "_softmax")], found
