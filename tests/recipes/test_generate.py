"""Generation on layouts equals transformers' ``generate`` in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.optim import SGD

from tests.parity.harness import make_trainer
from tests.recipes.conftest import write_text
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.generation.generate import continued, generate
from trainwright.recipes.generation.prompts import ContinuePrompts, PromptData
from trainwright.recipes.generation.sampling import Sampling
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule
from trainwright.recipes.language_model import LanguageModule

NEW, WINDOW = 12, 16
GREEDY, SAMPLED = Sampling(NEW), Sampling(NEW, temperature=2.0, top_p=0.95, seed=3)
PROMPTS = [list(text.encode()) for text in ("t", "the quick", "jumps over the lazy dog")]
# Large weights separate the most likely token from the next.
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "initializer_range": 0.5}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
CONFIGS = {
    "llama": {**GROUPED, "model_type": "llama"},
    "qwen2": {**GROUPED, "model_type": "qwen2", **SLIDING},
    "gpt2": {**SIZES, "model_type": "gpt2", "num_attention_heads": 2},
    "mixtral": {**GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
CACHED = tuple(CONFIGS)
CONFIGS["falcon_h1"] = {
    **GROUPED, "model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_chunk_size": 4,
}  # fmt: skip
Layouts = list[tuple[str, dict[str, Any]]]
Ranks = Callable[..., list[Any]]
TWO: Layouts = [(name, {}) for name in ("ddp", "zero3", "tensor", "pipeline", "context")]
TWO.append(("tensor", {"sequence_parallel": True}))
MORE: dict[str, Layouts] = {"llama": [("tensor", {"loss_parallel": True})], "mixtral": [("expert", {})]}
FOUR: Layouts = [("hybrid", {"pipeline": 2, "tensor": 2}), ("hybrid", {"pipeline": 2, "context": 2})]


class Bytes:
    """A tokenizer of texts of numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Widths(Callback):
    """Record the number of tokens per pass."""

    def __init__(self) -> None:
        self.seen = set[int]()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(pl_module, HuggingFaceModule):
            embedding: Any = pl_module.model.get_input_embeddings()  # type: ignore[union-attr,operator]
            embedding.register_forward_pre_hook(lambda _, args: self.seen.add(args[0].size(1)))


def make_module(kind: str) -> LanguageModule:
    seed_everything(0)
    optimizer = partial(SGD, lr=1e-4)
    if kind == "gpt":
        return GPTModule(GPTConfig(layers=2, dim=32, heads=2, seq_len=WINDOW, init_std=0.5), optimizer)
    return HuggingFaceModule(CONFIGS[kind], seq_len=WINDOW, optimizer=optimizer)


def of_transformers(kind: str, ends: list[int] | None = None) -> list[list[int]]:
    """Return what transformers' own ``generate`` adds to each prompt."""
    model: Any = make_module(kind).model
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    return [
        model.eval().generate(torch.tensor([ids]), use_cache=True, **options)[0, len(ids) :].tolist() for ids in PROMPTS
    ]


def predicted(
    kind: str, layouts: Layouts, sampling: Sampling, ends: list[int] | None = None, cached: bool = True
) -> list[list[list[int]]]:
    """Return the new ids of each prompt under each layout."""
    found = []
    for name, options in layouts:
        module, widths = make_module(kind), Widths()
        if kind != "gpt":
            module.model.generation_config.eos_token_id = ends  # type: ignore[union-attr]
        data = PromptData([Bytes().decode(ids) for ids in PROMPTS], Bytes(), sampling, batch_size=2)
        trainer = make_trainer(name, options, callbacks=[ContinuePrompts(), widths])
        batches: Any = trainer.predict(module, data)
        found.append([Bytes().encode(text) for batch in batches for text in batch["new"]])
        assert [tokens for batch in batches for tokens in batch["tokens"]] == [len(ids) for ids in found[-1]]
        # With a cache a pass has all prompt tokens of a batch, or one new token.
        assert kind == "gpt" or (1 in widths.seen and len(widths.seen) <= 3) == cached
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CACHED)
def test_greedy_equals_transformers(ranks: Ranks, kind: str) -> None:
    alone, layouts = of_transformers(kind), TWO + MORE.get(kind, [])
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    assert predicted(kind, [("single", {})], GREEDY) == [alone]
    for found in ranks(predicted, 2, kind, layouts, GREEDY, timeout=90):
        assert dict(zip(map(str, layouts), found, strict=True)) == dict.fromkeys(map(str, layouts), alone)


@pytest.mark.thorough
def test_hybrid_layouts_equal_transformers(ranks: Ranks) -> None:
    assert ranks(predicted, 4, "llama", FOUR, GREEDY, timeout=90) == [[of_transformers("llama")] * len(FOUR)] * 4


def test_pipeline_without_a_cache(ranks: Ranks) -> None:
    found = ranks(predicted, 2, "falcon_h1", [("pipeline", {})], GREEDY, None, False, timeout=90)
    assert found == [[of_transformers("falcon_h1")]] * 2


def test_end_tokens(ranks: Ranks) -> None:
    """Ranks with finished texts take part in the passes of others."""
    whole = of_transformers("llama")
    ends = [whole[0][2], whole[1][4]]
    alone = [ids[: next((at + 1 for at, each in enumerate(ids) if each in ends), NEW)] for ids in whole]
    assert len({len(ids) for ids in alone}) > 1
    assert min(map(len, alone)) <= 3
    layouts: Layouts = [("zero3", {}), ("pipeline", {})]
    assert predicted("llama", [("single", {})], GREEDY, ends) == [alone]
    assert ranks(predicted, 2, "llama", layouts, GREEDY, ends, timeout=90) == [[alone] * 2] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_samples_equal_one_process(ranks: Ranks, kind: str) -> None:
    (alone,) = predicted(kind, [("single", {})], SAMPLED)
    assert [alone] != predicted(kind, [("single", {})], replace(SAMPLED, seed=4))
    assert [alone] != predicted(kind, [("single", {})], GREEDY)
    layouts: Layouts = TWO if kind == "gpt" else [("zero3", {}), ("tensor", {}), ("pipeline", {})]
    assert ranks(predicted, 2, kind, layouts, SAMPLED, timeout=90) == [[alone] * len(layouts)] * 2


def test_distribution_of_samples() -> None:
    """Frequencies of the first token over many prompts match its probabilities within ``top_p``."""
    module = make_module("gpt").eval()
    with torch.no_grad():
        logits: Any = module(torch.tensor([PROMPTS[1] + [0] * 7]))[0, len(PROMPTS[1]) - 1]
        found = generate(module, PROMPTS[1:2] * 4000, Sampling(1, temperature=2.0, top_p=0.7))
    chances, order = (logits / 2).softmax(-1).sort(descending=True)
    kept = int((chances.cumsum(0) < 0.7).sum()) + 1
    counts = torch.tensor([ids[0] for ids in found]).bincount(minlength=256)[order]
    assert kept > 2
    assert int(counts[kept:].sum()) == 0
    expected = chances[:kept] / chances[:kept].sum()
    assert (counts[:kept] / 4000 - expected).abs().max() < 0.04  # five standard deviations


def test_window_moves_without_a_cache() -> None:
    """Each new byte depends on the last 16 bytes only, not on padding."""
    module = make_module("gpt").eval()
    with torch.no_grad():
        for prompt, new in zip(PROMPTS, generate(module, PROMPTS, GREEDY), strict=True):
            seen = list(prompt)
            for each in new:
                logits: Any = module(torch.tensor([seen[-WINDOW:]]))
                assert each == int(logits[0, -1].argmax())
                seen.append(each)


class Between(Callback):
    """Generate between steps of a fit."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found.append(continued(trainer, pl_module, PROMPTS, GREEDY))
        assert pl_module.training
        assert pl_module.model.training


def fitted(folder: str, layouts: Layouts) -> list[Any]:
    """Return what is generated between steps; generating must not change the loss."""
    found = []
    for name, options in layouts:
        losses = []
        for callbacks in ([], [between := Between()]):
            trainer = make_trainer(name, options, max_steps=2, max_epochs=-1, global_batch_size=4, callbacks=callbacks)
            trainer.fit(make_module("llama"), TextCorpus(Path(folder) / "text.txt", seq_len=WINDOW, batch_size=2))
            losses.append(float(trainer.callback_metrics["train_loss"]))
        assert losses[0] == losses[1]
        found.append(between.found)
    return found


@pytest.mark.thorough
def test_generation_between_steps(tmp_path: Path, ranks: Ranks) -> None:
    folder = str(write_text(tmp_path).parent)
    layouts = TWO[:-1]
    alone = of_transformers("llama")  # the learning rate is too small to change choices
    for found in ranks(fitted, 2, folder, layouts, timeout=90):
        assert len(found) == len(layouts)
        assert all(len(texts) >= 2 and texts == [alone] * len(texts) for texts in found)


def test_refused() -> None:
    module: Any = HuggingFaceModule({**CONFIGS["gpt2"], "n_positions": 16})
    with pytest.raises(ValueError, match="A prompt of 9 tokens and max_new_tokens=12 exceed the 16 positions"):
        generate(module, PROMPTS[:2], GREEDY)
    with pytest.raises(TypeError, match="cannot generate text"):
        generate(LightningModule(), PROMPTS)
