"""A chunked loss equals the plain one on every layout, with less memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from benchmarks.live_bytes import LiveBytes
from tests.parity.harness import QUIET
from tests.recipes.finetune.fixtures import write_base
from tests.zoo import finetuned
from tests.zoo.cells import LAYOUTS
from trainwright import Trainer, compose
from trainwright.recipes.finetune.module import FineTuneModule
from trainwright.recipes.finetune.preference import PreferenceModule
from trainwright.recipes.hugging_face import checks, chunked_logits
from trainwright.strategies.contract.registry import make_strategy

CHUNK = 50  # positions, of 96 or 192 in a row or pair
LORA = {"kind": "lora", "r": 4, "target_modules": ["q_proj", "lm_head"]}

Trained = tuple[list[float], dict[str, Tensor], int, int]


def train(layout: str, chunk: int, kind: type[FineTuneModule] = FineTuneModule, **options: Any) -> Trained:
    """Losses of two steps, weights after them (SGD: the gradients), checkpointed chunks and whole logits."""
    name, chosen, ranks = LAYOUTS.get(layout, ("single", {}, 1))
    weighting = "tokens" if kind is FineTuneModule else "micro_batch"
    trainer = Trainer(
        strategy=make_strategy(name, **chosen), devices=ranks, max_steps=2, loss_weighting=weighting, **QUIET
    )
    module = finetuned.module(kind, optimizer=partial(SGD, lr=0.5), loss_chunk=chunk, **options)
    data = finetuned.data("chat" if kind is FineTuneModule else "preference", 4, held_out=0.2)
    chunks = patch.object(chunked_logits, "checkpoint", side_effect=chunked_logits.checkpoint)
    wholes = patch.object(chunked_logits, "_report_whole", side_effect=chunked_logits._report_whole)
    with chunks as in_chunks, wholes as made_whole:
        trainer.fit(module, data)
        weights = {name: value.detach().clone() for name, value in trainer.strategy.whole_parameters()}
        losses = [float(trainer.callback_metrics["train_loss"])]
        losses += [float(each["val_loss"]) for each in trainer.validate(module, data, verbose=False)]
    return losses, weights, in_chunks.call_count, made_whole.call_count


def compared(ranks: Callable[..., list[Any]], layout: str, *args: Any, **options: Any) -> None:
    """Train with whole logits and in chunks, and compare."""
    number = LAYOUTS[layout][2]
    plain, chunked = (ranks(train, number, layout, chunk, *args, **options) for chunk in (0, CHUNK))
    for before, after in zip(plain, chunked, strict=True):
        assert before[0] == pytest.approx(after[0], abs=1e-6)
        assert len(before[1]) > 0
        for name, value in before[1].items():
            torch.testing.assert_close(after[1][name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: n + text)
        assert before[2:] == (0, 0)
    first, last = chunked[0][2], chunked[-1][2]
    # The first stage runs its step once without weights.
    assert last > 0
    assert first < last if layout in ("pipeline x tensor", "interleaved") else first > 0
    assert not any(wholes for *_, wholes in chunked)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ddp", "zero3", "sequence", "pipeline x tensor", "interleaved", "context"])
def test_layouts(ranks: Callable[..., list[Any]], layout: str) -> None:
    compared(ranks, layout)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "kind", "adapter"),
    [("zero3", FineTuneModule, LORA), ("tensor", PreferenceModule, None), ("pipeline", PreferenceModule, LORA)],
)
def test_adapters_and_preferences(
    ranks: Callable[..., list[Any]], layout: str, kind: type[FineTuneModule], adapter: dict[str, Any] | None
) -> None:
    compared(ranks, layout, kind, adapter=adapter)


def batch_of(vocabulary: int, length: int) -> dict[str, Tensor]:
    """Two random rows whose first quarter is not trained."""
    ids = torch.randint(0, vocabulary, (2, length))
    labels = ids.roll(-1, 1)
    labels[:, : length // 4] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(2, -1)}


def step(base: Path, chunk: int, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step."""
    module = FineTuneModule(str(base), meta=False, loss_chunk=chunk)
    with patch.object(module, "log"):
        loss = module.training_step(batch, 0)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "bf16"), [("llama", True), ("gemma2", False), ("cohere", False)])
def test_logits_are_scaled_and_cast_in_chunks(tmp_path: Path, family: str, bf16: bool) -> None:
    """Gemma 2 caps its logits, Cohere scales them; autocast computes them in 16 bits."""
    base, batch = write_base(tmp_path / "base", family), batch_of(264, 40)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        patch.object(chunked_logits, "_report_whole") as made_whole,
    ):
        (loss, gradients), (wanted, plain) = step(base, 7, batch), step(base, 0, batch)
    assert not made_whole.called
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == plain.keys()
    for name, value in plain.items():
        # A gradient in bf16 has 8 bits.
        limit = float(value.abs().max()) / 128 if bf16 else 1e-6
        torch.testing.assert_close(gradients[name], value, rtol=1e-6, atol=limit)


def test_whole_logits_if_needed(tmp_path: Path) -> None:
    module = FineTuneModule(str(write_base(tmp_path / "base")), meta=False, loss_chunk=7).eval()
    batch, said = batch_of(264, 40), chunked_logits._report_whole
    with patch.object(chunked_logits, "_report_whole", side_effect=said) as made_whole:
        logits = module.logits(batch)
        assert isinstance(logits, chunked_logits.ChunkedLogits)
        found = logits.log_softmax(-1)[0, 3] + logits[1, 3]
    assert made_whole.call_count == 1
    module.loss_chunk = 0
    plain = module.logits(batch)
    assert type(plain) is Tensor
    assert torch.equal(found, plain.log_softmax(-1)[0, 3] + plain[1, 3])


def test_negative_chunk_is_refused() -> None:
    (problem,) = checks.check(compose("hf_causal_lm", ["module.loss_chunk=-1"]), 1)
    assert problem.startswith("module.loss_chunk=-1 (allowed: 0 = off")


def test_chunked_loss_needs_less_memory(tmp_path: Path) -> None:
    base, batch = write_base(tmp_path / "base", vocab_size=8192), batch_of(8192, 256)

    def peak(chunk: int) -> int:
        with LiveBytes() as live:
            step(base, chunk, batch)
        return live.peak

    whole_logits = 4 * 512 * 8192
    plain, chunked = peak(0), peak(32)
    assert plain > 3 * whole_logits
    assert chunked < 0.6 * plain
