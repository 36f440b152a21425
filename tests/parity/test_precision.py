"""Every precision under every strategy: losses, dtypes, equality across ranks, skipped steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.parity.harness import (
    Case,
    Recorder,
    bare_loop,
    data_parallel_names,
    make_loader,
    make_trainer,
    whole,
    world_size,
)
from tests.parity.modules import LanguageModel, make_module
from trainwright.strategies.contract.gradients import local_tensor

PRECISIONS = ("32", "bf16-mixed", "bf16-true", "16-mixed")
GLOBAL_BATCH = 16
# The last step reads the batch of the first; bf16 learns so slowly that one epoch more is needed to see it.
STEPS = {"32": 4, "bf16-mixed": 4, "bf16-true": 7, "16-mixed": 4}
STRATEGIES = [name for name in data_parallel_names() if name != "single"]
# How far a loss may be from that of one process in fp32: the mantissa of bf16 has 8 bits, that of fp16 has 11.
TOLERANCES = {"32": 1e-5, "bf16-mixed": 0.02, "bf16-true": 0.05, "16-mixed": 0.005}


class Dtypes(pl.Callback):
    """Dtypes of a block's activations."""

    def __init__(self) -> None:
        self.activations: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: LanguageModel) -> None:
        pl_module.decoder.blocks[0].attention.register_forward_hook(self._look)

    def _look(self, module: Any, args: Any, output: Tensor) -> None:
        self.activations.add(str(output.dtype).removeprefix("torch."))


def fit(strategy: str, module: pl.LightningModule, samples: int, accumulation: int = 1, **options: Any) -> Any:
    trainer = make_trainer(strategy, global_batch_size=GLOBAL_BATCH, **options)
    trainer.fit(module, make_loader(samples, GLOBAL_BATCH // (world_size() * accumulation)))
    return trainer


def train_in(strategy: str, precision: str, accumulation: int) -> dict[str, Any]:
    module, recorder, dtypes = make_module("decoder-sgd"), Recorder(), Dtypes()
    options = {"precision": precision, "max_steps": STEPS[precision], "gradient_clip_val": 1.0}
    trainer = fit(strategy, module, 48, accumulation, callbacks=[recorder, dtypes], **options)
    state = [t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor)]
    return {
        "losses": recorder.record.losses,
        "steps": trainer.global_step,
        "parameters": {name: value.float() for name, value in recorder.record.parameters.items()},
        "held": {str(local_tensor(p).dtype).removeprefix("torch.") for p in module.parameters()},
        "state": {str(t.dtype).removeprefix("torch.") for t in state},
        "activations": dtypes.activations,
    }


# On two ranks every precision under every strategy. What more ranks change (how rows are split, how much is summed up)
# does not ask for the precision: there each strategy and each precision stands once, together with another on four than
# on eight ranks.
ON_FOUR = list(zip(STRATEGIES, itertools.cycle(PRECISIONS[1:] + PRECISIONS[:1]), strict=False))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("ranks_used", "strategy", "precision"),
    [*itertools.product([2], STRATEGIES, PRECISIONS), *((4, *pair) for pair in ON_FOUR)],
)
def test_every_precision_under_every_strategy(ranks, strategy, precision, ranks_used):
    results = ranks(train_in, ranks_used, strategy, precision, 2, timeout=120)
    alone = bare_loop(Case("decoder-sgd", global_batch_size=GLOBAL_BATCH, steps=STEPS[precision], clipping="norm-1"))
    stored = "bfloat16" if precision == "bf16-true" else "float32"
    computed = {"32": "float32", "16-mixed": "float16"}.get(precision, "bfloat16")
    for found in results:
        assert found["steps"] == STEPS[precision]
        assert found["held"] == {stored}
        assert found["state"] == {stored}
        assert found["activations"] == {computed}
        assert found["losses"] == results[0]["losses"]
        for name, value in found["parameters"].items():
            assert torch.equal(value, results[0]["parameters"][name]), f"{name} drifts apart"
        assert found["losses"] == pytest.approx(alone.losses, rel=TOLERANCES[precision])
        assert found["losses"][-1] < found["losses"][0]


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "precision"), [("zero1", "bf16-mixed"), ("zero3", "16-mixed")])
def test_eight_ranks(ranks, strategy, precision):
    for found in ranks(train_in, 8, strategy, precision, 1, timeout=240):
        assert found["steps"] == STEPS[precision]
        assert all(math.isfinite(loss) for loss in found["losses"])


# ---- Skipped steps --------------------------------------------------------------------------------------------------


class Exploding(LanguageModel):
    """The gradient of one sample in the third step is infinite: on the one rank that reads it."""

    factor = 1e36  # large enough to overflow once the loss is scaled
    rows = slice(None)  # of a weight whose gradient overflows

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if (batch["index"] == 2 * GLOBAL_BATCH + 3).any():
            loss = loss + self.factor * self.decoder.head.weight[self.rows].square().sum()
        return loss


class Scales(pl.Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: LanguageModel, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append(whole(pl_module.decoder.norm.weight))


def explode(
    strategy: str, accumulation: int, clip: float | None, rows: slice = slice(None)
) -> tuple[list[float], list[bool], bool]:
    torch.manual_seed(11)
    module, scales = Exploding(), Scales()
    module.rows = rows
    options = {"precision": "16-mixed", "max_steps": 6, "gradient_clip_val": clip, "callbacks": [scales]}
    fit(strategy, module, 96, accumulation, **options)
    stepped = [not torch.equal(a, b) for a, b in zip(scales.weights, scales.weights[1:], strict=False)]
    return scales.scales, stepped, all(bool(torch.isfinite(whole(p)).all()) for p in module.parameters())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.5)])
def test_all_ranks_skip_the_same_steps(ranks, reference, accumulation, clip):
    scales, stepped, finite = expected = reference(explode, "single", 1, clip)
    assert finite
    assert stepped == [True, False, True, True, True], "the third step of six is skipped"
    assert scales[1] > scales[2] == scales[1] / 2
    # The one rank that reads the sample is one of two or of four: ranks agree on a step, however it is made up.
    ranks_used = {1: 4, 2: 2}[accumulation]
    for strategy in STRATEGIES:
        assert ranks(explode, ranks_used, strategy, accumulation, clip) == [expected] * ranks_used, strategy


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_all_ranks_skip_a_step_that_overflows_in_one_shard(ranks, reference, strategy):
    # The first row is the first rank's once gradients were reduced to shards: the other sees finite numbers alone.
    scales, stepped, finite = expected = reference(explode, "single", 1, None, slice(1))
    assert finite
    assert stepped == [True, False, True, True, True], "the third step of six is skipped"
    assert ranks(explode, 2, strategy, 1, None, slice(1)) == [expected] * 2


def clip_nonfinite(strategy: str) -> str:
    torch.manual_seed(11)
    trainer = make_trainer(
        strategy, global_batch_size=GLOBAL_BATCH, max_steps=6, gradient_clip_val=0.5, error_if_nonfinite=True
    )
    module = Exploding()
    module.factor = 1e38
    with pytest.raises(RuntimeError, match="norm of the gradients is") as error:
        trainer.fit(module, make_loader(96, GLOBAL_BATCH // world_size()))
    return f"{trainer.global_step} {error.value}"


@pytest.mark.parametrize("strategy", data_parallel_names())
def test_error_if_nonfinite_stops_all_ranks_at_the_same_step(ranks, strategy):
    messages = ranks(clip_nonfinite, 1 if strategy == "single" else 2, strategy)
    assert len(set(messages)) == 1
    assert messages[0].startswith("2 The norm of the gradients is ")
    assert "error_if_nonfinite=False" in messages[0]
