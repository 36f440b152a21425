"""Layouts write what one process writes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import default_collate

from tests.recipes.test_gpt import QUIET, write_text
from trainwright import Trainer
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.gpt.prompts import PromptSet, continue_greedily, decode_bytes
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule
from trainwright.recipes.language_model import LanguageModule
from trainwright.strategies.contract.registry import make_strategy

WINDOW, NEW = 16, 12
# Shorter than the window, of its length once it has grown, and longer than it; an odd number of them.
PROMPTS = ("t", "the quick", "jumps over the lazy dog: the quick")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "llama": {**GROUPED, "model_type": "llama"},
    "gpt2": {**SIZES, "model_type": "gpt2"},
    "mixtral": {**GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
Layouts = list[tuple[str, dict[str, Any]]]


def make_module(kind: str) -> LanguageModule:
    optimizer = partial(AdamW, lr=2e-2)
    if kind == "gpt":
        return GPTModule(GPTConfig(layers=2, dim=32, heads=2, seq_len=WINDOW), optimizer, warmup_steps=1)
    config = CONFIGS[kind]
    return HuggingFaceModule(config, seq_len=WINDOW, optimizer=optimizer, warmup_steps=1)


def trained(folder: str, kind: str) -> str:
    """A checkpoint that knows enough to prefer some byte by far."""
    seed_everything(0)
    trainer = Trainer(devices=1, max_steps=150, default_root_dir=folder, **QUIET)
    trainer.fit(make_module(kind), TextCorpus(Path(folder) / "text.txt", seq_len=WINDOW, batch_size=16))
    path = f"{folder}/{kind}.ckpt"
    trainer.save_checkpoint(path)
    return path


def written(folder: str, kind: str, path: str, layouts: Layouts) -> list[list[str]]:
    return [flat(predicted(folder, kind, path, *layout)) for layout in layouts]


def flat(batches: list[list[str]]) -> list[str]:
    return [text for batch in batches for text in batch]


def predicted(folder: str, kind: str, path: str, name: str, options: dict[str, Any]) -> Any:
    devices = dist.get_world_size() if dist.is_initialized() else 1
    trainer = Trainer(strategy=make_strategy(name, **options), devices=devices, **QUIET)
    data = TextCorpus(Path(folder) / "text.txt", seq_len=WINDOW, batch_size=1, prompts=PROMPTS, generate=NEW)
    return trainer.predict(make_module(kind), data, ckpt_path=path)


TWO: Layouts = [
    ("zero3", {}),
    ("tensor", {}),
    ("pipeline", {}),
    ("context", {}),
    ("tensor", {"sequence_parallel": True}),
]
# For a head of its own, and for experts.
MORE: dict[str, Layouts] = {"llama": [("tensor", {"loss_parallel": True})], "mixtral": [("expert", {})]}


@pytest.mark.parametrize("kind", ["gpt", "llama", "gpt2", "mixtral"])
def test_two_ranks_write_what_one_writes(tmp_path: Path, ranks: Callable[..., list[Any]], kind: str) -> None:
    folder = str(write_text(tmp_path).parent)
    (path,) = ranks(trained, 1, folder, kind, init_group=False)
    ((alone,),) = ranks(written, 1, folder, kind, path, [("single", {})], init_group=False)
    assert [text[: len(prompt)] for text, prompt in zip(alone, PROMPTS, strict=True)] == list(PROMPTS)
    assert len(set(alone[0][1:])) > 1  # it has learnt something worth comparing
    layouts = TWO + MORE.get(kind, [])
    for found in ranks(written, 2, folder, kind, path, layouts, timeout=90):
        assert dict(zip(map(str, layouts), found, strict=True)) == dict.fromkeys(map(str, layouts), alone)


def test_pipeline_and_tensor_write_what_one_process_writes(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    folder = str(write_text(tmp_path).parent)
    (path,) = ranks(trained, 1, folder, "llama", init_group=False)
    ((alone,),) = ranks(written, 1, folder, "llama", path, [("single", {})], init_group=False)
    both: Layouts = [("hybrid", {"pipeline": 2, "tensor": 2})]
    assert ranks(written, 4, folder, "llama", path, both, timeout=90) == [[alone]] * 4


def test_a_window_that_is_full_moves_on() -> None:
    """Each new byte is that of the last 16 bytes alone, whatever is padded behind."""
    torch.manual_seed(0)
    module = GPTModule(GPTConfig(layers=2, dim=32, heads=2, seq_len=WINDOW, init_std=0.5)).eval()
    texts = ("a", "0123456789", "a text of more than sixteen bytes")
    batch = default_collate(list(PromptSet(texts, WINDOW, NEW, lambda text: list(text.encode()))))
    with torch.no_grad():
        new = continue_greedily(module, batch)
        for text, ids in zip(texts, new.tolist(), strict=True):
            seen = list(text.encode())
            for each in ids:
                logits: Tensor = module(torch.tensor([seen[-WINDOW:]]))
                assert each == int(logits[0, -1].argmax())
                seen.append(each)


def test_bytes_that_are_no_text_are_shown() -> None:
    assert decode_bytes([104, 105, 255, 10]) == "hi\\xff\n"
